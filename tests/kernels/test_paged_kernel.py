"""The decode kernel over a serving engine's pages gives what torch gives over the same pages."""

from dataclasses import replace

import pytest
import torch
from attention_case import restored
from paged_server import SHARED, PagedServer, queries_of
from parity import error
from tiers import some
from torch import Tensor

pytest.importorskip("triton")
from traffic import Traffic, counted

from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.kernels.attend.arguments import Pages
from kvq_runtime.ops import dispatch, rope
from kvq_runtime.recipe import preset
from kvq_runtime.vllm import attend, page
from kvq_runtime.vllm.attend import Batch
from kvq_runtime.vllm.page import page_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="pages and interpreter of these tests are on the CPU")

SIZE = Geometry(1, 2, 64)
RATIO = 4  # query heads of a KV head
SCALE = SIZE.head_size**-0.5
PAGE = 32
# as in test_fused.py: float16 operands of the kernel's products, bfloat16 codebooks of the torch path
TOLERANCE = {torch.float32: 4e-3, torch.bfloat16: 8e-3}
ROUNDED = ("mean", "polar-3bit")  # the torch path turns them back in bfloat16, twice as far off: see the float64 below
RECIPES = {
    **{name: name for name in ("rtn-2bit", "quarot-head-2bit", "lloyd-3bit", "higgs-head-2bit", "polar-3bit")},
    "kivi-2bit": "kivi-2bit+window.block=32",
    "kivi-2bit groups": "kivi-2bit+window.block=32+key.quantize.group=16+value.quantize.group=16",
    "mean": "mean-higgs-head-2bit-post",
    "latents": "fisher-head-3bit",
}
QUICK = [name for name in RECIPES if name not in ("polar-3bit", "kivi-2bit groups", "latents")]
Parts = dict[int, tuple[int, int]]


@pytest.fixture
def traffic(monkeypatch) -> Traffic:
    return counted(monkeypatch)


def server_of(name: str, sinks: int = 4, **settings) -> PagedServer:
    given = {"size": SIZE, "page": PAGE} | settings
    return PagedServer(RECIPES.get(name, name), sinks, kernel=True, **given)


def raw(server: PagedServer) -> Tensor:
    """Its pages, uint8 [pages, bytes]."""
    return server.cache.view(torch.uint8).view(len(server.cache), -1)


def arrived(server: PagedServer, parts: Parts) -> Batch:
    """Take in tokens start to stop of each request, encoded by torch."""
    with dispatch.forced(False):
        return server.arrive(parts)


def agree(server: PagedServer, batch: Batch, ratio: int = RATIO, most: float = 0.0) -> list[int]:
    """Kernel and torch answer the same; the requests that the kernel leaves."""
    most = most or TOLERANCE[server.dtype]
    q = queries_of(sum(batch.counts), server.size, ratio).to(server.dtype)
    found, wanted = (torch.full_like(q, torch.nan) for _ in range(2))
    with dispatch.forced(True):
        left = attend.attend_packed(server.layer, batch, q, found, SCALE)
    with dispatch.forced(False):
        attend.attend(server.layer, batch, q, wanted, SCALE)
    for request, (start, count) in enumerate(zip(batch.starts, batch.counts, strict=True)):
        rows = slice(start, start + count)
        if request in left:
            assert found[rows].isnan().all()
        else:
            assert error(found[rows], wanted[rows]) < most, f"request {request}"
            assert batch.lengths[request] <= server.page or not torch.equal(found[rows], wanted[rows])  # two roads
    return left


def check(server: PagedServer, parts: Parts, ratio: int = RATIO, most: float = 0.0) -> None:
    assert agree(server, arrived(server, parts), ratio, most) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_kernel_and_torch_agree(name):
    """Rows of unlike lengths, one of them within its first page, one whose pages are another's; over a page's end."""
    server, most = server_of(name), 8e-3 if name in ROUNDED else 0.0
    page = server.page
    long, short = server.add(5 * page), server.add(page)
    sharing = server.add(3 * page, like=long, shared=2)
    arrived(server, {long: (0, 3 * page + 7), short: (0, 3)})
    check(server, {short: (3, 4), long: (3 * page + 7, 3 * page + 8), sharing: (2 * page, 2 * page + 1)}, most=most)
    arrived(server, {long: (3 * page + 8, 4 * page - 1), sharing: (2 * page + 1, 3 * page - 1)})
    full = {long: (4 * page - 1, 4 * page), sharing: (3 * page - 1, 3 * page)}
    check(server, full | {short: (4, 5)}, most=most)
    check(server, {short: (5, 6), long: (4 * page, 4 * page + 1)}, most=most)


