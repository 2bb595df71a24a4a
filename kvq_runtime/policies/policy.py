"""The contract of a policy: a choice about tokens that a cache makes while a sequence grows.

Of a recipe's `PolicySetting` (`kvq_runtime/policy_setting.py`) a cache makes a `Policy`, which it tells what happens,
pass by pass and layer by layer, and asks what may be done. A new policy is a file of this folder, and is found there by
its `kind`, as recipes and stages are; the cache names none. One that evicts tokens is a setting alone, with a score and
a budget: `policies/evict.py`.

    begin → (per layer: path, observe → queried → may_encode → encoding) → end           one forward pass
    check_crop → crop, reorder                                                             between two of them
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvq_runtime.attention.path import Path
from kvq_runtime.codec.codec import Codec
from kvq_runtime.store.encode import Encoder
from kvq_runtime.store.layer import LayerStore
from kvq_runtime.store.step import Step

ALL = 1 << 30  # queries, as many as a forward pass has


class CacheParts:
    """The cache that a policy works in.

    codecs   of keys and of values, by layer, as the recipe and its artifact have them
    stores   by layer, those that have taken in tokens; empty for an empty cache
    """

    def __init__(self, codecs: Sequence[tuple[Codec, Codec]], encoder: Encoder):
        self.codecs, self.encoder, self.decoder = codecs, encoder, encoder.decoder
        self.recipe, self.geometry = self.decoder.recipe, self.decoder.geometry
        self.positions = self.decoder.positions
        self.stores: Mapping[int, LayerStore] = self.decoder.stores

    def evict(self, kept_BK: Tensor) -> None:
        """Keep these tokens of the window of all layers, in rising order; it comes back if the pass is undone.

        Raises a ValueError for a NaN or an infinity in the window, before a token is dropped.
        """
        encoded = 0
        for layer, store in self.stores.items():
            encoded = store.encoded
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
            self.decoder.forget(layer)
        self.decoder.clear()


class Policy:
    """A policy at work in one cache. All hooks do nothing here; a policy has those that it needs.

    newest   the number of newest queries of each forward pass whose weights `observe` gets; 0: none
    path     answers queries in place of the cache's own; None: there is none
    """

    newest: int = 0
    path: Path | None = None

    def begin(self, step: Step) -> None:
        """A forward pass begins; nothing of it has been taken in. What the policy changes during it, it has the step
        restore if the pass is undone: `step.on_undo`."""

    def observe(self, store: LayerStore, p_BHGTW: Tensor, slots: range) -> None:
        """Take the weights of a layer's newest queries in these slots over its window, slice after slice.

        They are [B, H, G, queries, window], zero for a query that is padding. No tensor may be kept.

        The decode kernel reports the newest query alone; `unpacked` keeps it away from policies that want more.
        """

    def queried(self, layer: int, q_BHTD: Tensor) -> None:
        """Take the queries, after RoPE, of what a layer has taken in, [B, query heads, T, D]."""

    def may_encode(self, layer: int) -> bool:
        """True if a layer may encode the blocks that are due, now that it has attended."""
        return True

    def encoding(self, store: LayerStore, count: int) -> None:
        """Hear that the `count` oldest blocks of a layer's window are about to be encoded."""

    def end(self, step: Step) -> None:
        """Hear that all layers have attended and encoded. An error raised here still undoes the pass."""

    def check_crop(self, length: int) -> None:
        """Raise a RuntimeError if the first `length` tokens cannot be had back; nothing has been changed yet."""

    def crop(self, length: int) -> None:
        """Hear that the cache has gone back to its first `length` tokens; 0: it is empty."""

    def reorder(self, rows: Tensor) -> None:
        """Hear that the cache has kept these rows, in this order."""

    def bytes(self) -> dict[str, int]:
        """Allocated bytes, by kind, of what the policy holds."""
        return {}


class Policies(list[Policy]):
    """The policies of a recipe at work in one cache, in the recipe's order.

    newest   the most newest queries of a forward pass that one of them wants to observe
    """

    def __init__(self, cache: CacheParts):
        super().__init__(setting.policy(cache) for setting in cache.recipe.policies)
        self._cache = cache
        self.newest = max((policy.newest for policy in self), default=0)

    def weighed(self, store: LayerStore, p_BHGTT: Tensor, slots: range) -> None:
        """Have each observe what queries attend to the window, of the newest that it wants.

        p_BHGTT   weights of the queries in these slots over all tokens
        """
        real_BT = self._cache.positions.real_BT
        p_BHGTW = p_BHGTT[..., p_BHGTT.shape[-1] - store.window_2BTC.shape[2] :].detach()
        if real_BT is not None:
            p_BHGTW = p_BHGTW * real_BT[:, None, None, slots.start : slots.stop, None]
        for policy in self:
            late = slots[max(0, store.length - policy.newest - slots.start) :]
            if late:
                policy.observe(store, p_BHGTW[..., len(slots) - len(late) :, :], late)

    def may_encode(self, layer: int) -> bool:
        """True if all let the layer encode; each is asked."""
        return all([policy.may_encode(layer) for policy in self])

    def encoding(self, store: LayerStore, count: int) -> None:
        """Tell each that a layer's oldest blocks are about to be encoded."""
        for policy in self:
            policy.encoding(store, count)
