"""Show one layer of the compressed cache to transformers."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvq_runtime.cache import BlockCache


@dataclass
class Pass:
    """The way in which one forward pass reads the layers.

    announced   whether the model has announced that our own attention will read the next pass
    attended    whether it reads this one: a pass that no model announces (a copy without hooks) is read decoded
    mixed       whether keys and values are of two dtypes, or autocast is on, which would round what we multiply
    """

    announced: bool = False
    attended: bool = False
    mixed: bool = False

    def begin(self, key_states: Tensor, value_states: Tensor) -> None:
        """The first layer of a pass takes up what was announced."""
        self.attended, self.announced = self.announced, False
        mixed = key_states.dtype != value_states.dtype
        self.mixed = mixed or torch.is_autocast_enabled(key_states.device.type)


@dataclass(frozen=True)
class Mark:
    """The mark that our attention finds on the keys of a layer that has stored them; `first`: its first ones."""

    blocks: BlockCache
    layer: int
    first: bool
    current: Pass


class KVQLayer(CacheLayerMixin):
    """One layer's view of the shared BlockCache, and of the pass under way.

    Keys are stored in the dtype of the values: under autocast RoPE leaves them in float32, and attention rounds them to
    autocast's dtype, which the values have.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, blocks: BlockCache, index: int, current: Pass):
        super().__init__()
        self.blocks, self.index, self.current = blocks, index, current
        self._leads = index == min(blocks.held)
        self._marks = {first: Mark(blocks, index, first, current) for first in (True, False)}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store of the layer is made at the first update."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Take in keys and values [B, H, T, D] and return all of them, history decoded.

        Under our own attention the new ones are returned, with a mark by which it finds the others.
        """
        if self._leads:
            self.current.begin(key_states, value_states)
        if self.current.mixed:
            with torch.autocast(key_states.device.type, enabled=False):
                return self._update(key_states, value_states)
        return self._update(key_states, value_states)

    def _update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        first = self.index not in self.blocks.layers
        if first:
            self._check(key_states, value_states)
        self.is_initialized = True
        k_BTC, v_BTC = key_states.transpose(1, 2).flatten(2), value_states.transpose(1, 2).flatten(2)
        if k_BTC.requires_grad or v_BTC.requires_grad:
            k_BTC, v_BTC = k_BTC.detach(), v_BTC.detach()
        if self.current.mixed:
            k_BTC = k_BTC.to(v_BTC.dtype)
        if self.current.attended:
            self.blocks.take(self.index, k_BTC, v_BTC)
            key_states = key_states.view_as(key_states)  # the mark stays off the caller's tensor
            key_states._kvq = self._marks[first]  # type: ignore[attr-defined]
            return key_states, value_states
        keys, values = self.blocks.update(self.index, k_BTC, v_BTC)
        if first:
            return key_states, value_states
        heads = key_states.shape[1]
        return keys.unflatten(-1, (heads, -1)).transpose(1, 2), values.unflatten(-1, (heads, -1)).transpose(1, 2)

    def _check(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse the first keys and values if they are not of the shape that the cache was made for."""
        geometry = self.blocks.geometry
        for name, x in (("keys", key_states), ("values", value_states)):
            if (x.shape[1], x.shape[3]) != (geometry.kv_heads, geometry.head_size):
                raise ValueError(
                    f"layer {self.index} caches {name} of {x.shape[1]} heads of {x.shape[3]}; the configuration says "
                    f"{geometry.kv_heads} heads of {geometry.head_size}, and kvq takes layers of one shape alone"
                )

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
