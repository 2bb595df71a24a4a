"""Collect what each layer's attention says about the window's edge, and decide at the start of the next forward pass.

The decision of a forward pass depends on the one that ended where it begins, and on nothing else: a pass that is
undone and made again, or cropped away, decides as it did, or has no say. See `stages/window.py` for the rule.
"""

import math

import torch
from torch import Tensor

from kvq_runtime.history import History
from kvq_runtime.stages import window
from kvq_runtime.stages.window import Dynamic
from kvq_runtime.stream import Stream


class Votes:
    """The dynamic window of one cache that holds `held` layers."""

    def __init__(self, setting: Dynamic, history: History, held: int):
        self.setting, self.history, self.held = setting, history, held
        self._gaps: dict[int, dict[int, Tensor]] = {}  # by tokens at the end of the pass, by layer, [B]

    def hear(self, layer: int, p_BHGTT: Tensor, slots: range) -> None:
        """Take the weights of some queries of a layer on all tokens; those of the newest query, which come last, count.

        The edge is that of the window as this forward pass leaves it.
        """
        stream = self.history.layers[layer][0]
        found = window.gaps(p_BHGTT[..., -1, :], _edge(stream), stream.side.sinks, self.history.timeline.real_BT)
        self._gaps.setdefault(stream.length, {})[layer] = found

    def infer(self, layer: int, q_BHD: Tensor, level_BH: Tensor, scale: float) -> None:
        """As `hear`, from the newest query and log2 Σ 2^s of its scores: both tokens that count are exact."""
        stream = self.history.layers[layer][0]
        real_BT, heads = self.history.timeline.real_BT, self.history.geometry.kv_heads
        first_B, heard_B = window.edges(_edge(stream), stream.side.sinks, real_BT, q_BHD, stream.length)
        newest_B = torch.full_like(first_B, stream.length - 1)
        places_B2 = (torch.stack([newest_B, first_B], 1) - stream.encoded).clamp(min=0)
        rows_B = torch.arange(len(q_BHD), device=q_BHD.device)
        k_B2HD = stream.window_BTC[rows_B[:, None], places_B2].float().unflatten(2, (heads, -1))
        s_BHG2 = q_BHD.float().unflatten(1, (heads, -1)) @ k_B2HD.permute(0, 2, 3, 1) * (scale / math.log(2))
        p_BHG2 = (s_BHG2 - level_BH.unflatten(1, (heads, -1))[..., None]).exp2()
        gap_B = (p_BHG2[..., 0] - p_BHG2[..., 1]).mean((1, 2)).where(heard_B, torch.nan)
        self._gaps.setdefault(stream.length, {})[layer] = gap_B

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


def _edge(stream: Stream) -> int:
    """The first slot that stays exact."""
    return (stream.blocks + stream.due) * stream.side.block
