"""One layer of pages as vLLM hands them out: shared, in no order, with tokens that come in any chunks."""

from dataclasses import replace

import torch
from torch import Tensor

from kvq_runtime.artifact import recipe_text
from kvq_runtime.codec import codec as codecs
from kvq_runtime.codec import shared
from kvq_runtime.codec.codec import Context
from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.ops import rope
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.recipe import Recipe, with_each
from kvq_runtime.vllm import attend, plugin
from kvq_runtime.vllm.attend import Batch
from kvq_runtime.vllm.exact import ExactTokens
from kvq_runtime.vllm.layer import PagedLayer
from kvq_runtime.vllm.page import PageReader, Shared, page_of, refusal

SIZE = Geometry(1, 2, 32)
SHARED = 3  # query heads of a KV head
PAGE = 16
ROTARY = Rotary(1e4 ** -(torch.arange(16) / 16), 1.0, torch.float32)


def tensors_of(recipe: Recipe, size: Geometry = SIZE) -> dict[str, Tensor]:
    """Fitted tensors at random; deviations are positive."""
    drawn = {name: torch.randn(shape).to(dtype) for name, (shape, dtype) in codecs.all_specs(recipe, size).items()}
    return {name: 0.2 + x.abs() if name.endswith("deviation") else x for name, x in drawn.items()}


