"""vLLM's attention over kvq's pages: what its v1 engine asks of a backend, and nothing else.

vLLM chooses one backend class for all layers and asks it, not the layer, how large a page is. So the class that is
registered (`KVQBackend`) serves a layer as vLLM would until its weights are loaded; then each layer that kvq takes gets
the class of its page (`_backend_of`), which says its bytes. Layers with the same bytes share one. A layer that does not
attend to all tokens keeps vLLM's own cache and attention.

Pinned to vLLM 0.32 and 0.33: `customize_spec` is marked temporary there.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheLayout

from kvq_runtime.codec import shared
from kvq_runtime.engines import heads, nearest
from kvq_runtime.geometry import Geometry, Role
from kvq_runtime.hf.model import rotary_of_config
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.recipe import Recipe
from kvq_runtime.vllm import attend, served, source
from kvq_runtime.vllm.attend import Batch
from kvq_runtime.vllm.first_tokens import Arrived, FirstTokens
from kvq_runtime.vllm.layer import PagedLayer
from kvq_runtime.vllm.page import Page, page_of
from kvq_runtime.vllm.stock import STOCK
from kvq_runtime.vllm.torch_defaults import own_defaults

logger = init_logger("vllm.kvq")  # below vllm's own, so that its level and form hold


@dataclass(frozen=True)
class Served:
    """What a worker serves: the recipe with vLLM's pages as its blocks, and what is needed to encode its heads."""

    recipe: Recipe
    geometry: Geometry
    codecs: list[Any]
    rotary: Rotary | None
    dtype: torch.dtype

    def page(self, layer: int) -> Page:
        return page_of(self.recipe, layer, self.geometry, self.dtype)


def served_by(config: VllmConfig, rank: int) -> Served:
    """Load and check what KVQ_CACHE names for the model of this configuration. Raises what `source` raises."""
    reference = source.asked()
    assert reference is not None, "kvq's attention without KVQ_CACHE"
    found, model = source.load(reference), config.model_config
    _check_engine(config)
    whole = source.check_model(found, model.hf_text_config.to_dict(), model.model, model.revision)
    recipe = served.paged(found.recipe, config.cache_config.block_size)
    if config.kv_transfer_config is not None and recipe.window.sinks:
        logger.warning("kvq: first tokens are encoded like all others, as a KV connector moves pages alone")
        recipe = recipe.with_exact(sinks=0)
    share = heads.share_of(whole, rank, config.parallel_config.tensor_parallel_size)
    geometry, tensors = heads.narrowed(recipe, whole, found.tensors, share)
    rotary = rotary_of_config(model.hf_text_config, model.dtype) if "positions" in recipe.needs else None
    codecs = shared.build(recipe, geometry, tensors)
    kept = nearest.bits(recipe, geometry)
    logger.info_once("kvq: %s, %.4g bits per element, first %s tokens exact", recipe.name, kept, recipe.window.sinks)
    if not current_platform.is_cpu():
        logger.warning_once("kvq: pages are read by torch operations; there is no kernel for vLLM's pages yet")
    return Served(recipe, geometry, codecs, rotary, model.dtype)


def _check_engine(config: VllmConfig) -> None:
    speculative = config.speculative_config
    if speculative is not None and speculative.method != "ngram":
        raise ValueError(
            f"KVQ_CACHE does not serve the layers of a draft model (speculative method {speculative.method}); use ngram"
        )
    if config.cache_config.cache_dtype != "auto":
        raise ValueError(
            f"KVQ_CACHE says how the cache is stored, and --kv-cache-dtype {config.cache_config.cache_dtype} says "
            "otherwise; drop one"
        )
    if config.parallel_config.decode_context_parallel_size > 1:
        raise ValueError("KVQ_CACHE does not serve decode context parallelism; drop it")


class _Once:
    """What all layers of an engine share, made with the first of them."""

    config: VllmConfig | None = None
    served: Served

    def of(self, config: VllmConfig) -> Served:
        if self.config is not config:
            parallel = config.parallel_config
            with own_defaults():
                made = served_by(config, parallel.rank % parallel.tensor_parallel_size)
            self.config, self.served = config, made
        return self.served


_engine = _Once()


@dataclass
class Metadata:
    """A step as kvq's layers read it.

    positions   of its tokens in their texts, int64 [T]
    arrived     which of its tokens stay exact
    held        entries that first tokens have ever had
    """

    batch: Batch
    positions: Tensor
    arrived: Arrived | None
    held: int


