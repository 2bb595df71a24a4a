"""SubKV: KIVI's rounding in blocks of 32, the first token exact, and a recent window that grows with attention.

Keys are rounded per channel in groups of tokens, values per token in groups of channels. The window holds 32 tokens. A
new token attends to the newest tokens most: where the oldest token of the window, its *edge*, is attended to no less
than the newest one, the block that begins with it is kept exact for another forward pass. No calibration.

    keep  ⇔  mean of A_new ≤ mean of A_edge          A: weights of the newest query, after the softmax

    per "cache"   means over layers, query heads and rows: one decision, so that all layers hold the same blocks. It
                  depends on the forward pass that ended where this one begins, since the first layer encodes before
                  the last has attended
    per "layer"   means over query heads and rows: each layer decides by the weights of this pass, after it has attended
                  and before it encodes; its edge is the oldest token that may stay exact. Layers hold blocks of their
                  own numbers, so that none can be predicted from another

A pass that is undone and made again, or cropped away, decides as it did, or has no say.

    subkv-2bit        "2 bits" are 2 and two 16-bit numbers per group of 32: 3
    -by-layer         each layer has a window of its own; of any other, `+policies.dynamic.per=layer`
    subkv-aqua-2bit   AQUA-KV's prediction and grids under SubKV's first token and window

Recipes with this window need attention weights: call model.set_attn_implementation("kvq").

Source: Zeng et al., 2025 (SubKV, doi 10.1002/spe.3422), section 3 and algorithm 1; groups of 32, N = 32 and F = 1 as in
its section 4.1.
Differs: where text and pseudocode contradict each other or leave a gap, as follows.
- The text extends the window if A_new ≤ A_edge; line 22 if A_edge > A_n[1], presumably the newest token. The
  text's rule; the edge is the oldest exact token after the first F.
- The text encodes one edge token a step, line 25 the whole window. Neither can be: a group of one token has no range,
  and an empty window is none. Whole blocks of G, the oldest first, leaving at least N tokens.
- The window grows by the token that came, and is decided again at every step, as in lines 21 to 23; but there without
  bound or end, here by at most 3 blocks (N_max = 128, KIVI's residual), and back to N when attention drops.
- Heads, layers and rows are not mentioned. One decision for all, from means over query heads, layers and rows, so that
  blocks stay the same everywhere; it is taken before a forward pass, from the weights of the one before, because its
  first layer encodes before its last has attended. `-by-layer` is the plainer reading, algorithm 1 inside one attention
  layer: means over query heads and rows, of the same forward pass.
- Values have d/G groups a token (line 8 has d/N), and wait for the keys, as the text says.
- Sinks stay in their block, masked, and are put back when it is read, so groups of 32 begin at token 0, not at F.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry, Window
from kvq_runtime.policies.policy import CacheParts, Policy
from kvq_runtime.policy_setting import PolicySetting
from kvq_runtime.recipe import Family, Recipe
from kvq_runtime.recipes import aqua, higgs, kivi
from kvq_runtime.store.layer import LayerStore
from kvq_runtime.store.step import Step
from kvq_runtime.store.storage import storage_bytes

WINDOW = Window(sinks=1, recent=32, block=32)  # the paper's F, N and G


@dataclass(frozen=True)
class DynamicWindow(PolicySetting):
    """Keep blocks exact beyond the recent tokens, as long as attention asks for it.

    blocks   at most, 1 to 1024
    per      who decides: the "cache" for all layers, or each "layer"
    """

    kind: ClassVar[str] = "dynamic"
    slot: ClassVar[str] = "window"
    arrival_dependent: ClassVar[bool] = True
    blocks: int = 3
    per: Literal["cache", "layer"] = "cache"

    def __post_init__(self):
        if not 1 <= self.blocks <= 1024:
            raise ValueError(f"blocks={self.blocks}; use 1 to 1024")
        if self.per not in ("cache", "layer"):
            raise ValueError(f'per={self.per!r}; use "cache" or "layer"')

    def needs(self, recipe: Any) -> frozenset[str]:
        return frozenset({"attention"})

    def check(self, recipe: Any, geometry: Geometry | None) -> None:
        """Raise a ValueError if the recipe cannot have it."""
        if self.per == "layer" and recipe.cross_layer:
            raise ValueError(
                "a layer is predicted from the same blocks of the layer below, which per=layer may keep exact there; "
                "use per=cache, or no prediction"
            )

    def most(self, recent: int, block: int) -> int:
        """Return the recent tokens while the window keeps as many blocks as it may."""
        return recent + self.blocks * block

    def held_bytes(self, geometry: Geometry, tokens: int, window: Window, dtype: torch.dtype) -> dict[str, int]:
        """Count a difference of weights for each layer."""
        return {"timeline": 4 * geometry.layers}

    def policy(self, cache: CacheParts) -> Policy:
        return DynamicWindowPolicy(self, cache)


class DynamicWindowPolicy(Policy):
    """The dynamic window of one cache.

    gaps   A_new - A_edge by layer, of the newest pass, [B]; NaN for a row that is not counted

    It decides at the beginning of a pass for the cache, or when a layer may encode for that layer.
    """

    newest = 1

    def __init__(self, setting: DynamicWindow, cache: CacheParts):
        self.setting, self.cache, self.positions = setting, cache, cache.positions
        self._seen, self.gaps = 0, dict[int, Tensor]()  # tokens at the end of that pass; by layer

    def begin(self, step: Step) -> None:
        if self.setting.per == "cache":
            self._decide(step)
        step.on_undo(self._restore, self._seen, self.gaps)
        self._restore(step.before + step.count, {})

    def _decide(self, step: Step) -> None:
        """For all layers."""
        stores, window = self.cache.stores.values(), self.cache.recipe.window
        due = any(store.beyond(window.recent, step.count) for store in stores)
        gaps_LB = [gap_B for _, gap_B in sorted(self.gaps.items())]
        # unless a block is due, and every layer has been weighed, nothing is asked of the device
        weighed = due and len(gaps_LB) == self.cache.geometry.layers
        keep = weighed and keep_edge(torch.stack([gap_B.to(gaps_LB[-1].device) for gap_B in gaps_LB]))
        for store in stores:
            store.recent = self._most if keep else window.recent

    def may_encode(self, layer: int) -> bool:
        """Allow what is due to be encoded; if layers decide, set how much that is."""
        if self.setting.per == "layer":
            store, recent, gap_B = self.cache.stores[layer], self.cache.recipe.window.recent, self.gaps.get(layer)
            keep = gap_B is not None and store.beyond(recent) > 0 and keep_edge(gap_B[None])
            store.recent = self._most if keep else recent
        return True

    @property
    def _most(self) -> int:
        """Tokens that stay exact, at least, while the edge is kept."""
        window = self.cache.recipe.window
        return self.setting.most(window.recent, window.block)

    def _edge(self, store: LayerStore) -> int:
        """Return the first slot that stays exact; if the layer decides, that may stay so."""
        leaving = store.due if self.setting.per == "cache" else store.beyond(self._most)
        return (store.blocks + leaving) * store.window.block

    def observe(self, store: LayerStore, p_BHGTW: Tensor, slots: range) -> None:
        """Return the edge: that of the window as this pass leaves it."""
        p_BHGW, edge, real_BT = p_BHGTW[..., -1, :], self._edge(store), self.positions.real_BT
        self.gaps[store.layer] = gaps(p_BHGW, edge, store.window.sinks, real_BT, store.encoded)

    def crop(self, length: int) -> None:
        if length < self._seen:
            self._restore(length, {})

    def reorder(self, rows: Tensor) -> None:
        self.gaps = {layer: gap_B[rows.to(gap_B.device)] for layer, gap_B in self.gaps.items()}

    def bytes(self) -> dict[str, int]:
        return {"timeline": storage_bytes(self.gaps.values())}

    def _restore(self, seen: int, gaps: dict[int, Tensor]) -> None:
        self._seen, self.gaps = seen, gaps


def gaps(p_BHGW: Tensor, edge: int, sinks: int, real_BT: Tensor | None, encoded: int = 0) -> Tensor:
    """A_new - A_edge of each row, means over heads: float32 [B], NaN for a row without a vote.

    A row's edge is its first real token from slot `edge` on that is no sink. It has no vote if its newest token is
    padding, or its edge is not older than that.

    p_BHGW   the newest query's weights on the slots from `encoded` on; on padding they are never looked at
    """
    newest = encoded + p_BHGW.shape[-1] - 1
    if real_BT is None:
        first_B = torch.full((len(p_BHGW),), max(edge, sinks), device=p_BHGW.device)
        heard_B = first_B < newest
    else:
        able_BT = real_BT & (real_BT.cumsum(1) > sinks)
        able_BT[:, :edge] = False
        first_B = able_BT.int().argmax(1)
        heard_B = able_BT[:, newest] & (first_B < newest)
    places_B111 = (first_B.clamp(max=newest) - encoded).clamp(min=0).view(-1, 1, 1, 1)
    p_BHG = p_BHGW.gather(-1, places_B111.expand(*p_BHGW.shape[:3], 1))[..., 0]
    return (p_BHGW[..., -1] - p_BHG).mean((1, 2)).where(heard_B, torch.nan)


def keep_edge(gaps_LB: Tensor) -> bool:
    """Return the decision; if no row has a vote, nothing is kept."""
    return float(gaps_LB.double().nanmean()) <= 0


def subkv(name: str, bits: int, per: Literal["cache", "layer"] = "cache") -> Recipe:
    """Return the paper's method at `bits` bits."""
    summary = f"SubKV, {bits} bits, groups of 32, N from 32 to 128{', by layer' if per == 'layer' else ''}"
    schemes, policies = (kivi.keys(bits), kivi.values(bits)), (DynamicWindow(per=per),)
    return Recipe(name, *schemes, summary=summary, window=WINDOW, policies=policies)


def predicted(name: str) -> Recipe:
    """AQUA-KV in SubKV's window."""
    text = "AQUA-KV over HIGGS, 2bit, in SubKV's window"
    two = aqua.aqua(name, higgs.scheme("2bit"), higgs.scheme("4bit"), text)
    return replace(two, window=WINDOW, policies=(DynamicWindow(),))


FAMILY = Family(
    presets={f"subkv-{bits}bit": partial(subkv, bits=bits) for bits in (2, 4)}
    | {"subkv-2bit-by-layer": partial(subkv, bits=2, per="layer"), "subkv-aqua-2bit": predicted},
    compared=("subkv-2bit", "subkv-aqua-2bit"),
)
