"""A decode step reads codes and metadata once: bytes counted in Triton's interpreter, load by load."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from attention_case import FAMILIES, Case, centred, encoded, kivi, run, squat
from tiers import each_once, some

pytest.importorskip("triton")
from traffic import Traffic, counted

from kvq_runtime.kernels.attend.kernel import EXACT
from kvq_runtime.kernels.attend.launch import RopeTables

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counts in the interpreter, which a GPU replaces")

CASE = {"blocks": 6, "splits": 3, "starts": (0, 0), "size": 64, "window": 33}


@pytest.fixture
def traffic(monkeypatch) -> Traffic:
    return counted(monkeypatch)


@pytest.fixture
def slabs(monkeypatch) -> dict[str, list]:
    """What the case's blocks are stored in: keys and values."""
    held: dict[str, list] = {}

    def kept(case, half, x_BTC):
        made = encoded(case, half, x_BTC)
        held[half] = made[2]
        return made

    monkeypatch.setattr("attention_case.encoded", kept)
    return held


def ideal(case: Case, parts: list[dict[str, torch.Tensor]]) -> int:
    """The bytes of all encoded blocks, each once."""
    return sum(field[:, 0].numel() * field.element_size() for field in parts[0].values()) * case.blocks


@pytest.mark.parametrize("name", some(FAMILIES, "kivi-2", "rtn-3", "higgs-2-16", "lloyd-2", "polar"))
def test_blocks_are_read_once(name, traffic, slabs):
    """Of two heads, which may share a byte; rows of a batch are apart."""
    schemes = [replace(scheme, sinks=0) for scheme in FAMILIES[name]]
    few = {"blocks": 2, "splits": 2} if name.startswith("polar") else {}  # the interpreter is slow to read angles
    case = Case(*schemes, **CASE | {"starts": (0,)} | few)
    run(case)
    for half in ("key", "value"):
        fields = [field for part in slabs[half] for field in part.values()]
        read, once = traffic.within(traffic.loads, fields), ideal(case, slabs[half])
        assert read == once, f"{half}: {read} bytes, {once} once"


@pytest.mark.parametrize(
    "name, size", [*each_once(["kivi-2", "rtn-4", "higgs-2-16", "lloyd-2"], [80, 96, 128, 256]), ("polar", 128)]
)
def test_tiles_are_padded_bytes_are_not(name, size, traffic, slabs):
    if (name, size) == ("higgs-2-16", 80):  # pairs of channels have no kernel there
        name = "lloyd-2"
    block = 128 if name in ("kivi-2", "lloyd-2") else 32  # 5 · 2 tiles are no words
    case = Case(
        *(replace(scheme, sinks=0, block=block) for scheme in FAMILIES[name]),
        **CASE | {"size": size, "heads": 1, "starts": (0,)},
    )
    run(replace(case, blocks=2))
    for half in ("key", "value"):
        fields = [field for part in slabs[half] for field in part.values()]
        read, once = traffic.within(traffic.loads, fields), ideal(replace(case, blocks=2), slabs[half])
        assert read == once, f"{half}: {read} bytes, {once} once"


@pytest.mark.parametrize("name", some(["kivi-2", "rtn-4", "higgs-2-16"], "kivi-2"))
def test_blocks_of_padding_are_not_read(name, traffic, slabs):
    """Of a row that begins inside the fourth of six blocks, three are read."""
    schemes = [replace(scheme, sinks=0) for scheme in FAMILIES[name]]
    case = Case(*schemes, **CASE | {"starts": (3 * 32 + 5,)})
    run(case)
    for half in ("key", "value"):
        fields = [field for part in slabs[half] for field in part.values()]
        read, whole = traffic.within(traffic.loads, fields), ideal(replace(case, blocks=3), slabs[half])
        assert 0.8 * whole <= read <= whole


@pytest.mark.parametrize("pair", [kivi(2), squat(2)], ids=["kivi", "squat"])
def test_keys_before_rope_are_read_once(pair, traffic, slabs):
    case = Case(*(replace(scheme, sinks=0) for scheme in pair), **CASE | {"position": "pre"})
    run(case)
    fields = [field for part in slabs["key"] for field in part.values()]
    codes = [part["codes"] for part in slabs["key"]]
    once = traffic.within(traffic.loads, codes, shared=True)
    assert traffic.within(traffic.loads, codes) == once
    # a step is loaded by every lane that multiplies by it: four of a warp, which the memory serves by one access
    assert traffic.within(traffic.loads, fields, shared=True) == ideal(case, slabs["key"]) > once


@pytest.mark.parametrize("name", some(["kivi-2", "higgs-2-16"], "higgs-2-16"))
def test_a_mean_costs_a_table_that_all_share(name, traffic, slabs, monkeypatch):
    """Blocks are read once, a table of one block's positions by every program: all heads and layers have the same."""
    tables = []
    made = RopeTables.of
    monkeypatch.setattr(RopeTables, "of", staticmethod(lambda *given: tables.append(made(*given)) or tables[-1]))
    case = Case(*(replace(scheme, sinks=0) for scheme in centred(FAMILIES[name])), **CASE)
    run(case)
    fields = [field for half in slabs.values() for part in half for field in part.values()]
    assert traffic.within(traffic.loads, fields) == sum(ideal(case, slabs[half]) for half in ("key", "value"))
    (rope,) = tables
    lines = case.batch * case.heads * case.blocks  # blocks of all programs
    assert traffic.within(traffic.loads, [rope.block]) == lines * rope.block.nbytes
    assert rope.block.nbytes == 2 * case.key.block * case.size
    assert traffic.within(traffic.loads, [rope.bases_N2K, rope.leads_B2K]) <= lines * 2 * 4 * case.size


@pytest.mark.parametrize("name", some(["kivi-2", "higgs-2-16"], "kivi-2"))
def test_sharing_among_query_heads_costs_nothing(name, traffic, slabs):
    read = Counter()
    for ratio in (1, 8):
        traffic.loads.clear()
        run(Case(*FAMILIES[name], **CASE, ratio=ratio))
        fields = [field for half in slabs.values() for part in half for field in part.values()]
        read[ratio] = traffic.within(traffic.loads, fields)
    assert read[1] == read[8]


def test_partial_results_do_not_grow_with_the_tokens(traffic, slabs):
    stored = {}
    for blocks in (3, 12):
        traffic.stores.clear()
        run(replace(Case(*kivi(2), **CASE), blocks=blocks))
        stored[blocks] = traffic.total(traffic.stores)
    assert stored[3] == stored[12]
    rows = 2 * 2 * 2  # batch, KV heads, query heads of each
    assert stored[3] == rows * 4 * (3 + EXACT.value) * (64 + 1) + rows * 4 * (64 + 1)  # every split's and the merged
