"""Attend to kvq's pages in vLLM's v1 engine: its backend interface, and what the layers of an engine share.

vLLM chooses one backend class for all layers and reads the size of a page from the class, not from the layer. So the
class that is registered (`KVQBackend`) serves a layer as vLLM would until its weights are loaded; then each layer that
kvq takes gets the class of its page (`_backend_of`), which has its bytes. Layers with the same bytes share one. A layer
that does not attend to all tokens keeps vLLM's own cache and attention, as do layers of a draft, which vLLM makes once
those of the model have their weights. What a worker serves (`Served`) is loaded once.

Pinned to vLLM 0.32 and 0.33: `customize_spec` is marked temporary there, and alone sets the spec of a layer;
`register_kv_cache_spec` sets the manager of a class of specs. No step is captured whole: vLLM then captures the pieces
between attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheLayout

from kvq_runtime.codec import shared
from kvq_runtime.families import attending
from kvq_runtime.geometry import Geometry
from kvq_runtime.hf.model import rotary_of_config
from kvq_runtime.ops.constant import own_defaults
from kvq_runtime.ops.dense import Softmax
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.memory import asymptotic_bits
from kvq_runtime.vllm import attend, page, plugin, served_recipe
from kvq_runtime.vllm.attend import Batch
from kvq_runtime.vllm.exact import ExactTokens
from kvq_runtime.vllm.layer import PagedLayer
from kvq_runtime.vllm.page import PageReader, Shared
from kvq_runtime.vllm.served_recipe import shard_of

logger = init_logger("vllm.kvq")  # below vllm's own, so that its level and form hold
# vLLM's own attention of this platform, whatever is registered: it serves the layers that kvq leaves alone
_KIND = AttentionBackendEnum.CPU_ATTN if current_platform.is_cpu() else AttentionBackendEnum.TRITON_ATTN
STOCK: Any = resolve_obj_by_qualname(_KIND.value)


@dataclass(frozen=True)
class Served:
    """A worker's setting: the recipe with vLLM's pages as its blocks, and the codecs of its heads.

    attending  the layers of the geometry, by their number in the model
    kernel     state of the decode kernel that layers share; None: torch alone reads pages
    """

    recipe: Recipe
    geometry: Geometry
    codecs: list[Any]
    rotary: Rotary | None
    dtype: torch.dtype
    attending: Sequence[int]
    kernel: Shared | None = None

    def layer(self, number: int) -> PagedLayer:
        """Make a layer's pages, by its number in the model."""
        index = list(self.attending).index(number)
        recipe, reader = self.recipe, None
        if self.kernel is not None and page.refusal(recipe, self.geometry, self.rotary, index) is None:
            reader = PageReader(self.kernel, index)
        layout = page.page_of(recipe, index, self.geometry, self.dtype, reader.orders if reader else {})
        return PagedLayer(index, self.codecs[index], layout, self.geometry, self.rotary, recipe.window.sinks, reader)

    def share(self, needed: int, beside: int, block: int) -> tuple[int, int]:
        """As `page.shared_pages`, of one layer; beside others all layers take the bytes of the widest.

        block   tokens of one of vLLM's pages, where there are no others
        """
        tokens, layers = self.recipe.window.block, range(self.geometry.layers)
        if not beside:
            return block // tokens, needed
        widest = max(page.page_of(self.recipe, layer, self.geometry, self.dtype).per_token for layer in layers)
        blocks, per_token = page.shared_pages(widest, beside, tokens, self.dtype.itemsize)
        message = "kvq: pages of %s tokens beside others of %s bytes: vLLM reserves %.4g bits per element"
        logger.info_once(message, blocks * tokens, beside, 4 * per_token / self.geometry.width)
        return blocks, per_token


