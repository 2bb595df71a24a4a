"""A decode step reads codes and metadata once: bytes counted in Triton's interpreter, load by load."""

from dataclasses import replace

import pytest
import torch
from attention_case import FAMILIES, Case, centred, encoded, kivi, run
from tiers import some

pytest.importorskip("triton")
from traffic import Traffic, counted

from kvq_runtime.kernels.attend.kernel import EXACT
from kvq_runtime.kernels.attend.launch import RopeTables

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counts in the interpreter, which a GPU replaces")

CASE = {"blocks": 2, "splits": 2, "size": 64, "window": 9}


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


def bare(pair) -> list:
    """The schemes of a family, without sinks."""
    return [replace(scheme, sinks=0) for scheme in pair]


def ideal(case: Case, parts: list[dict[str, torch.Tensor]]) -> int:
    """The bytes of all encoded blocks, each once."""
    return sum(field[:, 0].numel() * field.element_size() for field in parts[0].values()) * case.blocks


def fields_of(slabs: dict[str, list], *halves: str) -> list[torch.Tensor]:
    return [field for half in halves for part in slabs[half] for field in part.values()]


@pytest.mark.parametrize("name", some(FAMILIES, "kivi-2", "higgs-2-16"))
def test_blocks_are_read_once(name, traffic, slabs):
    """Of two heads, which may share a byte."""
    case = Case(*bare(FAMILIES[name]), **CASE)
    run(case)
    for half in ("key", "value"):
        read, once = traffic.within(traffic.loads, fields_of(slabs, half)), ideal(case, slabs[half])
        assert read == once, f"{half}: {read} bytes, {once} once"


@pytest.mark.slow
@pytest.mark.parametrize("name, size", [("lloyd-2", 80), ("kivi-2", 96)])
def test_tiles_are_padded_bytes_are_not(name, size, traffic, slabs):
    schemes = [replace(scheme, block=128) for scheme in bare(FAMILIES[name])]
    case = Case(*schemes, **CASE | {"size": size, "heads": 1, "blocks": 1})
    run(case)
    for half in ("key", "value"):
        assert traffic.within(traffic.loads, fields_of(slabs, half)) == ideal(case, slabs[half])


def test_blocks_of_padding_are_not_read(traffic, slabs):
    """Of a row that begins inside the third of four blocks, two are read."""
    case = Case(*bare(FAMILIES["kivi-2"]), **CASE | {"blocks": 4, "starts": (2 * 32 + 5,), "heads": 1})
    run(case)
    for half in ("key", "value"):
        read = traffic.within(traffic.loads, fields_of(slabs, half))
        whole = ideal(replace(case, blocks=2), slabs[half])
        assert 0.8 * whole <= read <= whole


@pytest.mark.slow
def test_a_mean_costs_a_table_that_all_share(traffic, slabs, monkeypatch):
    """Blocks are read once, a table of one block's positions by every program: all heads and layers have the same."""
    tables, made = [], RopeTables.of
    monkeypatch.setattr(RopeTables, "of", staticmethod(lambda *given: tables.append(made(*given)) or tables[-1]))
    case = Case(*bare(centred(FAMILIES["higgs-2-16"])), **CASE)
    run(case)
    read = traffic.within(traffic.loads, fields_of(slabs, "key", "value"))
    assert read == sum(ideal(case, slabs[half]) for half in ("key", "value"))
    (rope,) = tables
    lines = case.batch * case.heads * case.blocks  # blocks of all programs
    assert traffic.within(traffic.loads, [rope.block]) == lines * rope.block.nbytes
    assert rope.block.nbytes == 2 * case.key.block * case.size
    assert traffic.within(traffic.loads, [rope.bases_N2K, rope.leads_B2K]) <= lines * 2 * 4 * case.size


@pytest.mark.slow
def test_partial_results_do_not_grow_with_the_tokens(traffic, slabs):
    stored = {}
    for blocks in (2, 5):
        traffic.stores.clear()
        run(replace(Case(*kivi(2), **CASE, heads=1), blocks=blocks))
        stored[blocks] = traffic.total(traffic.stores)
    assert stored[2] == stored[5] == 2 * 4 * (2 + EXACT.value) * (64 + 1) + 2 * 4 * (64 + 1)