class Builder(AttentionMetadataBuilder[Metadata]):
    """Makes a step's metadata, once for all layers of a group."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        impl = layers[layer_names[0]].impl
        self._first = FirstTokens(impl.layer.sinks, impl.layer.page.tokens) if impl.layer.sinks else None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        given = common_attn_metadata
        edges = given.query_start_loc_cpu.tolist()
        starts, counts = edges[:-1], [stop - start for start, stop in pairwise(edges)]
        lengths, table = given.seq_lens.tolist(), given.block_table_tensor
        positions = [torch.arange(length - count, length) for count, length in zip(counts, lengths, strict=False)]
        arrived, entries, held = None, None, 0
        if self._first is not None and bool((given.slot_mapping[: edges[-1]] >= 0).any()):  # a dry run has no slots
            arrived, rows = self._first.step(starts, counts, lengths, table.tolist())
            entries, held = torch.tensor(rows, device=table.device), self._first.held
        batch = Batch(starts, counts, lengths, table, entries)
        return Metadata(batch, torch.cat(positions).clamp(min=0).to(table.device), arrived, held)


class KVQImpl(STOCK.get_impl_cls()):
    """The attention of one layer: kvq's, or vLLM's own where kvq does not take the layer."""

    layer: PagedLayer | None = None

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *rest: Any, **named: Any):
        super().__init__(num_heads, head_size, scale, num_kv_heads, *rest, **named)
        names = (
            "alibi_slopes", "sliding_window", "kv_cache_dtype", "logits_soft_cap", "attn_type",
            "kv_sharing_target_layer_name",
        )  # fmt: skip
        given = dict(zip(names, rest, strict=False)) | named
        config = get_current_vllm_config()
        self._config = config
        self._served: Served | None = None
        plain = given.get("sliding_window") is None and given.get("attn_type", "decoder") == AttentionType.DECODER
        odd = [
            name
            for name in ("alibi_slopes", "logits_soft_cap", "kv_sharing_target_layer_name", "sinks")
            if given.get(name) not in (None, 0)
        ]
        if plain and odd:
            raise ValueError(f"KVQ_CACHE does not serve attention with {odd[0]}, which this model has")
        if plain:
            self._served = _engine.of(config)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        if self._served is None or self.layer is not None:
            return
        layers, made = self._config.compilation_config.static_forward_context, self._served
        name, module = next((name, one) for name, one in layers.items() if getattr(one, "impl", None) is self)
        index = extract_layer_index(name)
        page = made.page(index)
        sinks = 0 if _exact(made.recipe, index) else made.recipe.window.sinks
        self.layer = PagedLayer(made.codecs[index], page, made.geometry, made.rotary, sinks)
        module.attn_backend = _backend_of(page.per_token, sinks)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if self.layer is None:
            return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        known = get_forward_context().attn_metadata
        step = known.get(layer.layer_name) if isinstance(known, dict) else None
        if step is None or not kv_cache.numel():
            return None
        self.layer.bind(kv_cache)
        tokens = min(len(slot_mapping), len(step.positions))
        pair: dict[Role, Tensor] = {"key": key[:tokens].flatten(1), "value": value[:tokens].flatten(1)}
        slots_T, positions_T, real_T = slot_mapping[:tokens], step.positions[:tokens], slot_mapping[:tokens] >= 0
        if not bool(real_T.all()):
            slots_T, positions_T = slots_T[real_T], positions_T[real_T]
            self.layer.write({role: x[real_T] for role, x in pair.items()}, slots_T, positions_T)
        else:
            self.layer.write(pair, slots_T, positions_T)
        if step.arrived is not None:
            self.layer.write_exact(pair, step.arrived.rows, step.arrived.entries, step.arrived.places, step.held)
        return None

    def forward(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
                output: Tensor, output_scale: Any = None, output_block_scale: Any = None) -> Tensor:  # fmt: skip
        if self.layer is None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if attn_metadata is None or not kv_cache.numel():
            return output
        self.layer.bind(kv_cache)
        shape = (-1, self.num_heads, self.head_size)
        attend.attend(self.layer, attn_metadata.batch, query.view(shape), output.view(shape), self.scale)
        return output


def _exact(recipe: Recipe, layer: int) -> bool:
    return all(scheme.quantize.keeps_dtype for scheme in recipe.at(layer))


class KVQBackend(STOCK):
    """What is registered with vLLM; it says of a layer what vLLM would, until kvq takes it."""

    forward_includes_kv_cache_update: ClassVar[bool] = False

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return KVQImpl

    @staticmethod
    def get_name() -> str:
        return STOCK.get_name() if current_platform.is_cpu() else "CUSTOM"


@cache
def _backend_of(per_token: int, sinks: int) -> type[AttentionBackend]:
    """The backend of layers whose pages have so many bytes a token, of all heads, keys and values together."""

    class Paged(KVQBackend):
        @classmethod
        def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
            if not isinstance(spec, FullAttentionSpec):
                raise ValueError(f"KVQ_CACHE: a layer that attends to all tokens has a {type(spec).__name__} in vLLM")
            return replace(spec, num_head_slots=1, state_content_bytes=per_token)

        @staticmethod
        def get_builder_cls() -> type[Builder]:
            return Builder

        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
            return [MultipleOf(1)]

        @classmethod
        def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
            return (KVCacheLayout.LBHNC,)

    Paged.__qualname__ = f"Paged{per_token}s{sinks}"
    return Paged