def served_by(config: VllmConfig, rank: int) -> Served:
    """Load and check what KVQ_CACHE names for the model of this configuration. Raises what `plugin` raises."""
    reference = plugin.asked()
    assert reference is not None, "kvq's attention without KVQ_CACHE"
    served, model = plugin.load(reference), config.model_config
    settings = model.hf_text_config.to_dict()
    with plugin.named(reference):
        served, whole = served_recipe.match(served, settings, model.model, model.revision)
        served.recipe.check(whole)
        plugin.check_engine(config)
        if config.kv_transfer_config is not None:
            raise ValueError("a KV connector moves pages, and exact tokens are beside them; drop --kv-transfer-config")
        recipe = plugin.paged(served.recipe, config.cache_config.block_size)
    shard = shard_of(whole, rank, config.parallel_config.tensor_parallel_size)
    geometry, tensors = shard.geometry(whole), shard.tensors(recipe, whole, served.tensors)
    recipe = shard.recipe(recipe)
    rotary = rotary_of_config(model.hf_text_config, model.dtype) if "positions" in recipe.needs else None
    codecs, bits = shared.build(recipe, geometry, tensors), asymptotic_bits(recipe, geometry)
    logger.info_once("kvq: %s, %.4g bits per element, first %s tokens exact", recipe.name, bits, recipe.window.sinks)
    kernel = None if current_platform.is_cpu() else _kernel(recipe, geometry, rotary)
    return Served(recipe, geometry, codecs, rotary, model.dtype, attending(settings), kernel)


def _kernel(recipe: Recipe, geometry: Geometry, rotary: Rotary | None) -> Shared | None:
    """Return the kernel's shared state; None: torch alone reads pages."""
    reasons = [page.refusal(recipe, geometry, rotary, layer) for layer in range(geometry.layers)]
    if None not in reasons:
        logger.warning_once("kvq: pages are read by torch operations, and by no kernel: %s", reasons[0])
        return None
    logger.warning_once("kvq: a kernel, which has not been tried on a GPU, answers decode steps")
    return Shared(recipe, geometry, rotary)


_served: list[tuple[VllmConfig, Served]] = []  # by the engine of this process


def served_in(config: VllmConfig) -> Served:
    """Return what all layers of an engine share; the first call makes it."""
    if not _served or _served[0][0] is not config:
        parallel = config.parallel_config
        with own_defaults():
            _served[:] = [(config, served_by(config, parallel.rank % parallel.tensor_parallel_size))]
    return _served[0][1]


