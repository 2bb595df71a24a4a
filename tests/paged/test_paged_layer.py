"""Pages as vLLM hands them out: whatever is shared, in whatever chunks tokens come, it is the codec's attention, and a
query's own page is exact.
"""

from dataclasses import replace

import pytest
import torch
from paged_server import ROTARY, SIZE, PagedServer, queries_of

from kvq_runtime.codec import codec as codecs
from kvq_runtime.codec import shared
from kvq_runtime.codec.codec import Context
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import dense
from kvq_runtime.ops.constant import own_defaults
from kvq_runtime.ops.dense import Softmax
from kvq_runtime.recipe import preset, with_each
from kvq_runtime.vllm import attend, exact, plugin
from kvq_runtime.vllm.exact import ExactTokens, Piece, Tail
from kvq_runtime.vllm.page import page_of, shared_pages
from kvq_runtime.vllm.served_recipe import Shard, shard_of

RECIPES = [
    "exact", "higgs-head-3bit", "polar-3bit", "mean-lloyd-3bit-post", "mean-higgs-2bit",  # token by token
    "kivi-2bit-r32", "gear-2bit+all.quantize.group=32+all.correct.rank=2+window.block=32",
    "squat-pre-2bit-paper+window.recent=32+window.block=32",
    "kvarn-k4v2+window.recent=32+window.block=32",  # whole pages
]  # fmt: skip


