"""Mark each chunk of encoded keys by its mean, and keep the keys of those that a mean does not describe.

    landmark = mean of the chunk's keys after RoPE, by head         outlier: smallest min_t cos(key_t, landmark)

Landmarks are stored with the block they belong to. The recipe's number of outlier chunks is kept, by row and head,
of all that have been encoded so far; a chunk that others push out is still there, encoded like all.

Source: Sun et al., 2024 (ShadowKV), algorithm 1.
Differs: outliers are found as blocks are encoded, in the prompt and after it, theirs once, in the prompt; sinks and
padding count neither for a landmark nor for its cosines; only keys are kept exact, values are read from their blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvq_runtime.attention.path import Attended
from kvq_runtime.attention.selected import LANDMARKS, OutlierChunks, Selected
from kvq_runtime.geometry import Geometry, Role, Window
from kvq_runtime.policies.policy import CacheParts, Policy
from kvq_runtime.policy_setting import PolicySetting
from kvq_runtime.stages.abilities import SingleTokens
from kvq_runtime.stages.stage import Quantizer
from kvq_runtime.store.layer import LayerStore
from kvq_runtime.store.step import Step
from kvq_runtime.store.storage import Slab, storage_bytes


@dataclass(frozen=True)
class ShadowChunks(PolicySetting):
    """Hold all tokens, and read the chunks that queries ask for, ShadowKV's: see `kvq_runtime/attention/selected.py`.

    chunk      tokens that are chosen together
    budget     tokens of chosen chunks, by row and KV head; sinks, outliers and the window are read beside them
    outliers   chunks, by row and KV head, whose keys are kept exact and always read
    """

    kind: ClassVar[str] = "chunks"
    papers: ClassVar[tuple[str, ...]] = ("2410.21465",)
    slot: ClassVar[str] = "select"
    chooses_by_query: ClassVar[bool] = True
    waits_for_fit: ClassVar[bool] = True
    unpacked: ClassVar[str | None] = "it reads the chunks that each query asks for"
    neutral: ClassVar[Mapping[str, Any]] = {"outliers": 0}
    chunk: int = 8
    budget: int = 2048
    outliers: int = 48

    def __post_init__(self):
        if self.chunk < 1 or self.outliers < 0 or self.budget < self.chunk:
            raise ValueError(f"{self}; use a chunk of at least 1, a budget of at least a chunk, and outliers from 0")

    def check(self, recipe: Any, geometry: Geometry | None) -> None:
        """Raise a ValueError if the recipe cannot have it: single tokens are decoded."""
        super().check(recipe, geometry)
        if recipe.window.block % self.chunk:
            raise ValueError(f"chunks of {self.chunk} do not divide the blocks of {recipe.window.block}; use a divisor")
        if recipe.cross_layer or any(scheme.correct or scheme.axis != "token" for scheme in recipe.schemes):
            raise ValueError("single tokens are decoded; use schemes per token, with no prediction or correction")
        if recipe.position == "post" and any(key.predict for key, _ in recipe.pairs):
            raise ValueError("a mean after RoPE turns with each token; encode keys before RoPE")
        if geometry is not None:
            for scheme in recipe.schemes:
                _check_tokens(scheme.quantize, geometry)

    @property
    def count(self) -> int:
        """Chunks that the budget holds."""
        return self.budget // self.chunk

    def extra_bits(self, role: Role, dtype: torch.dtype) -> float:
        """A landmark per chunk of keys."""
        return 8 * dtype.itemsize / self.chunk if role == "key" else 0.0

    def held_bytes(self, geometry: Geometry, tokens: int, window: Window, dtype: torch.dtype) -> dict[str, int]:
        """Bytes of the outlier chunks of each head: their numbers, cosines and exact keys, once there are blocks."""
        if tokens < window.recent + window.block:
            return {}
        each = 4 + 4 + self.chunk * geometry.head_size * dtype.itemsize
        return {"chunks": geometry.layers * geometry.kv_heads * self.outliers * each}

    def policy(self, cache: CacheParts) -> Policy:
        return ShadowChunksPolicy(self, cache)


def _check_tokens(quantize: Quantizer, geometry: Geometry) -> None:
    """Raise a ValueError if single tokens cannot be decoded."""
    few, more = (quantize.fields(rows, geometry.width, geometry, torch.bfloat16) for rows in (64, 128))
    whole = sorted(name for name in few if few[name][0] != (64, *more[name][0][1:]) or more[name][0][0] != 128)
    if whole and not isinstance(quantize, SingleTokens):
        raise ValueError(
            f"{quantize.kind} stores {', '.join(whole)} for a whole block, so single tokens cannot be decoded; use a "
            "quantizer whose fields all begin with the token, or read all tokens"
        )


class ShadowChunksPolicy(Policy):
    """The outlier chunks of one cache's layers.

    outliers   by layer, once it has blocks
    """

    def __init__(self, setting: ShadowChunks, cache: CacheParts):
        self.setting, self.cache = setting, cache
        self.outliers: dict[int, OutlierChunks] = {}
        self.path = Selected(cache.decoder, cache.positions, self.outliers, setting.chunk, setting.count)

    def begin(self, step: Step) -> None:
        step.on_undo(self._restore, dict(self.outliers))

    def attend(
        self, store: LayerStore, layer: int, q_BHTD: Tensor, mask: Tensor | None, scale: float
    ) -> Attended | None:
        return self.path.attend(store, layer, q_BHTD, mask, scale)

    def extra_fields(self, layer: int, store: LayerStore) -> Slab:
        """The block's landmarks [B, chunks, C], zero where no token of a chunk counts; its outliers are kept."""
        size, start = store.window.block, store.encoded
        x_BTC = store.window_2BTC[0, :, :size]
        valid_BT = self.cache.positions.valid(start, start + size, store.window.sinks).to(x_BTC.device)
        chunk, count, heads = self.setting.chunk, size // self.setting.chunk, self.cache.geometry.kv_heads
        k_BHNKD = x_BTC.unflatten(-1, (heads, -1)).transpose(1, 2).unflatten(2, (count, chunk))
        valid = valid_BT.expand(len(x_BTC), -1).unflatten(1, (count, chunk))[:, None, :, :, None]
        keys = k_BHNKD.float()
        mark_BHND = (keys * valid).sum(3) / valid.sum(3).clamp(min=1)
        cosine = torch.cosine_similarity(keys, mark_BHND[:, :, :, None], dim=-1)
        cosine_BHN = cosine.masked_fill(~valid[..., 0], torch.inf).amin(-1)
        number = torch.arange(store.blocks * count, (store.blocks + 1) * count, dtype=torch.int32, device=x_BTC.device)
        number_BHN = number.expand_as(cosine_BHN).masked_fill(cosine_BHN == torch.inf, -1)
        self._keep_lowest(layer, OutlierChunks(number_BHN, cosine_BHN, k_BHNKD))
        return {LANDMARKS: mark_BHND.transpose(1, 2).flatten(2).to(x_BTC.dtype)}

    def _keep_lowest(self, layer: int, new: OutlierChunks) -> None:
        """Keep the chunks with the smallest cosines, of a new block and of those kept so far."""
        if layer not in self.outliers:
            self.outliers[layer] = self._none(new)
        if not self.setting.outliers:
            return
        every = OutlierChunks(*(torch.cat(pair, 2) for pair in zip(self.outliers[layer], new, strict=True)))
        best = every.cosine_BHO.argsort(dim=-1, stable=True)[..., : self.setting.outliers]
        keys = every.k_BHOKD.gather(2, best[..., None, None].expand(-1, -1, -1, *every.k_BHOKD.shape[3:]))
        self.outliers[layer] = OutlierChunks(every.chunk_BHO.gather(2, best), every.cosine_BHO.gather(2, best), keys)

    def _none(self, like: OutlierChunks) -> OutlierChunks:
        """As many places as the setting has, with no chunk in them yet."""
        shape = (*like.chunk_BHO.shape[:2], self.setting.outliers)
        return OutlierChunks(
            like.chunk_BHO.new_full(shape, -1),
            like.cosine_BHO.new_full(shape, torch.inf),
            like.k_BHOKD.new_zeros(*shape, *like.k_BHOKD.shape[3:]),
        )

    def crop(self, length: int) -> None:
        """Forget the chunks of blocks that are gone; what they had pushed out does not come back."""
        for layer, held in list(self.outliers.items()):
            store = self.cache.stores.get(layer)
            if length == 0 or store is None or not store.blocks:
                del self.outliers[layer]
                continue
            gone = held.chunk_BHO >= store.encoded // self.setting.chunk
            self.outliers[layer] = OutlierChunks(
                held.chunk_BHO.masked_fill(gone, -1), held.cosine_BHO.masked_fill(gone, torch.inf), held.k_BHOKD
            )

    def reorder(self, rows: Tensor) -> None:
        for layer, held in self.outliers.items():
            here = rows.to(held.chunk_BHO.device)
            self.outliers[layer] = OutlierChunks(*(x.index_select(0, here) for x in held))

    def bytes(self) -> dict[str, int]:
        return {"chunks": storage_bytes(x for held in self.outliers.values() for x in held)}

    def _restore(self, outliers: dict[int, OutlierChunks]) -> None:
        self.outliers.clear()
        self.outliers.update(outliers)
