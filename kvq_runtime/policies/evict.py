"""Evict tokens by a score, within a budget: what each policy that does so would otherwise write itself.

    mass_t = Σ over layers, query heads and queries of the attention that token t got      queries_t = how many saw it

The setting says how many of the tokens seen so far are old enough to be chosen from, and how many of them are held
(`budget`), and which (`score`); sinks always are. One set serves all layers and heads, because a layer is predicted
from the one below, token by token; each row has its own, of one size. It is chosen at the end of a forward pass, so
that a prompt is exact throughout its own, and before encoding: what is encoded is never dropped.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry, Window
from kvq_runtime.policies.policy import ALL, CacheParts, Policy
from kvq_runtime.policy_setting import PolicySetting
from kvq_runtime.store.layer import LayerStore
from kvq_runtime.store.step import Step
from kvq_runtime.store.storage import storage_bytes


@dataclass(frozen=True)
class Evicting(PolicySetting):
    """A score and a budget.

    once     whether it chooses among the tokens of the first forward pass alone, the prompt, and holds all later ones
    newest   how many queries of a forward pass count, the newest
    adds     whether the weights of all forward passes add up; else those of the last one count
    """

    slot: ClassVar[str] = "select"
    arrival_dependent: ClassVar[bool] = True
    unpacked: ClassVar[str | None] = "it keeps tokens by their attention weights, which the kernel does not hand out"
    once: ClassVar[bool] = False
    newest = ALL
    adds: ClassVar[bool] = True

    @abstractmethod
    def budget(self, tokens: int, window: Window) -> tuple[int, int]:
        """Split `tokens` tokens seen: (how many, the first ones, are chosen from; how many of these are held).

        Both never fall as tokens come.
        """

    @abstractmethod
    def score(self, mass_BT: Tensor, queries_BT: Tensor) -> Tensor:
        """Return how much each of these tokens, which are consecutive, deserves to be held, at least 0: [B, T].

        mass_BT      the sum of the weights that a token got, of the passes that count
        queries_BT   how many queries of these could see it
        """

    @abstractmethod
    def held_share(self) -> float:
        """Return the share of the tokens seen that is held, of a long text, by which bits are billed; 0: a number."""

    def blocks(self, held: int, window: Window) -> int:
        """Return how many blocks of the `held` old tokens are encoded, and so never dropped; the others stay exact."""
        return held // window.block

    def needs(self, recipe: Any) -> frozenset[str]:
        return frozenset({"attention"})

    def chosen(self, tokens: int, window: Window) -> tuple[int, int]:
        """Split tokens seen into blocks and exact ones.

        If the choice is made once, all but the newest token are the prompt; else the rest of the tokens chosen is exact
        beside those that are newer.
        """
        old, held = self.budget(tokens - self.once, window)
        kept = held + tokens - old
        blocks = max(0, kept - window.recent) // window.block if self.once else self.blocks(held, window)
        return blocks, kept - blocks * window.block

    def held_bytes(self, geometry: Geometry, tokens: int, window: Window, dtype: torch.dtype) -> dict[str, int]:
        """Bytes of the slots' token numbers; of exact tokens that may be dropped also of attention and its queries."""
        blocks, exact = self.chosen(tokens, window)
        kept = blocks * window.block + exact
        return {"timeline": 4 * kept * (kept < tokens), "selection": 8 * exact * (not self.once)}

    def policy(self, cache: CacheParts) -> Policy:
        return Eviction(self, cache)