class Builder(AttentionMetadataBuilder[Batch]):
    """Maker of a step's batch, once for all layers of a group."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]].impl.layer
        drafts = getattr(vllm_config.speculative_config, "num_speculative_tokens", 0)
        self._exact = ExactTokens(layer.page.tokens, layer.sinks, drafts)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Batch:
        edges = common_attn_metadata.query_start_loc_cpu.tolist()
        starts, counts = edges[:-1], [stop - start for start, stop in pairwise(edges)]
        lengths, table = common_attn_metadata.seq_lens.tolist(), common_attn_metadata.block_table_tensor
        batch = Batch(starts, counts, lengths, table)
        if bool((common_attn_metadata.slot_mapping[: edges[-1]] >= 0).any()):  # a dry run has no slots
            batch.exact = self._exact.step(starts, counts, lengths, table.tolist())  # waits for the device
        return batch


class KVQImpl(STOCK.get_impl_cls()):
    """The attention of one layer: kvq's, or vLLM's own where kvq does not take the layer."""

    layer: PagedLayer | None = None

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *rest: Any, **named: Any):
        super().__init__(num_heads, head_size, scale, num_kv_heads, *rest, **named)
        names = (
            "alibi_slopes", "sliding_window", "kv_cache_dtype", "logits_soft_cap", "attn_type",
            "kv_sharing_target_layer_name",
        )  # fmt: skip
        settings = dict(zip(names, rest, strict=False)) | named
        decoder = settings.get("attn_type", AttentionType.DECODER) == AttentionType.DECODER
        plain = decoder and settings.get("sliding_window") is None
        for name in ("alibi_slopes", "kv_sharing_target_layer_name"):
            if plain and settings.get(name) not in (None, 0):
                raise ValueError(f"KVQ_CACHE does not serve attention with {name}, which this model has")
        self._softmax = Softmax(settings.get("logits_soft_cap") or None, settings.get("sinks"))
        self._config = get_current_vllm_config()
        others = self._config.compilation_config.static_forward_context.values()
        drafting = any(getattr(getattr(module, "impl", None), "layer", None) is not None for module in others)
        self._served: Served | None = served_in(self._config) if plain and not drafting else None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        if self._served is None or self.layer is not None:
            return
        layers, served = self._config.compilation_config.static_forward_context, self._served
        name, module = next(item for item in layers.items() if getattr(item[1], "impl", None) is self)
        self.layer = served.layer(extract_layer_index(name))
        block, beside = self._config.cache_config.block_size, _largest_beside(self._config)
        blocks, per_token = served.share(self.layer.page.per_token, beside, block)
        self.layer.page = replace(self.layer.page, per_token=per_token)
        module.attn_backend = _backend_of(per_token, self.layer.page.tokens, blocks, self.layer.sinks)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if self.layer is None:
            return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        metadata = get_forward_context().attn_metadata
        step = metadata.get(layer.layer_name) if isinstance(metadata, dict) else None
        if step is not None and step.exact is not None and kv_cache.numel():
            self.layer.bind(kv_cache)
            self.layer.take({"key": key.flatten(1), "value": value.flatten(1)}, step.exact)
        return None

    def forward(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
                output: Tensor, output_scale: Any = None, output_block_scale: Any = None) -> Tensor:  # fmt: skip
        if self.layer is None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if attn_metadata is None or attn_metadata.exact is None or not kv_cache.numel():
            return output  # a dry run
        shape = (-1, self.num_heads, self.head_size)
        attend.attend(self.layer, attn_metadata, query.view(shape), output.view(shape), self.scale, self._softmax)
        self.layer.release()
        return output


class KVQBackend(STOCK):
    """The attention backend that kvq registers with vLLM: vLLM's own until kvq takes a layer."""

    forward_includes_kv_cache_update: ClassVar[bool] = False

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return KVQImpl

    @staticmethod
    def get_name() -> str:
        return STOCK.get_name() if current_platform.is_cpu() else "CUSTOM"


def _largest_beside(config: VllmConfig) -> int:
    """Return the bytes of the largest page of the layers that kvq leaves to vLLM; 0: there are none, or they have a
    memory of their own."""
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        return 0
    largest = 0
    for module in config.compilation_config.static_forward_context.values():
        taken = getattr(getattr(module, "impl", None), "_served", None) is not None
        if isinstance(module, AttentionLayerBase) and not taken:
            spec = module.get_kv_cache_spec(config)
            largest = max(largest, 0 if spec is None else spec.page_size_bytes)
    return largest


@cache
def _backend_of(per_token: int, tokens: int, blocks: int, sinks: int) -> type[AttentionBackend]:
    """Return the backend of layers whose pages, of `tokens` tokens, have `per_token` bytes for each, of all heads, keys
    and values together, and are handed out by vLLM so many `blocks` at a time."""

    class Paged(KVQBackend):
        @classmethod
        def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
            if not isinstance(spec, FullAttentionSpec):
                raise ValueError(f"KVQ_CACHE: a layer that attends to all tokens has a {type(spec).__name__} in vLLM")
            size = tokens * blocks if spec.block_size > 1 else 1  # 1: how long must a page be to hold a state
            return replace(spec, num_head_slots=1, state_content_bytes=per_token, block_size=size)

        @staticmethod
        def get_builder_cls() -> type[Builder]:
            return Builder

        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
            return [tokens]

        @classmethod
        def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
            return (KVCacheLayout.LBHNC,)

    Paged.__qualname__ = f"Paged{per_token}x{blocks}s{sinks}"
    return Paged
