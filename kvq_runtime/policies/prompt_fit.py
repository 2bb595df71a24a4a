"""Fit a cache's stages to the first tokens of its rows, layer by layer, before anything of a layer is encoded.

Until then a layer's tokens lie in its window, all of them, so that keys and values are at hand; queries, which nobody
else keeps, are kept here. A fit stays until the cache is empty. A forward pass that is undone takes the fit that it
made with it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.codec.shared import RowCodec
from kvq_runtime.fit.fitting import Fitting, fit_row, requested
from kvq_runtime.fit.statistics import QueryMoment
from kvq_runtime.geometry import ROLES, Geometry, Role
from kvq_runtime.ops import rope
from kvq_runtime.policies.policy import CacheParts, Policy
from kvq_runtime.policy_setting import PolicySetting
from kvq_runtime.stages.stage import Queries
from kvq_runtime.store.layer import LayerStore
from kvq_runtime.store.step import Step
from kvq_runtime.store.storage import storage_bytes


@dataclass(frozen=True)
class PromptFit(PolicySetting):
    """The tokens to fit on.

    fit_tokens   of each row, padding not counted, its sinks counted but left out; "prompt": those of the first forward
                 pass. A prompt that is too short for any block to be due is fitted with the tokens after it, up to the
                 pass in which one is; so is a batch in which a row has come no further than a block
    """

    kind: ClassVar[str] = "first_tokens"
    slot: ClassVar[str] = "online"
    arrival_dependent: ClassVar[bool] = True
    fits_prompt: ClassVar[bool] = True
    unpacked: ClassVar[str | None] = "each row has a codec of its own"
    fit_tokens: int | Literal["prompt"] = "prompt"

    def __post_init__(self):
        count = self.fit_tokens
        if count != "prompt" and (not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 1 << 20):
            raise ValueError(f'fit_tokens={count!r}; use "prompt", or 1 to {1 << 20}')

    def check(self, recipe: Any, geometry: Geometry | None) -> None:
        """Raise a ValueError if the recipe cannot have it."""
        if not any(scheme.fitted for scheme in recipe.schemes):
            raise ValueError("nothing is fitted; drop online")
        busy = [policy.kind for policy in recipe.policies if policy is not self and not policy.waits_for_fit]
        if busy:
            raise ValueError(
                f"{', '.join(busy)} chooses what is encoded, and does not wait for a fit; drop one of them"
            )
        for scheme in recipe.schemes:
            for _, stage in scheme.stages:
                stage.check_prompt_fit()
        if recipe.position == "post" and any(key.predict for key, _ in recipe.pairs):
            raise ValueError('a mean of keys is fitted to the prompt before RoPE alone; use position "pre"')

    def needs(self, recipe: Any) -> frozenset[str]:
        """Return queries where a stage is fitted to them, and the positions of those before RoPE."""
        requests = {request for scheme in recipe.schemes for request in requested(scheme, Fitting.packages)}
        queries = {request.queries for request in requests if isinstance(request, QueryMoment)}
        return frozenset({"queries"} if queries else ()) | ({"positions"} if queries - {"after"} else set())

    def enough(self, sinks: int, block: int) -> int:
        """Return the tokens that every row must have."""
        return max(sinks + 1, block if self.fit_tokens == "prompt" else self.fit_tokens)

    def policy(self, cache: CacheParts) -> Policy:
        return PromptFitPolicy(self, cache)


class PromptFitPolicy(Policy):
    """The fits of one cache."""

    def __init__(self, setting: PromptFit, cache: CacheParts):
        self.setting, self.cache, self.recipe = setting, cache, cache.recipe
        self._fitted: set[int] = set()  # layers
        self._queries: dict[int, Tensor] = {}  # [B, T, query heads · D], of layers that are not fitted

    def begin(self, step: Step) -> None:
        step.on_undo(self._restore, set(self._fitted), dict(self._queries))

    def queried(self, layer: int, q_BHTD: Tensor) -> None:
        if layer in self._fitted or "queries" not in self.recipe.needs:
            return
        q_BTC = q_BHTD.transpose(1, 2).flatten(2)
        before = self.cache.stores[layer].length - q_BTC.shape[1]
        held = self._queries.get(layer)
        if (0 if held is None else held.shape[1]) == before:
            self._queries[layer] = q_BTC.clone() if held is None else torch.cat([held, q_BTC], 1)

    def may_encode(self, layer: int) -> bool:
        """True if the layer is fitted, which happens here when a block is due; False while tokens are too few."""
        store, window = self.cache.stores[layer], self.recipe.window
        if layer in self._fitted or not store.due:
            return True
        rank_BT = self._rank(store)
        if not len(rank_BT) or int(rank_BT.amax(1).min()) < self.setting.enough(window.sinks, window.block):
            return False
        q_BTC = self._queries.get(layer)
        if "queries" in self.recipe.needs and (q_BTC is None or q_BTC.shape[1] != store.length):
            raise RuntimeError(
                f"{self.recipe.name} is fitted to queries: take_queries() those of every token of layer {layer}"
            )
        keys, values = (
            self._fit(layer, store, role, rank_BT, q_BTC) if self.recipe.fits(codec.scheme) else codec
            for role, codec in zip(ROLES, store.codecs, strict=True)
        )
        store.codecs = (keys, values)
        self._fitted.add(layer)
        self._queries.pop(layer, None)
        return True

    def crop(self, length: int) -> None:
        """Keep a fit until the cache is empty."""
        if length == 0:
            self._fitted.clear()
        self._queries = {layer: q[:, :length].clone() for layer, q in self._queries.items() if length}

    def reorder(self, rows: Tensor) -> None:
        self._queries = {layer: q.index_select(0, rows.to(q.device)) for layer, q in self._queries.items()}

    def bytes(self) -> dict[str, int]:
        codecs = [codec for store in self.cache.stores.values() for codec in store.codecs]
        fitted = [tensor for codec in codecs if isinstance(codec, RowCodec) for tensor in codec.tensors]
        return {"fitted": storage_bytes(fitted), "queries": storage_bytes(self._queries.values())}

    def _rank(self, store: LayerStore) -> Tensor:
        """Return the number of each slot's token among its row's real tokens, from 1 on; 0 for padding: [B, T]."""
        real_BT, shape = self.cache.positions.real_BT, (store.rows, store.length)
        if real_BT is None:
            return torch.arange(1, shape[1] + 1, device=store.buffer_2BTC.device).expand(shape)
        return real_BT.cumsum(1) * real_BT

    def _fit(self, layer: int, store: LayerStore, role: Role, rank_BT: Tensor, q_BTC: Tensor | None) -> RowCodec:
        recipe, positions = self.recipe, self.cache.positions
        self.cache.encoder.watch(layer, store.window_2BTC, 0)
        self.cache.encoder.refuse_nan()
        last = rank_BT.shape[1] if self.setting.fit_tokens == "prompt" else self.setting.fit_tokens
        x_BTC, codecs = store.window_2BTC[ROLES.index(role)], []
        for index, rank_T in enumerate(rank_BT):
            seen = (rank_T > 0) & (rank_T <= last)
            fitted, positions_T = seen & (rank_T > store.window.sinks), positions.of_row(index, rank_T.device)
            x_TC, queries = x_BTC[index][fitted].float(), None
            if role == "key" and recipe.position == "pre":
                x_TC = self._before_rope(x_TC, positions_T[fitted])
            if q_BTC is not None:
                queries = partial(self._of_row, q_BTC[index][seen], positions_T[seen])
            codecs.append(fit_row(recipe, layer, role, self.cache.geometry, x_TC, queries))
        return RowCodec(codecs)

    def _of_row(self, q_TC: Tensor, positions_T: Tensor, which: Queries) -> Tensor:
        """Return queries of one row, before or after RoPE, float32."""
        return q_TC.float() if which == "after" else self._before_rope(q_TC.float(), positions_T)

    def _before_rope(self, x_TC: Tensor, positions_T: Tensor) -> Tensor:
        """Return keys or queries of one row, before RoPE."""
        tables = self.cache.positions.require().tables(positions_T[None])
        return rope.unrotate(x_TC[None].unflatten(-1, (-1, self.cache.geometry.head_size)), *tables)[0].flatten(-2)

    def _restore(self, fitted: set[int], queries: dict[int, Tensor]) -> None:
        for layer in self._fitted - fitted:
            if layer in self.cache.stores:
                self.cache.stores[layer].codecs = self.cache.codecs[layer]
        self._fitted, self._queries = fitted, queries