def test_latents():
    server = server_of("latents")
    text = server.add(300)
    arrived(server, {text: (0, 270)})
    check(server, {text: (270, 271)})


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "ratio"), [(1, 6), (2, 8)])
@pytest.mark.parametrize("name", ["kivi-4bit", "lloyd-4bit"])
def test_heads_of_256_channels_in_groups_of_hybrids(name, heads, ratio):
    """Qwen3.5's 6 query heads of a KV head, and 8."""
    server = server_of(name, size=Geometry(1, heads, 256))
    page, long, short = server.page, server.add(3 * server.page), server.add(server.page)
    arrived(server, {long: (0, 2 * page + 7), short: (0, 3)})
    check(server, {short: (3, 4), long: (2 * page + 7, 2 * page + 8)}, ratio, most=8e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mean", "higgs-head-2bit", "rtn-2bit", "polar-3bit"])
def test_as_near_to_float64_as_over_slabs(name):
    """Softmax in float64 over what pages decode to in float32, their mean turned by RoPE."""
    server = server_of(name)
    page, text = server.page, server.add(5 * server.page)
    arrived(server, {text: (0, 3 * page + 7)})
    batch, q = arrived(server, {text: (3 * page + 7, 3 * page + 8)}), queries_of(1, SIZE, RATIO)
    found, layer = torch.empty_like(q), server.layer
    with dispatch.forced(True):
        assert attend.attend_packed(layer, batch, q, found, SCALE) == []
    whole = []
    for index, role in enumerate(ROLES):
        scheme, views = server.recipe.scheme(0, role), layer.page.views(raw(server))[role]
        held = {name: view[server.tables[text][:3]][None] for name, view in views.items()}
        bare = replace(scheme, predict=None)
        fields = {name: x[0] for name, x in layer.page.collected(role, held).items()}
        x_TC = restored(bare, fields, SIZE).reshape(-1, SIZE.width).double()
        if scheme.predict is not None:
            mean_1THD = (
                server.pair[index].tensors["predict.mean"].double().expand(1, len(x_TC), -1).unflatten(2, (2, -1))
            )
            angles = torch.arange(len(x_TC))[None, :, None].double() * server.rotary.frequencies_K.double()
            turned = rope.rotate(mean_1THD, angles.cos(), angles.sin()) if role == "key" else mean_1THD
            x_TC += turned[0].flatten(1)
        exact_TC = server.texts[text][index].double()
        x_TC = torch.cat([exact_TC[:4], x_TC[4:], exact_TC[3 * page : 3 * page + 8]])
        whole.append(x_TC.unflatten(1, (2, -1)).repeat_interleave(RATIO, 1))
    weights = (torch.einsum("qhd,khd->qhk", q.double(), whole[0]) * SCALE).softmax(-1)
    assert error(found, torch.einsum("qhk,khd->qhd", weights, whole[1])) < 1.5e-3


def test_first_tokens_of_some_rows():
    """Those of one row are not kept exact: its first page is read from its first slot on."""
    server = server_of("rtn-2bit")
    one, other, new = server.add(70), server.add(70), server.add(70)
    arrived(server, {one: (0, 66), other: (0, 65)})
    batch = arrived(server, {one: (66, 67), other: (65, 66), new: (0, 1)})
    exact = batch.exact
    assert exact is not None and exact.firsts == [0, 1, 2]
    for firsts in ([0, -1, 2], [-1, -1, -1]):
        assert agree(server, replace(batch, exact=replace(exact, firsts=firsts), groups={}, plans={})) == []
    without = server_of("rtn-2bit", sinks=0)
    text = without.add(70)
    arrived(without, {text: (0, 40)})
    check(without, {text: (40, 41)})


@pytest.mark.parametrize("ratio, dtype", [(7, torch.float32), pytest.param(4, torch.bfloat16, marks=pytest.mark.slow)])
def test_query_heads_and_sixteen_bits(ratio, dtype):
    server = server_of("quarot-head-2bit", dtype=dtype)
    text = server.add(100)
    arrived(server, {text: (0, 70)})
    check(server, {text: (70, 71)}, ratio)


@pytest.mark.slow
def test_several_queries():
    """Drafts and short chunks of one page are the kernel's; queries of two pages, or many, are not."""
    server = server_of("kivi-2bit", drafts=3)
    one, other, third = server.add(120), server.add(90), server.add(90)
    arrived(server, {one: (0, 66), other: (0, 40), third: (0, 35)})
    assert agree(server, arrived(server, {one: (66, 70), other: (40, 41), third: (35, 39)})) == []
    assert agree(server, arrived(server, {one: (70, 72), other: (41, 61), third: (39, 40)})) == [1]
    assert agree(server, arrived(server, {one: (94, 98), other: (61, 62), third: (40, 41)})) == [0]


@pytest.mark.slow
def test_a_page_that_arrives_whole():
    """No entry of the pool has it: torch answers."""
    server = server_of("rtn-2bit+window.recent=0", page=16)
    one, other = server.add(64), server.add(64)
    arrived(server, {one: (0, 32)})
    batch = arrived(server, {one: (32, 48), other: (0, 16)})
    assert batch.exact is not None and [each[0].tail.entry for each in batch.exact.pieces] == [-1, -1]
    assert agree(server, batch) == [0, 1]


@pytest.mark.slow
def test_a_server_by_kernels_alone():
    """Pages that kernels encode too, prompts by torch: dense attention over what the text decodes to."""
    server = server_of("quarot-head-2bit")
    text = server.add(80)
    queries = {text: queries_of(80, SIZE, SHARED)}
    with dispatch.forced(True):
        outs = [server.step({text: part}, queries)[text] for part in ((0, 62), (62, 63), (63, 64), (64, 65), (65, 69))]
    expected = server.expected(text, queries[text])[:69]
    assert error(torch.cat(outs), expected) < 6e-3


# ---- what is read, and where -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", some(QUICK, "kivi-2bit"))
def test_pages_are_read_once(name, traffic: Traffic):
    """Each row's full pages, all of their fields, and no others; the exact tokens of its last page once a head."""
    server = server_of(name, sinks=0)
    server.cache.zero_()
    page = server.page
    long, short = server.add(4 * page), server.add(page)
    arrived(server, {long: (0, 3 * page + 7), short: (0, 3)})
    batch = arrived(server, {long: (3 * page + 7, 3 * page + 8), short: (3, 4)})
    traffic.loads.clear()
    assert agree(server, batch, most=8e-3) == []
    layer = server.layer
    assert layer.tails_E2NC is not None
    raw_BX = raw(server)
    own = [traffic.within(traffic.loads, [raw_BX[at]]) for at in server.tables[long][:3]]
    assert own == [sum(one.stop - one.start for one in layer.page.fields)] * 3
    assert traffic.within(traffic.loads, [raw_BX]) == sum(own)
    width = layer.tails_E2NC[0, :, 0].nbytes
    assert traffic.within(traffic.loads, [layer.tails_E2NC]) == (8 + 4) * width


def test_pages_cost_what_they_did():
    """In the kernel's order a page has the same fields at the same places, of other shapes."""
    for name in ("kivi-2bit", "lloyd-3bit", "higgs-head-2bit", "polar-3bit"):
        recipe, size = preset(name), Geometry(1, 8, 128)
        shared = page.Shared(recipe, size, None)
        plain = page_of(recipe, 0, size, torch.bfloat16)
        ordered = page_of(recipe, 0, size, torch.bfloat16, page.PageReader(shared, 0).orders)
        assert plain.per_token == ordered.per_token
        places = [[(one.role, one.name, one.start, one.stop, one.dtype) for one in x.fields] for x in (plain, ordered)]
        assert places[0] == places[1]
        assert all(one.start % 16 == 0 for one in ordered.fields)


def test_what_the_kernel_does_not_read_is_said():
    recipe, size = preset("rtn-2bit"), Geometry(2, 2, 64)
    assert page.refusal(recipe, size, None) is None
    odd = replace(recipe, window=replace(recipe.window, block=24))
    assert "multiples of 16" in str(page.refusal(odd, size, None))
    server = server_of("mean")
    part = replace(server.rotary, frequencies_K=server.rotary.frequencies_K[:16])
    assert "part of a head" in str(page.refusal(server.recipe, SIZE, part))
    assert "no kernel for its keys" in str(page.refusal(preset("higgs-2bit"), size, None))


def test_pages_between_multiples_of_16_bytes_are_refused():
    raw = torch.zeros(4, 72, dtype=torch.uint8)
    with pytest.raises(ValueError, match="72\\] bytes apart"):
        Pages.of({"codes": raw}, ("codes",), torch.zeros(1, 1))
