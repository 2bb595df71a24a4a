"""Hold a model's compressed cache: exact sinks, encoded blocks, an exact window, in every layer.

Layers are updated in order, once per forward pass: `update` hands out all keys and values, history decoded (see
`store/decode.py`); or `take` only takes the new ones in, `attend` answers queries from what is held, and `finish`
encodes what is due (see `store/encode.py`). A forward pass is a `Step`: if it fails, or stops midway, it is undone as
if it had never been. What a recipe chooses among tokens is up to its policies (`policies/policy.py`).

Knows nothing of transformers: see `hf/`. Tensors are [B, T, C], all heads side by side.
"""

import logging
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.attention.fused import Fused, refusal
from kvq_runtime.attention.path import Query
from kvq_runtime.attention.paths import Paths
from kvq_runtime.codec import shared
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import dense
from kvq_runtime.policies.policy import CacheParts, Policies
from kvq_runtime.recipe import OURS, Recipe, weighs
from kvq_runtime.store.block_errors import COLLAPSE, QUANTILE, WARN, BlockErrors, Bounds
from kvq_runtime.store.decode import Decoder, Pair
from kvq_runtime.store.encode import Encoder
from kvq_runtime.store.layer import LayerStore
from kvq_runtime.store.memory import MemoryReport, Sizes, report
from kvq_runtime.store.positions import Positions
from kvq_runtime.store.step import Step
from kvq_runtime.store.storage import Slab, storage_bytes

_log = logging.getLogger(__name__)


