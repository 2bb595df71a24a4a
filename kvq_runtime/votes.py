"""Collect what each layer's attention says about the window's edge, and decide at the start of the next forward pass.

The decision of a forward pass depends on the one that ended where it begins, and on nothing else: a pass that is
undone and made again, or cropped away, decides as it did, or has no say. See `stages/window.py` for the rule.
"""

import torch
from torch import Tensor

from kvq_runtime.history import History
from kvq_runtime.stages import window
from kvq_runtime.stages.window import Dynamic


class Votes:
    """The dynamic window of one cache that holds `held` layers."""

    def __init__(self, setting: Dynamic, history: History, held: int):
        self.setting, self.history, self.held = setting, history, held
        self._gaps: dict[int, dict[int, Tensor]] = {}  # by tokens at the end of the pass, by layer, [B]

    def hear(self, layer: int, p_BHGTT: Tensor, slots: range) -> None:
        """Take the weights of some queries of a layer on all tokens; those of the newest query, which come last, count.

        The edge is that of the window as this forward pass leaves it.
        """
        stream, timeline = self.history.layers[layer][0], self.history.timeline
        edge = (stream.blocks + stream.due) * stream.side.block
        found = window.gaps(p_BHGTT[..., -1, :], edge, stream.side.sinks, timeline.real_BT)
        self._gaps.setdefault(stream.length, {})[layer] = found

    def decide(self, before: int, count: int) -> None:
        """Set how many recent tokens each stream keeps in a forward pass of `count` tokens after `before`."""
        streams = [stream for pair in self.history.layers.values() for stream in pair]
        due = any(stream.beyond(stream.side.recent, count) for stream in streams)
        gaps = [gap_B for _, gap_B in sorted(self._gaps.get(before, {}).items())]
        heard = due and len(gaps) == self.held  # else nothing is asked of the device
        keep = heard and window.keep(torch.stack([gap_B.to(gaps[-1].device) for gap_B in gaps]))
        for stream in streams:
            recent, block = stream.side.recent, stream.side.block
            stream.recent = self.setting.most(recent, block) if keep else recent

    def release(self) -> None:
        """Forget the pass before this one, which has ended and will not be made again."""
        self._gaps = {at: gaps for at, gaps in self._gaps.items() if at == max(self._gaps)}

    def crop(self, length: int) -> None:
        """Forget what was said after the first `length` tokens."""
        self._gaps = {at: gaps for at, gaps in self._gaps.items() if at <= length}

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        self._gaps = {
            at: {layer: gap_B[rows.to(gap_B.device)] for layer, gap_B in gaps.items()}
            for at, gaps in self._gaps.items()
        }

    @property
    def tensors(self) -> list[Tensor]:
        """What is stored per sequence."""
        return [gap_B for gaps in self._gaps.values() for gap_B in gaps.values()]
