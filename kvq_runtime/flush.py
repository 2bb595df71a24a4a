"""Encode the oldest tokens of a layer's windows, one whole block at a time, when they are due."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvq_runtime import rope
from kvq_runtime.codec import Codec, Context
from kvq_runtime.history import History
from kvq_runtime.stream import SLAB, Stream
from kvq_runtime.timeline import Timeline


def flush(history: History, layer: int, before: int) -> None:
    """Encode every block that is due; an undone forward pass finds the window of the first `before` tokens again."""
    streams = history.layers[layer]
    if not (streams[0].due or streams[1].due):
        return
    for stream in streams:
        if stream.due:
            stream.keep(before)
            if stream.sinks_BSC.is_cuda:  # here, where the device is waited for anyway
                due = stream.window_BTC[:, : stream.due * stream.side.block]
                refuse_nan(layer, stream, history.timeline, due, stream.encoded)
    encode(history, layer, [stream.due for stream in streams])


def encode(history: History, layer: int, due: Sequence[int]) -> None:
    """Encode so many of the oldest blocks in the windows of a layer's keys and values."""
    if history.recipe.chained:
        for _ in range(due[0]):
            _encode_chained(history, layer)
        return
    for stream, count in zip(history.layers[layer], due, strict=True):
        most = SLAB if _in_one(stream) else 1
        for done in range(0, count, most):
            _encode_together(history, stream, min(most, count - done))


def _in_one(stream: Stream) -> bool:
    """Whether one launch encodes many blocks, each as it would alone; a matrix product may round them differently."""
    return isinstance(stream.codec, Codec) and stream.codec.chains(stream.sinks_BSC) and stream.outliers is None


def _encode_together(history: History, stream: Stream, count: int) -> None:
    """Encode so many of the window's oldest blocks at once."""
    inputs = [_block_input(history, stream, ahead) for ahead in range(count)]
    x_NTC, context = inputs[0]
    if count > 1:
        x_NTC = torch.cat([x_BTC for x_BTC, _ in inputs])
        if context.rope is not None:
            cos, sin = zip(*(context.rope for _, context in inputs), strict=True)  # type: ignore[misc]
            context = Context(rope=(torch.cat(cos), torch.cat(sin)))
    fields = stream.codec.encode(x_NTC, context)
    for block in range(count):
        part = {name: field.unflatten(0, (count, -1))[block] for name, field in fields.items()}
        stream.store(part | _landmarks(history, stream))


def refuse_nan(layer: int, stream: Stream, timeline: Timeline, x_BTC: Tensor, start: int) -> None:
    """Raise if a real token, from slot `start` on, holds a NaN or an infinity."""
    if math.isfinite(x_BTC.sum().item()):
        return
    bad_BT = ~torch.isfinite(x_BTC).all(-1)
    if timeline.real_BT is not None:
        bad_BT &= timeline.real_BT[:, start : start + x_BTC.shape[1]]
    if bool(bad_BT.any()):
        slot = start + int(bad_BT.any(0).int().argmax())
        raise ValueError(
            f"layer {layer}, block {slot // stream.side.block}: NaN or infinity in the model's {stream.codec.half}s "
            f"at token {slot + timeline.dropped}; the cache keeps the tokens before this forward pass"
        )


def _encode_chained(history: History, layer: int) -> None:
    """Encode the oldest block of keys, then of values, from the decoded block of the layers below."""
    keys, values = history.layers[layer]
    block = keys.blocks
    below = history.below(layer, block)
    k_BTC, context = _block_input(history, keys)
    v_BTC, _ = _block_input(history, values)
    k_fields = keys.codec.encode(k_BTC, Context(context.rope, None, below))
    decoded = keys.codec.decode(k_fields, Context(below=below))
    v_fields = values.codec.encode(v_BTC, Context(keys=decoded, below=below))
    if layer + 1 < history.geometry.layers:
        v_decoded = values.codec.decode(v_fields, Context(keys=decoded, below=below))
        history.add(layer, block, (decoded, v_decoded))
    keys.store(k_fields)
    values.store(v_fields)


def _landmarks(history: History, stream: Stream) -> dict[str, Tensor]:
    """What marks the chunks of the window's oldest block, where a recipe reads by chunks."""
    if stream.outliers is None:
        return {}
    size, start = stream.side.block, stream.encoded
    valid_BT = history.timeline.valid(start, start + size, stream.side.sinks).to(stream.sinks_BSC.device)
    return stream.outliers.add(stream.blocks, stream.window_BTC[:, :size], valid_BT)


def _block_input(history: History, stream: Stream, ahead: int = 0) -> tuple[Tensor, Context]:
    """The window's oldest block, or one after it, as the codec wants it: sinks and padding filled, RoPE undone."""
    recipe, timeline, half = history.recipe, history.timeline, stream.codec.half
    size, start = stream.side.block, (stream.blocks + ahead) * stream.side.block
    x_BTC = stream.window_BTC[
        :, ahead * size : (ahead + 1) * size
    ].clone()  # what `exact` keeps: the window's place is the sinks' next
    source = timeline.source(start, start + size, stream.side.sinks)
    if source is not None:
        source = source.to(x_BTC.device)
        taken = source.clamp(min=0)[..., None].expand(len(x_BTC), -1, x_BTC.shape[-1])
        x_BTC = x_BTC.gather(1, taken).where((source >= 0)[..., None], 0.0)
    if half == "value" or "positions" not in recipe.needs:
        return x_BTC, Context()
    cos, sin = timeline.rope(start, start + size)
    if source is not None:
        source = source.expand(max(len(source), len(cos)), -1)
        turned = source.clamp(min=0)[..., None]
        cos, sin = (t.expand(len(source), -1, -1).gather(1, turned.expand(-1, -1, t.shape[-1])) for t in (cos, sin))
        cos, sin = (t.where((source >= 0)[..., None], one) for t, one in ((cos, 1.0), (sin, 0.0)))
    if recipe.position == "pre":
        exact = x_BTC.dtype
        x_BTC = rope.unrotate(x_BTC.unflatten(-1, (history.geometry.kv_heads, -1)), cos, sin).flatten(-2)
        x_BTC = x_BTC.to(exact) if stream.codec.side.quantize.kind == "exact" else x_BTC
    return x_BTC, Context(rope=(cos.expand(len(x_BTC), -1, -1), sin.expand(len(x_BTC), -1, -1)))