class Eviction(Policy):
    """The attention that the tokens of the window (W of them, in every layer) have got so far; none once it is over.

    decided     tokens, the first ones, that have been kept or dropped
    got_2BW     Σ of the weights that each token got, and queries that could see it
    fresh_BW    what layers have added to the weights in this forward pass
    """

    def __init__(self, setting: Evicting, cache: CacheParts):
        self.setting, self.cache, self.positions, self.window = setting, cache, cache.positions, cache.recipe.window
        self.newest = setting.newest
        self._restore(0, torch.empty(2, 0, 0), torch.empty(0, 0))

    def begin(self, step: Step) -> None:
        step.on_undo(self._restore, self.decided, self.got_2BW, self.fresh_BW)
        if self.setting.once and step.before:
            return
        if not self.got_2BW.shape[2]:
            self.got_2BW = torch.zeros(2, step.batch, 0, dtype=torch.float32, device=step.device)
        width = self.got_2BW.shape[2] + step.count
        self.fresh_BW = torch.zeros(step.batch, width, dtype=torch.float32, device=step.device)

    def observe(self, store: LayerStore, p_BHGTW: Tensor, slots: range) -> None:
        if self.fresh_BW.shape[1]:
            self.fresh_BW += p_BHGTW.sum((1, 2)).sum(1)

    def may_encode(self, layer: int) -> bool:
        """True if no choice is due: what is encoded is chosen at the end of the pass, for all layers."""
        return not self.fresh_BW.shape[1]

    def end(self, step: Step) -> None:
        """Drop the tokens with the least scores, and encode the others."""
        if not self.fresh_BW.shape[1]:
            return
        self._count_pass()
        old, held = self.setting.budget(self.positions.seen, self.window)
        once, width = self.setting.once, self.got_2BW.shape[2]
        if old > self.decided:
            kept_BK, count = self._choose(old, held)
            self.decided = old
        elif once:
            kept_BK, count = torch.arange(width, device=step.device).expand(step.batch, -1), 0
        else:
            return
        encoded = self.positions.length - width
        blocks = self.setting.blocks(encoded + count, self.window) - encoded // self.window.block
        self.cache.evict(kept_BK)
        start = width if once else blocks * self.window.block
        self.got_2BW = self.got_2BW.gather(2, kept_BK.expand(2, -1, -1))[..., start:].clone()
        self.cache.encode(None if once else blocks)

    def _choose(self, old: int, held: int) -> tuple[Tensor, int]:
        """Return the window's tokens that stay, [B, K] in rising order, and how many of them are of the `old`."""
        _, batch, width = self.got_2BW.shape
        encoded, real_BT = self.positions.length - width, self.positions.real_BT
        stake = width - (self.positions.seen - old)
        score_BW = self.setting.score(*self.got_2BW[..., :stake])
        if real_BT is not None:
            score_BW = score_BW.where(real_BT[:, encoded : encoded + stake], -1.0)
        slots, arrived = self.positions.sink_slots(self.window.sinks, batch, score_BW.device)
        places = torch.arange(encoded, encoded + stake, device=score_BW.device)
        sink_BW = ((slots[:, None] == places[:, None]) & arrived[:, None]).any(-1)
        least = int(sink_BW.sum(1).max()) if batch else 0
        count = min(stake, max(held - encoded, least))
        order = score_BW.masked_fill(sink_BW, torch.inf).argsort(dim=1, descending=True, stable=True)
        newer = torch.arange(stake, width, device=score_BW.device).expand(batch, -1)
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
            self._restore(0, torch.empty(2, 0, 0), torch.empty(0, 0))
            return
        again, once, block = length < self.decided, self.setting.once, self.window.block
        width = 0 if once else next(iter(self.cache.stores.values())).window_2BTC.shape[2]
        self.decided = min(self.decided, length if once else length // block * block)
        shape = (*self.got_2BW.shape[:2], width)
        self.got_2BW = self.got_2BW.new_zeros(shape) if again else self.got_2BW[..., :width].clone()

    def reorder(self, rows: Tensor) -> None:
        if self.cache.stores:
            rows = rows.to(self.got_2BW.device)
            self.got_2BW, self.fresh_BW = self.got_2BW.index_select(1, rows), self.fresh_BW.index_select(0, rows)

    def bytes(self) -> dict[str, int]:
        return {"selection": storage_bytes([self.got_2BW, self.fresh_BW])}

    def _count_pass(self) -> None:
        """Add a forward pass that all layers have finished."""
        mass_BW, queries_BW = self.got_2BW if self.setting.adds else torch.zeros_like(self.got_2BW)
        count = self.fresh_BW.shape[1] - mass_BW.shape[1]
        asked = self.fresh_BW.new_ones(len(mass_BW), count)
        if self.positions.real_BT is not None:
            asked = self.positions.real_BT[:, self.positions.length - count :].to(asked)
        after = asked.flip(1).cumsum(1).flip(1)
        queries_BW = torch.cat([queries_BW + asked.sum(1, keepdim=True), after], 1)
        self.got_2BW = torch.stack([torch.nn.functional.pad(mass_BW, (0, count)) + self.fresh_BW, queries_BW])
        self.fresh_BW = self.fresh_BW[:, :0].clone()

    def _restore(self, decided: int, got_2BW: Tensor, fresh_BW: Tensor) -> None:
        self.decided, self.got_2BW, self.fresh_BW = decided, got_2BW, fresh_BW
