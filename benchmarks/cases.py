"""Say which decode steps the GPU benchmark measures, how many bytes each must read, and build one over random codes.

The most telling come first: what is cut off by a deadline is what matters least.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.attention.fused import segment_of
from kvq_runtime.codec import codec
from kvq_runtime.geometry import ROLES, SLAB, Geometry
from kvq_runtime.ops import dispatch
from kvq_runtime.recipe import Recipe, preset
from kvq_runtime.stages.stage import Site

FAMILIES = (
    *("kivi-2bit-g128", "rtn-2bit", "lloyd-2bit", "higgs-head-2bit", "kivi-4bit-g128", "rtn-4bit", "quarot-head-4bit"),
    *("lloyd-4bit", "polar-3bit", "lloyd-3bit", "kivi-2bit"),
    *("mean-higgs-head-2bit-post", "polar-paper"),
    *("fisher-head-2.5bit", "fisher-head-3bit"),
)
# of latents, slabs of 16 of a head of 128, of 7, 6, ... 1 bits: as a fit may share them out
SLABS = {2.5: (0, 0, 1, 1, 2, 2, 1), 3.0: (0, 1, 1, 1, 2, 1, 1)}
LENGTHS = (32768, 16384, 131072, 4096, 2048)
BATCHES = (8, 1, 64)
LIMIT = 8 << 30  # bytes of bfloat16 history that a case may stand for
MAX_TOKENS = 131072  # of the models below: what the product chooses the number of splits for, whatever it holds


@dataclass(frozen=True)
class Model:
    """The attention of one layer."""

    name: str
    q_heads: int
    kv_heads: int
    head_size: int

    @property
    def geometry(self) -> Geometry:
        return Geometry(1, self.kv_heads, self.head_size)


MODELS = (Model("llama-3.1-8b", 32, 8, 128), Model("qwen2.5-7b", 28, 4, 128))


@dataclass(frozen=True)
class Case:
    """One decode step: `tokens` in all, the last `window` of them exact."""

    model: Model
    recipe: str
    tokens: int
    batch: int
    window: int = 192

    @property
    def blocks(self) -> int:
        return (self.tokens - self.window) // 128

    def schemes(self) -> Recipe:
        return counted(preset(self.recipe), self.model.geometry)

    def packed(self) -> int:
        """Bytes of the encoded blocks, keys and values."""
        recipe, elements = self.schemes(), self.batch * self.blocks * 128 * self.model.geometry.width
        return round(
            sum(scheme.bits(recipe.window.block, self.model.geometry) for scheme in (recipe.key, recipe.value))
            * elements
            / 8
        )

    def exact(self) -> int:
        """Bytes of window and sinks, keys and values, in 16 bits."""
        tokens = self.tokens - 128 * self.blocks + self.schemes().window.sinks
        return 4 * self.batch * tokens * self.model.geometry.width

    def dense(self) -> int:
        """Bytes that attention in 16 bits reads."""
        return 4 * self.batch * self.tokens * self.model.geometry.width


def cases(models: list[str], recipes: list[str], lengths: list[int], batches: list[int]) -> Iterator[Case]:
    """Every case that fits: model by model, shape by shape, all recipes of a shape together."""
    chosen = [model for model in MODELS if model.name in models]
    for model, tokens, batch, recipe in itertools.product(chosen, lengths, batches, recipes):
        case = Case(model, recipe, tokens, batch)
        if case.dense() <= LIMIT:
            yield case


def row(case: Case) -> dict[str, Any]:
    """A case, and the bytes that it must read."""
    return {
        "what": "attend", "model": case.model.name, "recipe": case.recipe, "tokens": case.tokens, "batch": case.batch,
        "packed_bytes": case.packed(), "exact_bytes": case.exact(), "dense_bytes": case.dense(),
        "bytes_ratio": round(case.dense() / (case.packed() + case.exact()), 2),
    }  # fmt: skip


def counted(recipe: Recipe, geometry: Geometry) -> Recipe:
    """The recipe, its latents' slabs as a fit may share them out."""
    quantize: Any = recipe.key.quantize
    if not quantize.takes_latents:
        return recipe
    slabs = [count * geometry.head_size // 128 for count in SLABS[quantize.target]]
    counts = [16 * geometry.kv_heads * count for count in slabs]
    shared = replace(quantize, counts=(*counts, geometry.width - sum(counts)), target=0.0, shared=False)
    return replace(recipe, key=replace(recipe.key, quantize=shared), value=replace(recipe.value, quantize=shared))


def layouts(recipe: Recipe, geometry: Geometry) -> tuple[Any, Any]:
    """The readers of keys and values, of what is fitted with zeros; None for what has no kernel."""
    layout, block, found = dispatch.kernels("attend.launch").layout, recipe.window.block, []
    for role, scheme in zip(ROLES, (recipe.key, recipe.value), strict=True):
        site, fitted = Site(scheme, role, 0, recipe.position, recipe.window, geometry), {}
        if scheme.quantize.takes_latents:
            specs = scheme.tensors(site, geometry)
            fitted = {name.split(".")[1]: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in specs.items()}
        found.append(layout(scheme, block, geometry, role, fitted, segment_of(recipe) if role == "key" else 0))
    return found[0], found[1]


def built(case: Case, device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    """The decode step over random codes: a function of the query."""
    attention = dispatch.kernels("attend.launch")
    geometry, recipe = case.model.geometry, case.schemes()
    schemes, alive = [], []
    for one, scheme in zip(layouts(recipe, geometry), (recipe.key, recipe.value), strict=True):
        assert one is not None, f"{case.recipe} has no kernel"
        full = [
            random_slab(scheme, recipe.window.block, geometry, case.batch, SLAB, device)
            for _ in range(-(-case.blocks // SLAB))
        ]
        alive.append(full)
        mean = None if scheme.predict is None else torch.zeros(geometry.width, device=device)
        table = attention.block_table(full, one.names, len(full), device)
        schemes.append(replace(one.on(device), addresses=table, mean=mean))
    sinks = recipe.window.sinks
    tokens = case.tokens - 128 * case.blocks
    shape = (case.batch, tokens, geometry.width)
    window = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)]
    exact = attention.Exact(*window, *(x[:, :sinks].clone() for x in window))
    lengths = torch.tensor([case.blocks, 0, tokens, 0], dtype=torch.int32, device=device)
    starts = torch.zeros(case.batch, dtype=torch.int32, device=device)
    rope = None
    if "positions" in recipe.needs:
        speed = 10_000.0 ** (-torch.arange(geometry.head_size // 2, device=device) * 2 / geometry.head_size)
        rope = attention.RopeTables.of(speed, 1.0, 128, case.blocks + 1, starts, segment_of(recipe))

    def step(q: Tensor) -> tuple[Tensor, Tensor]:
        assert alive
        keys, values = schemes
        splits = attention.choose_splits(q, keys, values, MAX_TOKENS // recipe.window.block)
        scale = case.model.head_size**-0.5
        return attention.attend(q, keys, values, exact, lengths, starts, scale, splits, rope, blocks=case.blocks)

    return step


def queries(case: Case, device: torch.device) -> Tensor:
    """One token's, bfloat16 [B, Hq, 1, D]."""
    model = case.model
    return torch.randn(case.batch, model.q_heads, 1, model.head_size, device=device, dtype=torch.bfloat16)


def encoder(model: Model, recipe: str, role: str, device: torch.device) -> tuple[Callable[[], Any], int]:
    """A function that encodes 64 blocks of one layer's keys or values, and the bytes of bfloat16 that it reads."""
    chosen = preset(recipe)
    one = codec.Codec(chosen, 0, role, model.geometry, {}).to(device)
    x = torch.randn(64, chosen.window.block, model.geometry.width, device=device, dtype=torch.bfloat16)
    return lambda: one.encode(x, codec.Context()), x.nbytes


def random_slab(
    scheme: Any, block: int, geometry: Geometry, batch: int, blocks: int, device: torch.device
) -> dict[str, Tensor]:
    """Fields of the right shapes; time does not depend on the codes."""
    fields = scheme.fields(block, geometry)
    made = {}
    for name, (shape, dtype) in fields.items():
        whole = (batch, blocks, *shape)
        if dtype == torch.uint8:
            made[name] = torch.randint(0, 256, whole, dtype=dtype, device=device)
        else:
            made[name] = (torch.rand(whole, device=device) * 0.1 + 0.1).to(dtype)
    return made
