"""Hold the heavy hitters (H2O): the tokens that get the most attention; drop the others before they are encoded.

    mass_t = Σ over layers, query heads and queries of the attention that token t got / queries that could see it

The newest tokens are always held, and so is every sink. Of those that have left the recent window, `block` at a time,
and of those kept before but not encoded yet, the ones with the largest mass are kept, as many as the recipe's share of
all tokens seen allows. One set serves all layers and heads, because a layer is predicted from the one below, token by
token. It is chosen at the end of a forward pass, so that a prompt is exact throughout its own; each row has its own
set, of one size. What is encoded is never dropped.

The newest tokens are those of the recipe's window, a fixed number, or, with `recent`, a share of the tokens seen if
that is more; these stay exact until they are old enough to be chosen from, since what is encoded cannot be dropped.

Source: Zhang et al., 2023 (H2O), algorithm 1, whose budget is half of heavy and half of recent tokens (`recent` half of
`share`); a share of 20% as in Shutova et al., 2025 (AQUA-KV), table 7.
Differs: without `recent`, all of the share beyond the window is of heavy tokens; one set for all heads and layers,
theirs is by head; mass by query, theirs is the sum, which favours tokens that came early; an encoded token stays,
theirs may be dropped at any step; positions are the tokens' own.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry, Window
from kvq_runtime.ops import dispatch
from kvq_runtime.policies.policy import CacheParts, Policy, PolicySetting
from kvq_runtime.store.step import Step
from kvq_runtime.store.storage import storage_bytes


@dataclass(frozen=True)
class HeavyHitters(PolicySetting):
    """Hold the tokens that attention looks at most, H2O's heavy hitters.

    share    of the tokens seen that are held, sinks and the newest among them; over 0, at most 1
    recent   of the tokens seen that are the newest and held as such, if more than the window's; less than `share`
    """

    kind: ClassVar[str] = "heavy"
    papers: ClassVar[tuple[str, ...]] = ("2306.14048",)
    slot: ClassVar[str] = "select"
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    arrival_dependent: ClassVar[bool] = True
    unpacked: ClassVar[str | None] = "it keeps tokens by their attention weights, which the kernel does not hand out"
    later: ClassVar[frozenset[str]] = frozenset({"recent"})
    share: float = 0.2
    recent: float = 0.0

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share}; use a number over 0 and at most 1")
        if not 0 <= self.recent < self.share:
            raise ValueError(f"recent={self.recent}; use at least 0 and less than share={self.share}")

    def check(self, recipe: Any, geometry: Geometry | None) -> None:
        """Raise a ValueError if the recipe cannot have it."""
        if recipe.policy("window") is not None:
            raise ValueError("tokens are selected behind a fixed window; drop select, or window")

    def newest(self, seen: int, window: Window) -> int:
        """How many of the tokens seen are the newest, which are always held."""
        return max(window.recent, math.ceil(self.recent * seen - 1e-9))

    def left(self, seen: int, window: Window) -> int:
        """How many of the tokens seen are older than that, in whole blocks."""
        return max(0, seen - self.newest(seen, window)) // window.block * window.block

    def held(self, left: int, sinks: int, recent: int) -> int:
        """How many are held of the first `left` tokens, with `recent` newer ones behind them: sinks at least."""
        budget = math.ceil(self.share * (left + recent) - 1e-9) - recent
        return min(left, max(budget, sinks))

    def held_share(self) -> float:
        return self.share

    def chosen(self, tokens: int, window: Window) -> tuple[int, int]:
        """The share of the tokens behind the window, in whole blocks; the rest of them is exact beside the newest."""
        left = self.left(tokens, window)
        held = self.held(left, window.sinks, self.newest(tokens, window))
        return held // window.block, held % window.block + tokens - left

    def held_bytes(self, geometry: Geometry, tokens: int, window: Window, dtype: torch.dtype) -> dict[str, int]:
        """Which token each slot holds, and of those that are exact the attention they got and who could see them."""
        blocks, exact = self.chosen(tokens, window)
        return {"timeline": 4 * (blocks * window.block + exact), "selection": 8 * exact}

    def policy(self, cache: CacheParts) -> Policy:
        return HeavyHittersPolicy(self, cache)


class HeavyHittersPolicy(Policy):
    """The attention that the tokens of the window (W of them, in every layer) have got so far.

    decided     tokens, the first ones, that have been kept or dropped
    mass_BW     Σ of the weights that each token got          queries_BW   queries that could see it
    fresh_BW    what layers have added to the mass in this forward pass
    """

    weighs = "all"

    def __init__(self, setting: HeavyHitters, cache: CacheParts):
        self.setting, self.cache, self.positions, self.window = setting, cache, cache.positions, cache.recipe.window
        self._restore(0, *(torch.empty(0, 0) for _ in range(3)))

    def begin(self, step: Step) -> None:
        step.on_undo(self._restore, self.decided, self.mass_BW, self.queries_BW, self.fresh_BW)
        held = self.mass_BW.shape[1]
        if held == 0:
            self.mass_BW = self.queries_BW = torch.zeros(step.batch, 0, device=step.device)
        self.fresh_BW = torch.zeros(step.batch, held + step.count, device=step.device)

    def weighed(self, layer: int, p_BHGTT: Tensor, slots: range) -> None:
        """Weights of padded queries do not count."""
        if not self.fresh_BW.shape[1]:
            return
        p_BTT = p_BHGTT[..., p_BHGTT.shape[-1] - self.fresh_BW.shape[1] :].sum((1, 2))
        if self.positions.real_BT is not None:
            p_BTT *= self.positions.real_BT[:, slots.start : slots.stop, None]
        self.fresh_BW += p_BTT.sum(1)

    def may_encode(self, layer: int) -> bool:
        """What is encoded is chosen at the end of the pass, for all layers."""
        return False

    def end(self, step: Step) -> None:
        """Drop the tokens that got the least attention, and encode the others, layer by layer."""
        self._count_pass()
        if self.left(self.positions.seen) <= self.decided:
            return
        stores, encoder = self.cache.stores, self.cache.encoder
        for layer, store in stores.items():
            if dispatch.is_waited_for(store.buffer_2BTC):
                encoder.watch(layer, store.window_2BTC, store.encoded)
        encoder.refuse_nan()
        encoded = self.positions.length - self.mass_BW.shape[1]
        kept_BK, left = self.choose()
        blocks = left // self.window.block
        if kept_BK.shape[1] < self.mass_BW.shape[1]:
            first = torch.arange(encoded, device=kept_BK.device).expand(len(kept_BK), -1)
            self.positions.drop(torch.cat([first, kept_BK + encoded], 1))
            for store in stores.values():
                store.drop(kept_BK)
        leaving = blocks * self.window.block
        self.mass_BW, self.queries_BW = (
            x.gather(1, kept_BK)[:, leaving:].clone() for x in (self.mass_BW, self.queries_BW)
        )
        for layer in sorted(stores):
            encoder.encode(layer, blocks)
            stores[layer].trim()
            self.cache.decoder.forget(layer, layer == self.cache.layers[-1])

    def left(self, seen: int) -> int:
        """How many of the tokens seen are old enough to be chosen from, in whole blocks."""
        return self.setting.left(seen, self.window)

    def choose(self) -> tuple[Tensor, int]:
        """Which tokens of the window stay, [B, K] in rising order, and how many of them have left the recent window."""
        batch, width = self.mass_BW.shape
        left, encoded = self.left(self.positions.seen), self.positions.length - width
        old = width - (self.positions.seen - left)
        rate_BW = (self.mass_BW / self.queries_BW.clamp(min=1))[:, :old]
        if self.positions.real_BT is not None:
            rate_BW = rate_BW.where(self.positions.real_BT[:, encoded : encoded + old], -1.0)
        sinks, recent = self.window.sinks, self.setting.newest(self.positions.seen, self.window)
        slots, arrived = self.positions.sink_slots(sinks, batch, rate_BW.device)
        places = torch.arange(encoded, encoded + old, device=rate_BW.device)
        sink_BW = ((slots[:, None] == places[:, None]) & arrived[:, None]).any(-1)
        least = int(sink_BW.sum(1).max()) if batch else 0
        count = min(old, max(self.setting.held(left, sinks, recent) - encoded, least))
        order = rate_BW.masked_fill(sink_BW, torch.inf).argsort(dim=1, descending=True, stable=True)
        newer = torch.arange(old, width, device=rate_BW.device).expand(batch, -1)
        self.decided = left
        return torch.cat([order[:, :count].sort(1).values, newer], 1), count

    def check_crop(self, length: int) -> None:
        dropped = self.positions.dropped
        if dropped and 0 < length < self.decided:
            raise RuntimeError(
                f"crop to {length} tokens; {self.cache.recipe.name} has dropped {dropped} of the first "
                f"{self.decided}: crop to that many or more, or to 0"
            )

    def crop(self, length: int) -> None:
        """A token that was decoded into the window starts from nothing."""
        if length == 0:
            self._restore(0, *(torch.empty(0, 0) for _ in range(3)))
            return
        again, width = length < self.decided, next(iter(self.cache.stores.values())).window_2BTC.shape[2]
        self.decided = min(self.decided, length // self.window.block * self.window.block)
        self.mass_BW, self.queries_BW = (
            x.new_zeros(len(x), width) if again else x[:, :width].clone() for x in (self.mass_BW, self.queries_BW)
        )

    def reorder(self, rows: Tensor) -> None:
        rows = rows.to(self.mass_BW.device)
        if self.cache.stores:
            self.mass_BW, self.queries_BW, self.fresh_BW = (
                x.index_select(0, rows) for x in (self.mass_BW, self.queries_BW, self.fresh_BW)
            )

    def bytes(self) -> dict[str, int]:
        return {"selection": storage_bytes([self.mass_BW, self.queries_BW, self.fresh_BW])}

    def _count_pass(self) -> None:
        """Add a forward pass that all layers have finished."""
        batch, width = self.fresh_BW.shape
        count = width - self.mass_BW.shape[1]
        asked = self.fresh_BW.new_ones(batch, count)
        if self.positions.real_BT is not None:
            asked = self.positions.real_BT[:, self.positions.length - count :].to(asked)
        after = asked.flip(1).cumsum(1).flip(1)
        old = self.queries_BW + asked.sum(1, keepdim=True)
        self.mass_BW = torch.nn.functional.pad(self.mass_BW, (0, count)) + self.fresh_BW
        self.queries_BW = torch.cat([old, after], 1)
        self.fresh_BW = self.fresh_BW[:, :0].clone()

    def _restore(self, decided: int, mass_BW: Tensor, queries_BW: Tensor, fresh_BW: Tensor) -> None:
        self.decided, self.mass_BW, self.queries_BW, self.fresh_BW = decided, mass_BW, queries_BW, fresh_BW
