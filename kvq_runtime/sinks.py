"""Keep each row's first real tokens exact: copied aside at arrival, put back over the block that holds their place."""

from torch import Tensor

from kvq_runtime.stream import Stream
from kvq_runtime.timeline import Timeline


def keep(stream: Stream, timeline: Timeline, x_BTC: Tensor) -> None:
    """Copy aside those of the newest tokens, which the stream has just appended, that are sinks."""
    sinks, first = stream.side.sinks, stream.length - x_BTC.shape[1]
    if sinks == 0 or first >= timeline.complete(sinks, first):
        return
    slots, arrived = timeline.sink_slots(sinks, len(x_BTC), x_BTC.device)
    here = arrived & (slots >= first) & (slots < stream.length)
    if bool(here.any()):
        rows, ranks = here.nonzero(as_tuple=True)
        stream.keep_sinks(rows, ranks, x_BTC[rows, slots[rows, ranks] - first])


def put(stream: Stream, timeline: Timeline, out_BTC: Tensor, start: int = 0) -> None:
    """Write the sinks over decoded tokens, the first of which is in slot `start`."""
    sinks = stream.side.sinks
    if sinks == 0 or (timeline.real_BT is None and start >= sinks):
        return
    if timeline.real_BT is None:
        stop = min(sinks, start + out_BTC.shape[1])
        out_BTC[:, : stop - start] = stream.sinks_BSC[:, start:stop]
        return
    slots, arrived = timeline.sink_slots(sinks, len(out_BTC), out_BTC.device)
    rows, ranks = (arrived & (slots >= start) & (slots < start + out_BTC.shape[1])).nonzero(as_tuple=True)
    out_BTC[rows, slots[rows, ranks] - start] = stream.sinks_BSC[rows, ranks]
