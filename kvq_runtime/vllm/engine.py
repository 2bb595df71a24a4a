"""Load what a worker serves, once for all layers of an engine, and refuse an engine that it cannot be served in."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from kvq_runtime.codec import shared
from kvq_runtime.engines.source import bits, narrowed, share_of
from kvq_runtime.geometry import Geometry, attending
from kvq_runtime.hf.model import rotary_of_config
from kvq_runtime.ops.constant import own_defaults
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.recipe import Recipe
from kvq_runtime.vllm import page, served
from kvq_runtime.vllm.layer import BlockLayer, PagedLayer
from kvq_runtime.vllm.page import PageReader, Shared

logger = init_logger("vllm.kvq")  # below vllm's own, so that its level and form hold


@dataclass(frozen=True)
class Served:
    """A worker's setting: the recipe with vLLM's pages as its blocks, and what encodes its heads.

    attending  the layers of the geometry, by their number in the model
    by_block   whether pages are encoded whole, when they are full
    kernel     what its layers share that the decode kernel reads; None: torch alone reads pages
    """

    recipe: Recipe
    geometry: Geometry
    codecs: list[Any]
    rotary: Rotary | None
    dtype: torch.dtype
    attending: Sequence[int]
    by_block: bool
    kernel: Shared | None = None

    def layer(self, index: int) -> PagedLayer:
        """A layer's pages, by its number in the model."""
        index = list(self.attending).index(index)
        recipe, reader = self.recipe, None
        if self.kernel is not None and page.refusal(recipe, self.geometry, self.rotary, index) is None:
            reader = PageReader(self.kernel, index)
        laid_out = page.page_of(recipe, index, self.geometry, self.dtype, reader.orders if reader else None)
        exact = all(scheme.quantize.keeps_dtype for scheme in recipe.at(index))
        given = self.codecs[index], laid_out, self.geometry, self.rotary, 0 if exact else recipe.window.sinks
        return BlockLayer(*given, reader) if self.by_block else PagedLayer(*given)

    @cached_property
    def widest(self) -> int:
        """Bytes of a token in the layer that takes most."""
        return max(self.layer(index).page.per_token for index in self.attending)

    def share(self, own: int, beside: int) -> tuple[int, int]:
        """As `page.shared_pages`, of a layer that needs `own` bytes a token: beside others all layers take as many."""
        tokens = self.recipe.window.block
        if not beside:
            return 1, own
        blocks, per_token = page.shared_pages(self.widest, beside, tokens, self.dtype.itemsize)
        held = 4 * per_token / self.geometry.width
        said = "kvq: pages of %s tokens beside others of %s bytes: vLLM reserves %.4g bits per element"
        logger.info_once(said, blocks * tokens, beside, held)
        return blocks, per_token


def served_by(config: VllmConfig, rank: int) -> Served:
    """Load and check what KVQ_CACHE names for the model of this configuration. Raises what `served` raises."""
    reference = served.asked()
    assert reference is not None, "kvq's attention without KVQ_CACHE"
    found, model, moved = served.load(reference), config.model_config, config.kv_transfer_config is not None
    _check(config)
    settings = model.hf_text_config.to_dict()
    whole = served.check_model(found, settings, model.model, model.revision)
    by_block = served.by_block(found.recipe, whole)
    with served.named(reference):
        recipe = served.paged(found.recipe, whole, config.cache_config.block_size)
        if by_block and model.is_hybrid:
            raise ValueError(
                f"{recipe.name} encodes whole pages, which this model's layers of other kinds would share; take a "
                "recipe that encodes token by token"
            )
        if by_block and moved:
            raise ValueError(
                f"a KV connector moves pages alone, and the newest tokens of {recipe.name}, whose codes belong to "
                "whole blocks, are beside them; drop --kv-transfer-config, or take another recipe"
            )
    if moved and recipe.window.sinks:
        logger.warning("kvq: first tokens are encoded like all others, as a KV connector moves pages alone")
        recipe = recipe.with_exact(sinks=0)
    share = share_of(whole, rank, config.parallel_config.tensor_parallel_size)
    geometry, tensors = narrowed(recipe, whole, found.tensors, share)
    rotary = rotary_of_config(model.hf_text_config, model.dtype) if "positions" in recipe.needs else None
    codecs, kept = shared.build(recipe, geometry, tensors), bits(recipe, geometry)
    logger.info_once("kvq: %s, %.4g bits per element, first %s tokens exact", recipe.name, kept, recipe.window.sinks)
    kernel = None if current_platform.is_cpu() else _kernel(config, recipe, geometry, rotary, by_block)
    by_block = by_block or kernel is not None
    return Served(recipe, geometry, codecs, rotary, model.dtype, attending(settings), by_block, kernel)


def _kernel(
    config: VllmConfig, recipe: Recipe, geometry: Geometry, rotary: Rotary | None, by_block: bool
) -> Shared | None:
    """Return the kernel's shared state, so that pages are encoded whole; None: torch alone reads them."""
    model = config.model_config
    plain = not model.is_hybrid and config.kv_transfer_config is None and model.get_sliding_window() is None
    if by_block or plain:
        reason = page.refusal_of_all(recipe, geometry, rotary)
    else:
        reason = "it reads whole pages, not for KV connectors, nor for models with sliding windows or other layers"
    if reason is not None:
        logger.warning_once("kvq: pages are read by torch operations, and by no kernel: %s", reason)
        return None
    said = "kvq: a kernel, which has not been tried on a GPU, answers decode steps, from pages of %s tokens"
    logger.warning_once(said, recipe.window.block)
    return Shared(recipe, geometry, rotary)


def _check(config: VllmConfig) -> None:
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


_served: list[tuple[VllmConfig, Served]] = []  # by the engine of this process


def of(config: VllmConfig) -> Served:
    """Return what all layers of an engine share; the first call makes it."""
    if not _served or _served[0][0] is not config:
        parallel = config.parallel_config
        with own_defaults():
            made = served_by(config, parallel.rank % parallel.tensor_parallel_size)
        _served[:] = [(config, made)]
    return _served[0][1]