class BlockCache:
    """The compressed cache of `geometry` under `recipe`, with an artifact's tensors where the recipe is fitted.

    max_tokens   what the tables of a GPU are made for, see attention/fused.py
    dtype        of the model, which an empty cache takes for that of its tokens
    bounds       of the errors of blocks, which are counted; none: they are not measured
    warned       whether the log has said that many are beyond, or need not
    layers       the stores of the layers that have taken in tokens
    positions    what is announced and known of its tokens
    policies     those of the recipe, at work in this cache
    reencoded    counts tokens that were decoded and will be encoded again: only a crop below the window does that

    An error undoes the forward pass it comes from; nothing else changes.
    """

    def __init__(
        self,
        recipe: Recipe,
        geometry: Geometry,
        tensors: Mapping[str, Tensor] | None = None,
        max_tokens: int = 1 << 17,
        dtype: torch.dtype = torch.bfloat16,
        bounds: Bounds | None = None,
    ):
        self.recipe = recipe.check(geometry)
        self.geometry = geometry
        self.codecs = shared.build(recipe, geometry, tensors or {})
        self._last, self._max_tokens = geometry.layers - 1, max_tokens
        self.dtype, self.bounds = dtype, bounds
        self._smaller: dict[tuple[int, torch.dtype], int | None] = {}  # than 16 bit, from so many tokens
        self.warned = False
        self.reset()

    def reset(self) -> None:
        """Forget every token."""
        recipe, geometry = self.recipe, self.geometry
        self.positions = Positions()
        self.decoder = Decoder(recipe, geometry, self.codecs, self.positions)
        self.layers = self.decoder.stores
        self.encoder = Encoder(self.decoder, BlockErrors(self.bounds) if self.bounds else None)
        self.fused = Fused(recipe, geometry, self.positions, self._max_tokens)
        self.policies = Policies(CacheParts(self.codecs, self.encoder))
        self.encoder.encoding = self.policies.encoding
        weigh = self.policies.weighed if self.policies.newest else None
        chosen = [policy.path for policy in self.policies if policy.path is not None]
        self.paths = Paths(self.decoder, self.fused, chosen, weigh)
        self.reencoded = self._measured = 0  # blocks whose errors the log was asked about
        self.step: Step | None = None  # the forward pass under way

    def __getstate__(self) -> dict[str, Any]:
        """Return what is held between two forward passes; a pass that stopped midway is undone."""
        self.settle()
        self.decoder.clear()
        self.positions.forget_factors()
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for layer, store in self.layers.items():
            store.index = self.fused.index(layer, self.codecs[layer], store.buffer_2BTC[0])

    # ---- one layer of one forward pass -------------------------------------------------------------------------

    def update(self, layer: int, k_BTC: Tensor, v_BTC: Tensor) -> Pair:
        """Take in a layer's new keys (after RoPE) and values; return all of them, history decoded, as 16-bit would.

        What is returned is valid until the next layer's update, which decodes into the same memory.
        The first call returns its arguments: a prompt attends to exact keys and values. What is due is encoded after
        the reading, so a step attends to the state before.
        """
        unseen = self.recipe.needs & OURS
        if unseen:
            raise RuntimeError(
                f"{self.recipe.name} needs {' and '.join(sorted(unseen))}, which update() does not see; "
                "use take(), attend() and finish(), with take_queries() for queries"
            )
        try:
            out = (k_BTC, v_BTC) if self.take(layer, k_BTC, v_BTC) else self.decoder.whole(layer)
            self.finish(layer)
        except Exception:
            self.settle()
            raise
        return out

    def take(self, layer: int, k_BTC: Tensor, v_BTC: Tensor) -> bool:
        """Take in a layer's new keys (after RoPE) and values, which `finish` encodes; True if they are its first."""
        try:
            store = self._arrive(layer, k_BTC)
            before = store.length
            store.append(k_BTC, v_BTC)
        except Exception:
            self.settle()
            raise
        return before == 0

    def adopt(self, count: int, fields: Mapping[int, tuple[Slab, Slab]], sinks: Mapping[int, Tensor]) -> None:
        """Begin with `count` blocks that were encoded elsewhere, of a text's first tokens; the cache is empty.

        fields   by layer, of keys and of values, as codecs encode them, [B, count, ...] a field
        sinks    by layer, the exact tokens among them, [2, B, sinks, C], in the model's dtype and on its device
        RuntimeError where a policy would have had to see the tokens arrive.
        """
        if self.layers or self.policies:
            what = "the cache holds tokens: reset() it" if self.layers else f"{self.recipe.name} chooses among tokens"
            raise RuntimeError(f"blocks that were encoded elsewhere cannot be taken in; {what}")
        for layer in range(self.geometry.layers):
            store = self.layers[layer] = self._store(layer, sinks[layer][0])
            store.adopt(count, *fields[layer], sinks[layer])
        first = self.layers[0]
        self.positions.extend(first.rows, count * self.recipe.window.block, first.buffer_2BTC.device)

    def take_queries(self, layer: int, q_BHTD: Tensor) -> None:
        """Take the queries [B, query heads, T, D] of what `take` took in, for a recipe that is fitted to them."""
        for policy in self.policies:
            policy.queried(layer, q_BHTD.detach())

    def attend(
        self, layer: int, q_BHTD: Tensor, mask: Tensor | None, scale: float, softmax: dense.Softmax = dense.PLAIN
    ) -> Tensor:
        """Answer a `Query` of the layer: in the shape of the queries.

        softmax   a cap on scores, and a logit of no token, which must not be where the recipe `weighs` tokens
        """
        assert softmax.logit_H is None or not weighs(self.recipe), "weights of which a logit takes a share"
        return self.paths.attend(Query(self.layers[layer], q_BHTD, mask, scale, softmax.cap), softmax.logit_H)

    def finish(self, layer: int) -> None:
        """Encode what is due in a layer that `take` extended, and drop what no layer above will read."""
        try:
            store, step, last = self.layers[layer], self.step, layer == self._last
            may = not self.policies or self.policies.may_encode(layer)
            if may and store.length - store.encoded >= store.recent + store.window.block:
                self.encoder.flush(layer)
            store.trim()
            if last:
                self.decoder.clear()
                self.positions.forget_factors()
            elif self.recipe.cross_layer:
                self.decoder.forget(layer)
            if step is not None:
                step.done.add(layer)
                if len(step.done) == self.geometry.layers and not self.positions.recorded:
                    self._end(step)
        except Exception:
            self.settle()
            raise

    def _end(self, step: Step) -> None:
        """End a forward pass in which all layers are done; nothing of it is undone any more."""
        self.encoder.refuse_nan()
        if self.policies:
            for policy in self.policies:
                policy.end(step)
            self.encoder.refuse_nan()  # a policy may have encoded
            self.positions.forget_factors()
        step.commit()
        self.step = None
        errors, self.encoder.first_errors = self.encoder.first_errors, {}
        if errors and not self.warned:
            self._warn_of_collapse(errors)
        if self.encoder.errors is not None and not self.warned:
            self._warn(self.encoder.errors)

    def _arrive(self, layer: int, k_BTC: Tensor) -> LayerStore:
        """Begin a forward pass with its first layer; one that stopped midway is undone first."""
        batch, count, _ = k_BTC.shape
        step = self.step
        if step is not None and (layer in step.taken or count != step.count):
            self.settle()
            step = None
        store = self.layers.get(layer)
        if store is not None and batch != store.buffer_2BTC.shape[1]:
            raise ValueError(f"{batch} rows; the cache holds {store.rows}: reset() it, or make one for each batch")
        if step is None and count:
            step = self.begin(count, batch, k_BTC)
        if store is None:
            store = self.layers[layer] = self._store(layer, k_BTC)
            if step is not None:
                step.on_undo(self.layers.pop, layer)
        if step is not None:
            below = self.layers.get(layer - 1)
            if self.recipe.cross_layer and layer > 0 and (below is None or below.length != self.positions.length):
                raise RuntimeError(f"layer {layer} is predicted from layer {layer - 1}; update that one before it")
            store.begin(step)
            step.taken.add(layer)
        return store

    def begin(self, count: int, batch: int, like: Tensor) -> Step:
        """Begin a forward pass of so many tokens a row, with keys like these."""
        self.decoder.clear()
        device = like.device
        step = self.step = Step(self.positions.seen, count, batch, device)
        step.on_undo(self.positions.restore, *self.positions.state)
        if (errors := self.encoder.errors) is not None:
            step.on_undo(errors.restore, errors.blocks, errors.beyond)
        for policy in self.policies:
            policy.begin(step)
        self.fused.publish(self.layers)
        self.positions.extend(batch, count, device)
        if "positions" in self.recipe.needs:
            self.positions.require()
        return step

    def _store(self, layer: int, k_BTC: Tensor) -> LayerStore:
        keys, values = self.codecs[layer]
        pair = self.codecs[layer] = shared.moved(keys, k_BTC.device), shared.moved(values, k_BTC.device)
        index = self.fused.index(layer, pair, k_BTC)
        return LayerStore(pair, self.recipe.window, self.positions, k_BTC, index)

    def settle(self) -> None:
        """Undo a forward pass that has not ended."""
        if self.step is not None:
            self.undo()
            self.fused.padding.forget()

    def undo(self) -> None:
        """Undo one, where padding is as it was."""
        step, self.step = self.step, None
        if step is not None:
            step.undo()
            for layer in step.taken & self.layers.keys():
                self.layers[layer].undo()
            self.encoder.forget()
            self.decoder.clear()

    # ---- the whole cache ---------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens of the forward passes that have ended, those that were dropped since among them."""
        return self.positions.seen if self.step is None else self.step.before

    @property
    def rows(self) -> int:
        """Rows of the batch; 0 for an empty cache."""
        return next((store.rows for store in self.layers.values()), 0)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens. The survivors of a block that is cut return to the window, decoded.

        Raises RuntimeError where some of them have been dropped since: they cannot be had back.
        """
        self.settle()
        seen = max(0, min(length, self.length))
        for policy in self.policies:
            policy.check_crop(seen)
        self.fused.padding.forget()
        slots = max(0, seen - self.positions.dropped)
        self.reencoded += self.decoder.crop(slots)
        self.positions.crop(slots)
        for policy in self.policies:
            policy.crop(seen if slots else 0)
        if slots == 0:
            self.layers.clear()

    def reorder(self, rows: Tensor) -> None:
        """Keep these rows, int64, of every tensor that has rows, in this order: beam search, batch changes."""
        self.settle()
        self.decoder.restart()
        self.fused.padding.forget()
        self.positions.reorder(rows)
        for policy in self.policies:
            policy.reorder(rows)
        for store in self.layers.values():
            store.reorder(rows.to(store.buffer_2BTC.device))

    @property
    def refusal(self) -> str | None:
        """The reason why, on a GPU, some layer is decoded before attention; None: all are read packed."""
        reasons = (refusal(self.recipe, self.geometry, layer) for layer in range(self.geometry.layers))
        return next(filter(None, reasons), None)

    def _warn_of_collapse(self, errors: Mapping[int, Tensor]) -> None:
        """Log, once, that keys of the first blocks lost more than COLLAPSE times what differs between tokens; waits."""
        of_layers = dict(zip(errors, torch.stack([*errors.values()]).tolist(), strict=True))
        worst = max(of_layers, key=of_layers.__getitem__)
        if of_layers[worst] > COLLAPSE:
            self.warned = True
            _log.warning(
                f"{self.recipe.name}: in layer {worst} the error of encoded keys is {of_layers[worst]:.1f} times what "
                "differs between tokens: do not trust the model's answers; use kivi-4bit, whose ranges are of single "
                "channels, or measure recipes on this model with kvq compare"
            )

    def _warn(self, errors: BlockErrors) -> None:
        """Log, once, that many blocks are beyond; asks the device after passes that have encoded some."""
        share = None if errors.blocks == self._measured else errors.share
        self._measured = errors.blocks
        if share is not None and share > WARN:
            self.warned = True
            _log.warning(
                "%s: the errors of %.1f%% of the blocks are beyond %.1f%% of those in calibration: the text or the "
                "model differs from the calibration's; memory_report().beyond is the share",
                self.recipe.name, 100 * share, 100 * QUANTILE,
            )  # fmt: skip

    def memory_report(self) -> MemoryReport:
        """Count the bytes held, by kind, and those of 16 bits."""
        others = [self.fused.bytes(), *(policy.bytes() for policy in self.policies)]
        shared = [tensor for codec in chain.from_iterable(self.codecs) for tensor in codec.shared]
        stores, shared = self.layers.values(), storage_bytes([*shared, *self.fused.shared])
        dtype = next((store.buffer_2BTC.dtype for store in stores), self.dtype)
        case = max(1, self.rows), dtype
        if case not in self._smaller:
            self._smaller[case] = Sizes(self.recipe, self.geometry, dtype).smaller_from(case[0])
        errors = self.encoder.errors
        return report(
            self.recipe, self.geometry, stores, self.positions, others, shared, dtype, tokens=self.length,
            scratch_peak=self.decoder.scratch_peak, smaller_than_16bit_from=self._smaller[case],
            beyond=None if errors is None else errors.share,
        )  # fmt: skip
