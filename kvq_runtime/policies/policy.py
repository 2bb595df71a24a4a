"""The contract of a policy: a choice about tokens that a cache makes while a sequence grows.

A `PolicySetting` stands in a recipe: a frozen dataclass of settings that JSON can hold. Of it a cache makes a `Policy`,
which it tells what happens, pass by pass and layer by layer, and asks what may be done. A new policy is a file of this
folder, and is found there by its `kind`, as recipes and stages are; the cache names none. One that evicts tokens is a
setting alone, with a score and a budget: `policies/evict.py`.

    begin → (per layer: attend, observe → queried → may_encode → extra_fields) → end       one forward pass
    check_crop → crop, reorder                                                             between two of them
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvq_runtime.attention.path import Attended
from kvq_runtime.codec.codec import Codec
from kvq_runtime.geometry import Geometry, Role, Window
from kvq_runtime.ops import dispatch
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.decode import Decoder
from kvq_runtime.store.encode import Encoder
from kvq_runtime.store.layer import LayerStore, Slab
from kvq_runtime.store.positions import Positions
from kvq_runtime.store.step import Step

ALL = 1 << 30  # queries, as many as a forward pass has


@dataclass(frozen=True)
class CacheParts:
    """The cache that a policy works in.

    layers   those that it holds, in rising order
    stores   by layer, those that have taken in tokens; empty for an empty cache
    codecs   of keys and of values, by layer, as the recipe and its artifact have them
    """

    recipe: Recipe
    geometry: Geometry
    layers: Sequence[int]
    stores: Mapping[int, LayerStore]
    codecs: Sequence[tuple[Codec, Codec]]
    positions: Positions
    decoder: Decoder
    encoder: Encoder

    def evict(self, kept_BK: Tensor) -> None:
        """Keep these tokens of the window of all layers, in rising order; it comes back if the pass is undone.

        Raises a ValueError for a NaN or an infinity in the window, before a token is dropped.
        """
        encoded = 0
        for layer, store in self.stores.items():
            encoded = store.encoded
            if dispatch.is_waited_for(store.buffer_2BTC):  # else looked at as it arrived
                self.encoder.watch(layer, store.window_2BTC, encoded)
        self.encoder.refuse_nan()
        if encoded + kept_BK.shape[1] == self.positions.length:
            return
        first = torch.arange(encoded, device=kept_BK.device).expand(len(kept_BK), -1)
        self.positions.drop(torch.cat([first, kept_BK + encoded], 1))
        for store in self.stores.values():
            store.drop(kept_BK)

    def encode(self, blocks: int | None = None) -> None:
        """Encode the `blocks` oldest blocks in the window of every layer; None: those that are due."""
        for layer in sorted(self.stores):
            store = self.stores[layer]
            self.encoder.encode(layer, store.due if blocks is None else blocks)
            store.trim()
            self.decoder.forget(layer, layer == self.layers[-1])


@dataclass(frozen=True)
class PolicySetting(ABC):
    """What a recipe says of a policy.

    kind               its name in JSON, unique in its slot
    slot               the key of a recipe's JSON under which it stands: "window" (how long tokens stay exact), "select"
                       (which are held, or read) or "online" (what is fitted in the cache), of each of which a recipe
                       has at most one; "policies": any other, in a list
    needs              what it is told beside keys and values: "positions", "queries", "attention"
    arrival_dependent  whether blocks depend on how tokens arrive
    fits_prompt        whether it fits the recipe's stages to each row's own tokens, in place of a calibration
    chooses_by_query   whether queries choose what is read: under another attention than ours, all tokens are read
    later              settings younger than the file format: at their defaults JSON does not name them
    papers             numbers on arXiv of the papers that it comes from
    waits_for_fit      whether blocks may wait until what they are encoded with is fitted to the prompt
    unpacked           why the decode kernel cannot read the blocks of a cache that has it; None: it can
    neutral            settings with which it changes nothing, for tests of what every recipe owes
    """

    kind: ClassVar[str]
    slot: ClassVar[str] = "policies"
    needs: ClassVar[frozenset[str]] = frozenset()
    arrival_dependent: ClassVar[bool] = False
    fits_prompt: ClassVar[bool] = False
    chooses_by_query: ClassVar[bool] = False
    papers: ClassVar[tuple[str, ...]] = ()
    later: ClassVar[frozenset[str]] = frozenset()
    waits_for_fit: ClassVar[bool] = False
    unpacked: ClassVar[str | None] = None
    neutral: ClassVar[Mapping[str, Any]] = {}

    @abstractmethod
    def policy(self, cache: CacheParts) -> "Policy":
        """The policy of one cache."""

    def check(self, recipe: Any, geometry: Geometry | None) -> None:
        """Raise a ValueError, a sentence, if the recipe cannot have it; `geometry` once the model is known."""
        if self.slot == "select" and recipe.policy("window") is not None:
            raise ValueError("tokens are selected behind a fixed window; drop select, or window")

    def most(self, recent: int, block: int) -> int:
        """The most tokens of the window that it keeps exact, of `recent` that the recipe keeps itself."""
        return recent

    def held_share(self) -> float:
        """The share of the tokens seen that is held, of a long text: over 0, at most 1."""
        return 1.0

    def chosen(self, tokens: int, window: Window) -> tuple[int, int] | None:
        """Of `tokens` tokens that a row has seen: (blocks of them that it holds encoded, tokens that it holds exact),
        of a policy that evicts some; None: what is behind the window is all encoded."""
        return None

    def held_bytes(self, geometry: Geometry, tokens: int, window: Window, dtype: torch.dtype) -> dict[str, int]:
        """What it holds for each row of so many tokens, in bytes by kind, beside what `extra_bits` says."""
        return {}

    def extra_bits(self, role: Role, dtype: torch.dtype) -> float:
        """What it stores beside each encoded element of keys or values, in bits; `dtype` is the model's."""
        return 0.0