@pytest.mark.parametrize("name, sinks", [*((name, 4) for name in RECIPES), ("rtn-2bit", 0), ("kivi-2bit-r32", 0)])
def test_attention_is_the_codecs(name: str, sinks: int, monkeypatch):
    """A prompt in chunks, a short one, one with a shared prefix; then single steps of all, by runs of few tokens."""
    monkeypatch.setattr(attend, "TOKENS", 64)
    server = PagedServer(name, sinks)
    page = server.page
    long, short = server.add(7 * page + 5), server.add(page + 5)
    sharing = server.add(4 * page + 4, like=long, shared=3)
    queries = {i: queries_of(len(server.texts[i][0])) for i in (long, short, sharing)}
    out = {i: torch.full_like(q, torch.nan) for i, q in queries.items()}
    ends = {long: 7 * page - 2, short: page - 3, sharing: 4 * page - 5}
    steps = [{long: (0, page // 2), short: (0, 2)}, {long: (page // 2, 5 * page + 3), short: (2, ends[short])}]
    steps += [{long: (5 * page + 3, ends[long]), sharing: (3 * page, ends[sharing])}]
    steps += [{i: (ends[i] + n, ends[i] + n + 1) for i in queries} for n in range(5)]
    for parts in steps:
        for i, rows in server.step(parts, queries).items():
            out[i][slice(*parts[i])] = rows
    for i in queries:
        taken = slice(3 * page if i == sharing else 0, ends[i] + 5)
        expected = server.expected(i, queries[i])[taken]
        error = (out[i][taken] - expected).norm() / expected.norm()
        assert error < 5e-3, f"request {i}: {error}"  # bfloat16 on the way back from a rotation


def test_caps_of_scores_and_logits_of_heads_are_those_of_dense_attention():
    """Gemma 2's and gpt-oss's softmax, over several pages and in chunks."""
    server, softmax, q = PagedServer("exact"), Softmax(2.0, torch.randn(6)), queries_of(40)
    text, out = server.add(40), torch.empty(40, 6, SIZE.head_size)
    for part in (slice(0, 25), slice(25, 40)):
        batch = server.arrive({text: (part.start, part.stop)})
        attend.attend(server.layer, batch, q[part], out[part], 0.2, softmax)
    k, v = (x_TC.view(1, 40, SIZE.kv_heads, -1).transpose(1, 2) for x_TC in server.texts[text])
    expected = dense.attention(q.transpose(0, 1)[None], k, v, None, 0.2, softmax)[0].transpose(0, 1)
    assert torch.allclose(out, expected, atol=1e-5)


def test_bytes_of_a_page_are_the_bits_of_the_recipe():
    """What vLLM reserves for a token is what the recipe bills, but for less than a word."""
    size = Geometry(28, 4, 128)
    for name in ("lloyd-3bit", "higgs-2bit", "rtn-4bit", "polar-3bit", "exact"):
        recipe = plugin.paged(preset(name), 128)
        page = page_of(recipe, 0, size, torch.bfloat16)
        billed = sum(scheme.bits(128, size) for scheme in recipe.at(0)) * size.width / 8
        assert billed <= page.per_token < billed + 2
        assert sum(one.stop - one.start for one in page.fields) == billed * 128


def test_a_first_page_keeps_its_entry_until_it_is_written_as_another():
    """Entries follow physical pages: a shared one has one, a page that is used again for other tokens gives it back."""
    tokens = ExactTokens(16, 4)
    step = tokens.step([0, 40], [40, 3], [40, 3], [[7, 3, 9], [5, 0, 0]])
    assert step.firsts == [0, 1]
    assert step.arrived.tokens == [*((0, n, n) for n in range(4)), *((1, 40 + n, n) for n in range(3))]
    assert tokens.step([0], [1], [4], [[5, 0, 0]]).arrived.tokens == [(1, 0, 3)]
    step = tokens.step([0], [8], [24], [[7, 2, 0]])  # another request, which begins with page 7
    assert step.arrived.tokens == [] and step.firsts == [0]
    step = tokens.step([0], [40], [40], [[1, 7, 3]])  # page 7 is now a second page, and page 1 has its entry
    assert step.firsts == [0] and tokens.step([0], [2], [2], [[4]]).firsts == [2]
    assert tokens.firsts.size == 3


@pytest.mark.parametrize(
    ("own", "beside", "expected"),
    [
        (100, 12800, (1, 100)),  # the largest is kvq's
        (130, 512 * 128, (4, 130)),  # 4.06 bits of 16: others' pages grow by 1.6%
        (72, 512 * 128, (7, 74)),  # 2.25 bits: these grow by 2.8%, the others' would by 12%
        (128, 512 * 128, (4, 128)),
    ],
)  # fmt: skip
def test_pages_are_handed_out_for_as_many_tokens_as_fill_a_larger_one(own, beside, expected):
    blocks, per_token = shared_pages(own, beside, 128, 2)
    assert (blocks, per_token) == expected
    assert blocks * per_token * 128 >= beside  # vLLM pads no page of kvq's


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("aqua-2bit", "layer below"), ("polar-online", "waits for a prompt"), ("h2o", "chooses among tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_with_the_reason(name: str, reason: str):
    with pytest.raises(ValueError, match=reason):
        plugin.check_recipe(preset(name))
    with pytest.raises(ValueError, match="encodes blocks of 128 tokens, and a page has 16: --block-size 128"):
        plugin.paged(preset("kivi-2bit"), 16)


def test_codecs_keep_float32_while_a_model_is_built():
    """Its dtype is torch's default then; a rotation in bfloat16 would cost more than 3 bits do."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with own_defaults():
            codec = shared.build(preset("lloyd-3bit"), Geometry(1, 3, 32), {})[0][0]
    finally:
        torch.set_default_dtype(before)
    x = torch.randn(1, 8, 96)
    decoded = codec.decode(codec.encode(x, Context()), Context())
    assert (decoded - x).norm() < 0.25 * x.norm()


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("name", ["lloyd-3bit", "mean-higgs-head-2bit-post", "oscar-2bit", "fisher-head-3bit"])
def test_workers_encode_their_heads_as_one_would(name: str, heads: int):
    """Tensor parallelism: each worker decodes its heads' part of everyone's."""
    size, recipe = Geometry(2, heads, 32), plugin.paged(preset(name), 128)
    if name.startswith("fisher"):  # as fitted
        runs = {"bits": (4, 2), "counts": (16 * heads, 16 * heads), "target": 0.0, "shared": False}
        recipe = with_each(recipe, lambda scheme: replace(scheme, quantize=replace(scheme.quantize, **runs)))
    tensors = {
        name: torch.rand(shape).to(dtype) for name, (shape, dtype) in codecs.all_specs(recipe, size).items()
    }  # fmt: skip
    x = torch.randn(1, 128, size.width)
    context = Context(rope=ROTARY.tables(torch.arange(128)[None]))
    codec = shared.build(recipe, size, tensors)[1][0]
    whole = codec.decode(codec.encode(x, context), context).unflatten(-1, (heads, -1))
    for rank, own in enumerate(torch.arange(heads).chunk(2)):
        shard = shard_of(size, rank, 2)
        tensors_of_shard = shard.tensors(recipe, size, tensors)
        codec = shared.build(shard.recipe(recipe), shard.geometry(size), tensors_of_shard)[1][0]
        cut = x.unflatten(-1, (heads, -1))[:, :, own].flatten(-2)
        assert torch.allclose(codec.decode(codec.encode(cut, context), context).flatten(), whole[:, :, own].flatten())


@pytest.mark.parametrize("name", ["higgs-2bit", "svdq-2bit"])
def test_a_recipe_that_joins_heads_is_not_split(name: str):
    """By a group of rounding, or by a basis over all channels of a token whose rounding has no group."""
    with pytest.raises(ValueError, match="several KV heads together"):
        Shard(0, 2).tensors(preset(name), replace(SIZE, kv_heads=4), {})


@pytest.mark.parametrize("name", ["kivi-2bit-r32", "lloyd-3bit+window.block=32"])
def test_refused_drafts_leave_no_trace(name: str):
    """Drafts that fill a page, and are refused: pages and answers are, to the bit, those of a text without drafts."""
    drafting, plain = PagedServer(name, drafts=4, page=32), PagedServer(name, page=32)
    right_2TC, queries = torch.randn(2, 50, SIZE.width), {0: queries_of(50)}
    for server in (drafting, plain):
        server.tables, server.texts = [[7, 9]], [tuple(right_2TC.clone())]
        server.step({0: (0, 30)}, queries)
    for x_TC in drafting.texts[0]:
        x_TC[31:34] = 9 * torch.randn(3, SIZE.width)  # refused; they fill the page, and begin the next one
    outs = {drafting: [drafting.step({0: (30, 34)}, queries)[0][:1]], plain: [plain.step({0: (30, 31)}, queries)[0]]}
    drafting.texts = [tuple(right_2TC)]
    for server, out in outs.items():
        out += [server.step({0: (n, n + 1)}, queries)[0] for n in range(31, 50)]
    assert torch.equal(drafting.cache[7].view(torch.uint8), plain.cache[7].view(torch.uint8))
    assert torch.allclose(torch.cat(outs[drafting]), torch.cat(outs[plain]), atol=1e-5)


def test_a_page_of_other_layers_is_left_to_them(monkeypatch):
    """vLLM hands the page of an ended request to layers of another kind: its tail is dropped, not encoded there."""
    monkeypatch.setattr(exact, "IDLE", 2)
    server = PagedServer("kivi-2bit-r32")
    ended, settled, other = server.add(20), server.add(20), server.add(40)
    queries = {i: queries_of(40) for i in (ended, settled, other)}
    server.step({ended: (0, 20), settled: (0, 20)}, queries)
    raw = server.cache.view(torch.uint8).flatten(1)
    pages = [server.tables[i][0] for i in (ended, settled)]
    stamped = raw[pages[1]].clone()
    raw[pages[0], :8] = 200  # the first token of another kind
    theirs = raw[pages[0]].clone()
    for n in range(4):
        server.step({other: (n, n + 1)}, queries)
    for _ in range(2):
        server.step({server.add(3): (0, 3)}, queries | {len(server.texts) - 1: queries_of(3)})
    assert server.exact.tails.size == 3, "both tails gave up their entries"
    assert torch.equal(raw[pages[0]], theirs) and not torch.equal(raw[pages[1]], stamped)


@pytest.mark.parametrize(("filled", "sinks"), [(30, 0), (3, 4), (10, 4)])
def test_a_tail_that_was_settled_is_taken_up_again(filled: int, sinks: int, monkeypatch):
    """A request that no step had for long, whose entry another one needs: its newest tokens become decoded ones.

    Codes of a first page know nothing of its exact tokens: attention to them is neither lost nor counted twice.
    """
    monkeypatch.setattr(exact, "IDLE", 2)
    server = PagedServer("kivi-4bit-g128+window.block=16+key.quantize.group=16", sinks)
    text, other, third = server.add(40), server.add(40), server.add(40)
    for x in server.texts[text]:
        x[:sinks] *= 8  # as sinks are: unlike all others
    queries = {i: queries_of(40) for i in (text, other, third)}
    server.step({text: (0, filled)}, queries)
    for n in range(4):
        server.step({other: (n, n + 1)}, queries)
    server.step({third: (0, 3)}, queries)
    assert server.exact.tails.size == 2, "the third has the text's entry"
    attended = server.step({text: (filled, filled + 1)}, queries)[text]
    expected = server.expected(text, queries[text])[filled : filled + 1]
    error = (attended - expected).norm() / expected.norm()
    assert error < (0.1 if sinks else 0.2), "decoded from 4 bits, and not lost"
    assert sinks or error > 1e-3


def test_entries_are_those_of_requests_that_go_on():
    """An entry is given back when its page is full, and when the page is another text's; none is for whole pages."""
    kept = ExactTokens(16, 0)
    made = kept.step([0, 40], [40, 16], [40, 16], [[7, 3, 9], [5]])
    assert made.pieces == [
        [Piece(0, 16, 0, Tail(-1, 7, 0, 16)), Piece(16, 32, 16, Tail(-1, 3, 16, 16)),
         Piece(32, 40, 32, Tail(0, 9, 32, 8))],
        [Piece(0, 16, 40, Tail(-1, 5, 0, 16))],
    ]  # fmt: skip
    assert [piece.tail.page for piece in made.full] == [7, 3, 5]
    assert made.kept.tokens == [(0, 32 + place, place) for place in range(8)]
    made = kept.step([0], [8], [48], [[7, 3, 9]])
    assert made.full == [Piece(0, 8, 0, Tail(0, 9, 32, 16))]
    assert made.kept.tokens == [(0, place, 8 + place) for place in range(8)]
    for count in (3, 2):  # then page 11 has another text
        assert kept.step([0], [count], [count], [[11]]).pieces[0][0].tail.entry == 0 and kept.tails.size == 1
    for _ in range(exact.IDLE + 1):
        made = kept.step([0], [1], [18], [[1, 2]]) if kept.tails.size == 2 else kept.step([0], [2], [18], [[1, 2]])
    assert kept.step([0], [1], [1], [[12]]).settled == [Tail(0, 11, 0, 2)]