def recipe_of(name: str, size: Geometry) -> Recipe:
    """Read a recipe's name; one with a budget of bits has slabs of 4, 3, 2 and 0 bits in each head."""
    recipe = recipe_text.read(name)
    if not getattr(recipe.key.quantize, "target", 0):
        return recipe
    counts = tuple(size.width // 4 if bits in (4, 3, 2, 0) else 0 for bits in range(7, -1, -1))
    return with_each(recipe, lambda scheme: replace(scheme, quantize=replace(scheme.quantize, counts=counts)))


class PagedServer:
    """One layer, with as many requests as wanted, in pages that are handed out in no order.

    kernel   pages are in the order of the decode kernel
    """

    def __init__(
        self, name: str, sinks: int = 0, drafts: int = 0, size: Geometry = SIZE, page: int = PAGE, kernel: bool = False,
        dtype: torch.dtype = torch.float32,
    ):  # fmt: skip
        recipe, self.size, self.dtype = recipe_of(name, size), size, dtype
        self.page = recipe.window.block if plugin.by_block(recipe) else page
        self.recipe = plugin.paged(recipe, self.page).with_exact(sinks=sinks)
        plugin.check_recipe(self.recipe)
        self.pair = shared.build(self.recipe, size, tensors_of(self.recipe, size))[0]
        half = size.head_size // 2
        self.rotary = replace(ROTARY, frequencies_K=1e4 ** -(torch.arange(half) / half))
        rotary = self.rotary if "positions" in self.recipe.needs else None
        reader = None
        if kernel:
            assert refusal(self.recipe, size, rotary) is None
            reader = PageReader(Shared(self.recipe, size, rotary), 0)
        layout = page_of(self.recipe, 0, size, dtype, reader.orders if reader else {})
        self.layer = PagedLayer(0, self.pair, layout, size, rotary, sinks, reader)
        self.cache = torch.zeros(64, 1, self.page, layout.per_token, dtype=torch.uint8)
        self.cache[1:] = 255  # what other layers leave, which are NaNs where they are read as numbers
        self.cache = self.cache.view(dtype)
        self.layer.bind(self.cache)
        self.exact = ExactTokens(self.page, sinks, drafts)
        self.free = (1 + torch.randperm(63)).tolist()  # page 0 is nobody's, and zeros, as in vLLM
        self.tables: list[list[int]] = []
        self.texts: list[tuple[Tensor, Tensor]] = []

    def add(self, tokens: int, like: int | None = None, shared: int = 0) -> int:
        """A request of so many tokens, the first `shared` pages those of another."""
        x = torch.randn(2, tokens, self.size.width).to(self.dtype)
        table = [self.free.pop() for _ in range(-(-tokens // self.page))]
        if like is not None:
            table[:shared] = self.tables[like][:shared]
            for index in range(2):
                x[index, : shared * self.page] = self.texts[like][index][: shared * self.page]
        self.tables.append(table)
        self.texts.append((x[0], x[1]))
        return len(self.tables) - 1

    def step(self, parts: dict[int, tuple[int, int]], queries: dict[int, Tensor]) -> dict[int, Tensor]:
        """Tokens start to stop of each request arrive together, with as many queries; what they attend to."""
        batch = self.arrive(parts)
        q = torch.cat([queries[i][slice(*part)] for i, part in parts.items()])
        out = torch.empty_like(q).fill_(torch.nan)
        attend.attend(self.layer, batch, q, out, 0.2)
        return {i: out[s : s + c] for i, s, c in zip(parts, batch.starts, batch.counts, strict=True)}

    def arrive(self, parts: dict[int, tuple[int, int]]) -> Batch:
        """Take in tokens start to stop of each request."""
        starts, counts, lengths, row = [], [], [], 0
        for start, stop in parts.values():
            starts.append(row)
            counts.append(stop - start)
            lengths.append(stop)
            row += stop - start
        widest = max(len(self.tables[i]) for i in parts)
        table = torch.tensor([self.tables[i] + [0] * (widest - len(self.tables[i])) for i in parts])
        pair = {
            role: torch.cat([self.texts[i][index][slice(*part)] for i, part in parts.items()])
            for index, role in enumerate(ROLES)
        }
        exact = self.exact.step(starts, counts, lengths, table.tolist())
        self.layer.take(pair, exact)
        return Batch(starts, counts, lengths, table, exact)

    def expected(self, request: int, q_THD: Tensor) -> Tensor:
        """Dense attention, in float64, over the whole text encoded at once and decoded; a query's own page is exact."""
        count = len(q_THD)
        parts = []
        for index in range(2):
            x_TC = self.texts[request][index][:count]
            parts += [self._decoded(index, x_TC), x_TC]
        decoded_K, exact_K, decoded_V, exact_V = (self._by_query_head(x_TC) for x_TC in parts)
        places = torch.arange(count)
        own = places[:, None] // self.page * self.page <= places
        own = (own | (places < self.recipe.window.sinks))[..., None].mT  # [queries, 1, tokens]
        s = torch.where(own, torch.einsum("qhd,khd->qhk", q_THD.double(), exact_K),
                        torch.einsum("qhd,khd->qhk", q_THD.double(), decoded_K)) * 0.2  # fmt: skip
        p = s.masked_fill(torch.ones(count, count).triu(1).bool()[:, None], -torch.inf).softmax(-1)
        out = torch.einsum("qhk,khd->qhd", p * own, exact_V) + torch.einsum("qhk,khd->qhd", p * ~own, decoded_V)
        return out.float()

    def _decoded(self, index: int, x_TC: Tensor) -> Tensor:
        """A text encoded and decoded; sinks as the token after them, and no page that is not full."""
        codec, heads, count = self.pair[index], self.size.kv_heads, len(x_TC) // self.page * self.page
        positions = torch.arange(count).clamp(min=self.recipe.window.sinks)
        tables = self.rotary.tables(positions.view(-1, self.page))
        given = x_TC[positions].view(-1, self.page, self.size.width)
        if codec.unrotated:
            given = rope.unrotate(given.unflatten(-1, (heads, -1)), *tables).flatten(-2)
        context = Context(rope=tables)
        found = codec.restore(codec.decode(codec.encode(given, context), context), context).float()
        if codec.unrotated:
            found = rope.rotate(found.unflatten(-1, (heads, -1)), *tables).flatten(-2)
        return torch.cat([found.flatten(0, 1), torch.zeros(len(x_TC) - count, self.size.width)])

    def _by_query_head(self, x_TC: Tensor) -> Tensor:
        return x_TC.unflatten(-1, (self.size.kv_heads, -1)).repeat_interleave(SHARED, 1).double()


def queries_of(count: int, size: Geometry = SIZE, shared: int = SHARED) -> Tensor:
    return torch.randn(count, size.kv_heads * shared, size.head_size)
