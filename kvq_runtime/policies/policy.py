"""The contract of a policy: a choice about tokens that a cache makes while a sequence grows.

A `PolicySetting` stands in a recipe: a frozen dataclass of settings that JSON can hold. Of it a cache makes a `Policy`,
which it tells what happens, pass by pass and layer by layer, and asks what may be done. A new policy is a file of this
folder with both, and is found there by its `kind`, as recipes and stages are; the cache names none.

    begin → (per layer: queried, weighed or attended → may_encode, extra_fields) → end       one forward pass
    crop, reorder                                                                        between two of them
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.attention.path import Attended
from kvq_runtime.codec.codec import Codec
from kvq_runtime.geometry import Geometry, Role, Window
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.decode import Decoder
from kvq_runtime.store.encode import Encoder
from kvq_runtime.store.layer import LayerStore, Slab
from kvq_runtime.store.positions import Positions
from kvq_runtime.store.step import Step


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

    @abstractmethod
    def policy(self, cache: CacheParts) -> "Policy":
        """The policy of one cache."""

    def check(self, recipe: Any, geometry: Geometry | None) -> None:  # noqa: B027
        """Raise a ValueError, a sentence, if the recipe cannot have it; `geometry` once the model is known."""

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

    weighs   the queries of a first forward pass whose attention weights it needs, "all" or the "newest" of each row;
             None: that pass may attend to its own keys and values without it. Of later passes it is told all
    """

    weighs: ClassVar[Literal["all", "newest"] | None] = None

    def begin(self, step: Step) -> None:
        """A forward pass begins; nothing of it has been taken in. What the policy changes during it, it has the step
        restore if the pass is undone: `step.on_undo`."""

    def queried(self, layer: int, q_BHTD: Tensor) -> None:
        """The queries, after RoPE, of what a layer has taken in, [B, query heads, T, D]."""

    def weighed(self, layer: int, p_BHGTT: Tensor, slots: range) -> None:
        """The attention weights [B, H, G, queries, tokens] of some queries of a layer, those in these slots, slice
        after slice; no tensor may be kept. For a policy whose `unpacked` keeps the decode kernel away this is all."""

    def attended(self, layer: int, q_BHTD: Tensor, lse_BHT: Tensor, scale: float) -> None:
        """Instead of `weighed`, from the decode kernel: the queries, and log2 Σ 2^s of their scores."""

    def attend(
        self, store: LayerStore, layer: int, q_BHTD: Tensor, mask: Tensor | None, scale: float
    ) -> Attended | None:
        """Answer queries in place of the cache's own paths, as `Path.attend`; None: not these."""
        return None

    def may_encode(self, layer: int) -> bool:
        """Whether a layer may encode the blocks that are due, now that it has attended."""
        return True

    def extra_fields(self, layer: int, store: LayerStore) -> Slab:
        """What to store beside the oldest block of the window, which is about to be encoded, [B, ...] a field: the same
        fields for every block of the layer. It is counted in memory reports under the name of the field."""
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
