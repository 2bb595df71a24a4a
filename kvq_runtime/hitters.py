"""Keep the tokens that attention looks at most, and drop the others before they are encoded.

    mass_t = Σ over layers, query heads and queries of the attention that token t got / queries that could see it

The newest tokens are always held, and so is every sink. Of those that have left the recent window, `block` at a time,
and of those kept before but not encoded yet, the ones with the largest mass are kept, as many as the recipe's share of
all tokens seen allows. One set serves all layers and heads, because a layer is predicted from the one below, token by
token. It is chosen at the end of a forward pass, so that a prompt is exact throughout its own; each row has its own
set, of one size. What is encoded is never dropped.

Source: Zhang et al., 2023 (H2O), algorithm 1; a share of 20% as in Shutova et al., 2025 (AQUA-KV), table 7.
Differs: one set for all heads and layers, theirs is by head; mass by query, theirs is the sum, which favours tokens
that came early; an encoded token stays, theirs may be dropped at any step; positions are the tokens' own.
"""

import torch
from torch import Tensor

from kvq_runtime.flush import encode, refuse_nan
from kvq_runtime.history import History
from kvq_runtime.stages.select import Heavy
from kvq_runtime.timeline import Timeline


class Hitters:
    """The attention that the tokens of the window (W of them, in every layer) have got so far.

    decided   tokens, the first ones, that have been kept or dropped
    fresh_BW  what layers have added in this forward pass
    """

    def __init__(self, select: Heavy, timeline: Timeline, sinks: int, recent: int, block: int):
        self.select, self.timeline, self.sinks, self.recent, self.block = select, timeline, sinks, recent, block
        self.decided = 0
        self.mass_BW = self.queries_BW = self.fresh_BW = torch.empty(0, 0)

    def begin(self, batch: int, count: int, device: torch.device) -> None:
        """Make room for `count` new tokens."""
        held = self.mass_BW.shape[1]
        if held == 0:
            self.mass_BW = self.queries_BW = torch.zeros(batch, 0, device=device)
        self.fresh_BW = torch.zeros(batch, held + count, device=device)

    def hear(self, layer: int, p_BHGTT: Tensor, slots: range) -> None:
        """Take the weights of some queries of a layer on all tokens; those of padded queries do not count."""
        p_BTT = p_BHGTT[..., p_BHGTT.shape[-1] - self.fresh_BW.shape[1] :].sum((1, 2))
        if self.timeline.real_BT is not None:
            p_BTT *= self.timeline.real_BT[:, slots.start : slots.stop, None]
        self.fresh_BW += p_BTT.sum(1)

    def commit(self) -> None:
        """Count a forward pass that all layers have finished."""
        batch, width = self.fresh_BW.shape
        count = width - self.mass_BW.shape[1]
        asked = self.fresh_BW.new_ones(batch, count)
        if self.timeline.real_BT is not None:
            asked = self.timeline.real_BT[:, self.timeline.length - count :].to(asked)
        after = asked.flip(1).cumsum(1).flip(1)
        old = self.queries_BW + asked.sum(1, keepdim=True)
        self.mass_BW = torch.nn.functional.pad(self.mass_BW, (0, count)) + self.fresh_BW
        self.queries_BW = torch.cat([old, after], 1)
        self.fresh_BW = self.fresh_BW[:, :0].clone()

    def left(self, seen: int) -> int:
        """How many of the tokens seen have left the recent window, in whole blocks."""
        return max(0, seen - self.recent) // self.block * self.block

    def choose(self) -> tuple[Tensor, int]:
        """Which tokens of the window stay, [B, K] in rising order, and how many of them have left the recent window."""
        batch, width = self.mass_BW.shape
        left, encoded = self.left(self.timeline.seen), self.timeline.length - width
        old = width - (self.timeline.seen - left)
        rate_BW = (self.mass_BW / self.queries_BW.clamp(min=1))[:, :old]
        if self.timeline.real_BT is not None:
            rate_BW = rate_BW.where(self.timeline.real_BT[:, encoded : encoded + old], -1.0)
        slots, arrived = self.timeline.sink_slots(self.sinks, batch, rate_BW.device)
        places = torch.arange(encoded, encoded + old, device=rate_BW.device)
        sink_BW = ((slots[:, None] == places[:, None]) & arrived[:, None]).any(-1)
        least = int(sink_BW.sum(1).max()) if batch else 0
        count = min(old, max(self.select.held(left, self.sinks, self.recent) - encoded, least))
        order = rate_BW.masked_fill(sink_BW, torch.inf).argsort(dim=1, descending=True, stable=True)
        newer = torch.arange(old, width, device=rate_BW.device).expand(batch, -1)
        self.decided = left
        return torch.cat([order[:, :count].sort(1).values, newer], 1), count

    def keep(self, kept_BK: Tensor, encoded: int) -> None:
        """Keep these tokens of the window, less the first `encoded` of them, which leave it."""
        self.mass_BW, self.queries_BW = (x.gather(1, kept_BK)[:, encoded:] for x in (self.mass_BW, self.queries_BW))
        self.mass_BW, self.queries_BW = self.mass_BW.clone(), self.queries_BW.clone()

    def crop(self, seen: int, width: int) -> None:
        """Keep `seen` tokens, `width` of them in the window; a token that was decoded into it starts from nothing."""
        again = seen < self.decided
        self.decided = min(self.decided, seen // self.block * self.block)
        for name in ("mass_BW", "queries_BW"):
            old = getattr(self, name)
            setattr(self, name, old.new_zeros(len(old), width) if again else old[:, :width].clone())
        self.fresh_BW = self.fresh_BW[:, :0].clone()

    def take_rows(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        for name in ("mass_BW", "queries_BW", "fresh_BW"):
            setattr(self, name, getattr(self, name).index_select(0, rows.to(self.mass_BW.device)))

    @property
    def tensors(self) -> list[Tensor]:
        """What is stored."""
        return [self.mass_BW, self.queries_BW, self.fresh_BW]


def decide(hitters: Hitters, history: History, last: int) -> None:
    """At the end of a forward pass, drop what attention passes by, and encode what it does not, layer by layer.

    last   the highest layer the cache holds
    """
    hitters.commit()
    timeline, block = history.timeline, hitters.block
    if hitters.left(timeline.seen) <= hitters.decided:
        return
    for layer, pair in history.layers.items():
        for stream in pair:
            if stream.sinks_BSC.is_cuda:  # before anything is dropped: that cannot be undone
                refuse_nan(layer, stream, timeline, stream.window_BTC, stream.encoded)
    encoded = timeline.length - hitters.mass_BW.shape[1]
    kept_BK, left = hitters.choose()
    blocks = left // block
    if kept_BK.shape[1] < hitters.mass_BW.shape[1]:
        first = torch.arange(encoded, device=kept_BK.device).expand(len(kept_BK), -1)
        timeline.drop(torch.cat([first, kept_BK + encoded], 1))
        for stream in (stream for pair in history.layers.values() for stream in pair):
            stream.drop(kept_BK)
    hitters.keep(kept_BK, blocks * block)
    for layer in sorted(history.layers):
        encode(history, layer, (blocks, blocks))
        for stream in history.layers[layer]:
            stream.trim()
        history.forget(layer, layer == last)
