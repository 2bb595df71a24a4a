"""Pages as vLLM hands them out: whatever is shared, in whatever chunks tokens come, it is the codec's attention."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvq_runtime.artifact import recipe_text
from kvq_runtime.codec import codec as codecs
from kvq_runtime.codec.codec import Context
from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.recipe import Recipe, preset
from kvq_runtime.vllm import attend, served
from kvq_runtime.vllm.attend import Batch
from kvq_runtime.vllm.first_tokens import FirstTokens
from kvq_runtime.vllm.layer import PagedLayer
from kvq_runtime.vllm.page import page_of

SIZE = Geometry(1, 2, 32)
SHARED = 3  # query heads of a KV head
PAGE = 16
ROTARY = Rotary(1e4 ** -(torch.arange(16) / 16), 1.0, torch.float32)
RECIPES = [
    "exact", "rtn-2bit", "rtn-absmax-3bit", "quarot-2bit", "quarot-head-4bit", "higgs-2bit", "higgs-head-3bit",
    "turboquant-3bit", "lloyd-1bit", "polar-3bit", "mean-higgs-head-2bit-post", "mean-lloyd-4bit-post",
    "trellis-head-2bit", "lloyd-3bit+value.quantize.bits=2",
]  # fmt: skip


def _tensors(recipe: Recipe) -> dict[str, Tensor]:
    return {name: torch.randn(shape).to(dtype) for name, (shape, dtype) in codecs.all_specs(recipe, SIZE).items()}


class _Server:
    """One layer, with as many requests as wanted, in pages that are handed out in no order."""

    def __init__(self, name: str, sinks: int = 0):
        self.recipe = served.paged(recipe_text.read(name), PAGE).with_exact(sinks=sinks)
        served.check(self.recipe, SIZE)
        self.pair = codecs.build(self.recipe, SIZE, _tensors(self.recipe))[0]
        page = page_of(self.recipe, 0, SIZE, torch.float32)
        rotary = ROTARY if "positions" in self.recipe.needs else None
        self.layer = PagedLayer(self.pair, page, SIZE, rotary, sinks)
        self.cache = torch.randint(0, 60, (64, 1, PAGE, page.per_token), dtype=torch.uint8).view(torch.float32)
        self.layer.bind(self.cache)
        self.first = FirstTokens(sinks, PAGE) if sinks else None
        self.free = torch.randperm(64).tolist()
        self.tables: list[list[int]] = []
        self.texts: list[tuple[Tensor, Tensor]] = []

    def add(self, tokens: int, like: int | None = None, shared: int = 0) -> int:
        """A request of so many tokens, the first `shared` pages those of another."""
        x = torch.randn(2, tokens, SIZE.width)
        table = [self.free.pop() for _ in range(-(-tokens // PAGE))]
        if like is not None:
            table[:shared] = self.tables[like][:shared]
            for index in range(2):
                x[index, : shared * PAGE] = self.texts[like][index][: shared * PAGE]
        self.tables.append(table)
        self.texts.append((x[0], x[1]))
        return len(self.tables) - 1

    def step(self, parts: dict[int, tuple[int, int]], queries: dict[int, Tensor]) -> dict[int, Tensor]:
        """Tokens start to stop of each request arrive together, with as many queries; what they attend to."""
        starts, counts, lengths, row = [], [], [], 0
        for start, stop in parts.values():
            starts.append(row)
            counts.append(stop - start)
            lengths.append(stop)
            row += stop - start
        widest = max(len(self.tables[i]) for i in parts)
        table = torch.tensor([self.tables[i] + [63] * (widest - len(self.tables[i])) for i in parts])
        positions = torch.cat([torch.arange(*part) for part in parts.values()])
        slots = torch.cat([
            torch.tensor(self.tables[i])[torch.arange(*part) // PAGE] * PAGE + torch.arange(*part) % PAGE
            for i, part in parts.items()
        ])  # fmt: skip
        pair = {
            role: torch.cat([self.texts[i][index][slice(*part)] for i, part in parts.items()])
            for index, role in enumerate(ROLES)
        }
        self.layer.write(pair, slots, positions)
        entries = None
        if self.first is not None:
            arrived, rows = self.first.step(starts, counts, lengths, table.tolist())
            entries = torch.tensor(rows)
            if arrived is not None:
                self.layer.write_exact(pair, arrived.rows, arrived.entries, arrived.places, self.first.held)
        q = torch.cat([queries[i][slice(*part)] for i, part in parts.items()])
        out = torch.empty_like(q).fill_(torch.nan)
        attend.attend(self.layer, Batch(starts, counts, lengths, table, entries), q, out, 0.2)
        return {i: out[s : s + c] for i, s, c in zip(parts, starts, counts, strict=True)}

    def expected(self, request: int, q_THD: Tensor) -> Tensor:
        """Dense attention, in float64, over the whole text encoded at once and decoded."""
        count = len(q_THD)
        tables = ROTARY.tables(torch.arange(count)[None])
        context = Context(rope=tables)
        decoded = []
        for index, codec in enumerate(self.pair):
            x = self.texts[request][index][None, :count]
            known = codec.restore(codec.decode(codec.encode(x, context), context), context).float()
            sinks = self.recipe.window.sinks
            known[:, :sinks] = x[:, :sinks]
            decoded.append(known[0].unflatten(-1, (SIZE.kv_heads, -1)).repeat_interleave(SHARED, 1).double())
        s = torch.einsum("qhd,khd->hqk", q_THD.double(), decoded[0]) * 0.2
        s = s.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        return torch.einsum("hqk,khd->qhd", s.softmax(-1), decoded[1]).float()


def _queries(count: int) -> Tensor:
    return torch.randn(count, SIZE.kv_heads * SHARED, SIZE.head_size)


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("name", RECIPES)
def test_attention_is_the_codecs(name: str, sinks: int, monkeypatch):
    """A prompt in chunks, a short one, one with a shared prefix; then single steps of all, by runs of few tokens."""
    monkeypatch.setattr(attend, "TOKENS", 64)
    server = _Server(name, sinks)
    long, short = server.add(117), server.add(9)
    sharing = server.add(70, like=long, shared=3)
    lengths = {long: 117, short: 9, sharing: 70}
    queries = {i: _queries(n) for i, n in lengths.items()}
    found = {i: torch.full_like(q, torch.nan) for i, q in queries.items()}
    steps = [{long: (0, 50), short: (0, 2)}, {long: (50, 113), short: (2, 6)}, {long: (113, 114), sharing: (48, 67)}]
    steps += [{long: (113 + n, 114 + n), short: (5 + n, 6 + n), sharing: (66 + n, 67 + n)} for n in range(1, 4)]
    for parts in steps:
        for i, out in server.step(parts, queries).items():
            found[i][slice(*parts[i])] = out
    for i, q in queries.items():
        begun = 48 if i == sharing else 0
        expected = server.expected(i, q)[begun:]
        error = (found[i][begun:] - expected).norm() / expected.norm()
        assert error < 5e-3, f"request {i}: {error}"  # bfloat16 on the way back from a rotation


def test_bytes_of_a_page_are_the_bits_of_the_recipe():
    """What vLLM reserves for a token is what the recipe bills, but for less than a word."""
    size = Geometry(28, 4, 128)
    for name in ("lloyd-3bit", "higgs-2bit", "rtn-4bit", "polar-2.5bit", "exact"):
        recipe = served.paged(preset(name), 128)
        page = page_of(recipe, 0, size, torch.bfloat16)
        billed = sum(scheme.bits(128, size) for scheme in recipe.at(0)) * size.width / 8
        assert billed <= page.per_token < billed + 2
        assert page.used == billed * 128


def test_a_first_page_keeps_its_entry_until_it_is_written_as_another():
    """Entries follow physical pages: a shared one has one, a page that is used again for other tokens gives it back."""
    first = FirstTokens(4, 16)
    arrived, entries = first.step([0, 40], [40, 3], [40, 3], [[7, 3, 9], [5, 0, 0]])
    assert arrived is not None and entries == [0, 1]
    assert arrived.rows.tolist() == [0, 1, 2, 3, 40, 41, 42]
    assert arrived.places.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert first.step([0], [1], [4], [[5, 0, 0]])[0].places.tolist() == [3]
    assert first.step([0], [8], [24], [[7, 2, 0]]) == (None, [0])  # another request, which begins with page 7
    arrived, entries = first.step([0], [40], [40], [[1, 7, 3]])  # page 7 is now a second page, and page 1 has its entry
    assert entries == [0] and first.step([0], [2], [2], [[4]])[1] == [2]
    assert first.held == 3


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("aqua-2bit", "layer below"), ("mean-higgs-2bit", "before RoPE"), ("kivi-2bit", "whole block"),
        ("polar-online", "waits for a prompt"), ("gear-2bit", "keys"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_with_the_nearest_that_can(name: str, reason: str):
    with pytest.raises(ValueError, match=reason) as refused:
        served.check(preset(name), Geometry(28, 4, 128))
    assert "nearest recipe that it can serve is" in str(refused.value)


def test_workers_encode_their_heads_as_one_would():
    """Tensor parallelism: each worker's codes are its heads' part of everyone's."""
    from kvq_runtime.engines import heads

    for name in ("lloyd-3bit", "mean-higgs-head-2bit-post", "wush-2bit"):
        recipe = served.paged(preset(name), PAGE)
        size = Geometry(2, 4, 32)
        tensors = {
            name: torch.randn(shape).to(dtype) for name, (shape, dtype) in codecs.all_specs(recipe, size).items()
        }
        x = torch.randn(1, 20, size.width)
        context = Context(rope=ROTARY.tables(torch.arange(20)[None]))
        whole = codecs.build(recipe, size, tensors)[1][0].encode(x, context)
        for rank in range(2):
            own, part = heads.narrowed(recipe, size, tensors, heads.share_of(size, rank, 2))
            cut = x.unflatten(-1, (4, -1))[:, :, 2 * rank : 2 * rank + 2].flatten(-2)
            codes = codecs.build(recipe, own, part)[1][0].encode(cut, context)
            for field, given in codes.items():
                assert torch.equal(given, whole[field].chunk(2, 2)[rank])


def test_a_recipe_that_joins_heads_is_not_split():
    from kvq_runtime.engines import heads

    with pytest.raises(ValueError, match="several KV heads together"):
        heads.narrowed(preset("higgs-2bit"), replace(SIZE, kv_heads=4), {}, heads.Share(0, 2))
