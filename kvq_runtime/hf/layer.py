"""Show one layer of the compressed cache to transformers."""

from dataclasses import dataclass

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvq_runtime.cache import BlockCache


@dataclass(frozen=True)
class Mark:
    """What our attention finds on the keys of a layer that has taken them in; `first`: its first ones."""

    blocks: BlockCache
    layer: int
    first: bool


class KVQLayer(CacheLayerMixin):
    """One layer's view of the shared BlockCache."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, blocks: BlockCache, index: int):
        super().__init__()
        self.blocks, self.index = blocks, index
        self.attended = False  # whether our own attention reads what `update` takes in
        self._marks = {first: Mark(blocks, index, first) for first in (True, False)}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store of the layer is made at the first update."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Take in keys and values [B, H, T, D] and return all of them, history decoded.

        Under our own attention the new ones are returned, with a mark by which it finds the others.
        """
        first = self.index not in self.blocks.layers
        self.is_initialized = True
        k_BTC, v_BTC = key_states.transpose(1, 2).flatten(2), value_states.transpose(1, 2).flatten(2)
        if k_BTC.requires_grad or v_BTC.requires_grad:
            k_BTC, v_BTC = k_BTC.detach(), v_BTC.detach()
        if self.attended:
            self.blocks.take(self.index, k_BTC, v_BTC)
            key_states = key_states.view_as(key_states)  # the mark stays off the caller's tensor
            key_states._kvq = self._marks[first]  # type: ignore[attr-defined]
            return key_states, value_states
        keys, values = self.blocks.update(self.index, k_BTC, v_BTC)
        if first:
            return key_states, value_states
        heads = key_states.shape[1]
        return keys.unflatten(-1, (heads, -1)).transpose(1, 2), values.unflatten(-1, (heads, -1)).transpose(1, 2)

    def get_seq_length(self) -> int:
        """Tokens that every layer has seen, held or not: those of a forward pass that stopped midway do not count."""
        return self.blocks.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys that the next query attends to, offset of the first)."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No bound."""
        return -1

    @property
    def batch_size(self) -> int:
        """Rows held, or -1 before the first update."""
        return self.blocks.layers[self.index].rows if self.index in self.blocks.layers else -1

    def offload(self) -> None:
        """Refused: the packed cache stays on its device."""
        raise RuntimeError("a KVQCache is not offloaded: it is small already; use offloading=False")

    prefetch = offload