class Policy:
    """A policy at work in one cache. All hooks do nothing here; a policy has those that it needs.

    newest   the number of newest queries of each forward pass whose weights `observe` gets; 0: none
    """

    newest: int = 0

    def begin(self, step: Step) -> None:
        """A forward pass begins; nothing of it has been taken in. What the policy changes during it, it has the step
        restore if the pass is undone: `step.on_undo`."""

    def attend(
        self, store: LayerStore, layer: int, q_BHTD: Tensor, mask: Tensor | None, scale: float
    ) -> Attended | None:
        """Answer queries in place of the cache's own paths, as `Path.attend`; None: not these."""
        return None

    def observe(self, layer: int, p_BHGTW: Tensor, slots: range) -> None:
        """Take the weights of a layer's newest queries in these slots over its window, slice after slice.

        They are [B, H, G, queries, window], zero for a query that is padding. No tensor may be kept.

        The decode kernel reports the newest query alone; `unpacked` keeps it away from policies that want more.
        """

    def queried(self, layer: int, q_BHTD: Tensor) -> None:
        """The queries, after RoPE, of what a layer has taken in, [B, query heads, T, D]."""

    def may_encode(self, layer: int) -> bool:
        """True if a layer may encode the blocks that are due, now that it has attended."""
        return True

    def extra_fields(self, layer: int, store: LayerStore) -> Slab:
        """Return fields to store beside the oldest block of the window, which is about to be encoded, [B, ...] each.

        They are the same for every block of the layer. Memory reports count them under the name of the field.
        """
        return {}

    def end(self, step: Step) -> None:
        """All layers have attended and encoded. An error raised here still undoes the pass."""

    def check_crop(self, length: int) -> None:
        """Raise a RuntimeError if the first `length` tokens cannot be had back; nothing has been changed yet."""

    def crop(self, length: int) -> None:
        """The cache has gone back to its first `length` tokens; 0: it is empty."""

    def reorder(self, rows: Tensor) -> None:
        """The cache has kept these rows, in this order."""

    def bytes(self) -> dict[str, int]:
        """Allocated bytes, by kind, of what the policy holds."""
        return {}
