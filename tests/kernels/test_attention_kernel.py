"""Attention over packed blocks gives what softmax gives on the decoded ones, for every family and in every corner."""

from dataclasses import replace

import pytest
import torch
from attention_case import FAMILIES, Case, centred, kivi, run, same, scheme, squat
from parity import error, poisoned
from tiers import some

from kvq_runtime.geometry import Geometry
from kvq_runtime.kernels.attend import launch
from kvq_runtime.recipe import Scheme
from kvq_runtime.stages.codebook import Grid, Lloyd
from kvq_runtime.stages.polar import Polar
from kvq_runtime.stages.rotate import Hadamard, Random
from kvq_runtime.stages.rtn import Rtn

# float16 operands of the matrix products, float32 sums; the window's products are in the model's dtype
TOLERANCE = {torch.float32: 1.5e-3, torch.float16: 2e-3, torch.bfloat16: 8e-3}
SMALL = {"heads": 1, "blocks": 2, "window": 9}
PADDED = {"starts": (7, 40), "blocks": 3, "heads": 1}
MEAN = centred(FAMILIES["higgs-2-16"])


def check(case: Case, monkeypatch) -> None:
    with poisoned(monkeypatch):
        out, level, wanted, levels = run(case)
    assert error(out, wanted) <= TOLERANCE[case.dtype]
    assert float((level.double() - levels).abs().max()) <= 0.02


QUICK = ("kivi-2", "rtn-3", "kivi-groups-2", "quarot", "higgs-2-16", "lloyd-3")


@pytest.mark.parametrize("name", some(FAMILIES, *QUICK))
def test_families(name, monkeypatch):
    few = {"blocks": 1, "size": 32} if name.startswith("polar") else {}  # the interpreter takes long to read angles
    check(Case(*FAMILIES[name], **SMALL | few), monkeypatch)


def test_several_heads(monkeypatch):
    check(Case(*FAMILIES["mixed"], heads=2, blocks=1, window=5), monkeypatch)


@pytest.mark.parametrize("pair", [kivi(2), pytest.param(MEAN, marks=pytest.mark.slow)])
def test_capped_scores(pair, monkeypatch):
    """Most scores come near the cap; the window's and the sinks' too."""
    check(Case(*pair, cap=1.5, starts=(40,), **SMALL), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("key, value", [(2, 4), (4, 2)])
def test_widths_whose_sub_blocks_differ(key, value, monkeypatch):
    """128 tokens of 2 bits are read at once, and 64 of 4 bits."""
    pair = scheme(Rtn(key, "head"), block=128), scheme(Lloyd(value, "head"), Random("head"), block=128)
    check(Case(*pair, size=32, heads=1, blocks=1, starts=(70,)), monkeypatch)


GROUPS = {
    "padded": (squat(2), {"starts": (40,)}),
    "3 bits, padded rows": (squat(3), PADDED),
    "4 bits, several queries": (squat(4), {"ratio": 8, "tokens": 8}),
    "no sinks": (squat(2, 32, 64, sinks=0), {}),
    "heads of 256": (squat(2, 64, 128), {"size": 256}),
}


@pytest.mark.parametrize("name", some(GROUPS, "padded"))
def test_groups_of_tokens_and_of_channels(name, monkeypatch):
    pair, given = GROUPS[name]
    check(Case(*pair, **SMALL | given), monkeypatch)


MEANS = {
    "both sides": (MEAN, {}),
    "keys alone": (centred(FAMILIES["higgs-2-16"], True, False), {}),
    "values alone": (centred(FAMILIES["higgs-2-16"], False, True), {}),
    "a scale a channel": (centred(FAMILIES["kivi-2"]), PADDED),
    "angles": (centred(FAMILIES["polar"]), {"blocks": 1}),
    "no blocks": (MEAN, {"blocks": 0, "window": 1}),
    "several queries": (MEAN, {"ratio": 2, "tokens": 4}),
    "RoPE that is scaled": (MEAN, PADDED | {"scaling": 1.3, "dtype": torch.bfloat16}),
    "heads of 96": (MEAN, {"size": 96}),
}


@pytest.mark.parametrize("name", some(MEANS, "both sides"))
def test_means(name, monkeypatch):
    pair, given = MEANS[name]
    check(Case(*pair, **SMALL | given), monkeypatch)


@pytest.mark.slow
def test_splits_of_very_large_scores(monkeypatch):
    """Means of ±300 make scores of blocks hundreds apart from the window's: no 2^score of them is a float32."""
    case = Case(*centred(FAMILIES["higgs-2-16"], True, False), heads=2, blocks=5, splits=3, slow=300.0)
    with poisoned(monkeypatch):
        out, level, wanted, levels = run(case)
    assert float(levels.max()) > 200 and float(levels.min()) < 10
    assert error(out, wanted) < 5e-3 and float((level.double() - levels).abs().max()) < 0.1


@pytest.mark.parametrize("name, ratio, tokens", [("kivi-2", 9, 1), pytest.param("mean", 1, 21, marks=pytest.mark.slow)])
def test_queries_of_several_tiles(name, ratio, tokens, monkeypatch):
    """In one launch, whatever their heads and tokens."""
    pair, grids = MEAN if name == "mean" else FAMILIES[name], []
    kernel = launch.attend_kernel
    monkeypatch.setattr(launch, "attend_kernel", Gridded(kernel, grids))
    case = Case(*pair, ratio=ratio, tokens=tokens, heads=1, blocks=1, window=22)
    check(case, monkeypatch)
    assert [grid[:2] for grid in grids] == [(-(-ratio * tokens // launch.COLUMNS), case.batch * case.heads)]


class Gridded:
    """A kernel that writes down its grids."""

    def __init__(self, kernel, grids: list):
        self.kernel, self.grids = kernel, grids

    def __getitem__(self, grid):
        self.grids.append(grid)
        return self.kernel[grid]


def test_too_many_query_tokens():
    with pytest.raises(
        ValueError, match="65 rows of queries of each; the kernel takes .* 64 rows of queries, or 8 tokens"
    ):
        run(Case(*FAMILIES["kivi-2"], ratio=1, tokens=65, heads=1, blocks=1))


REAL = {
    "a scale a channel": (kivi(2, block=128), {}),
    "a scale a token": (same(scheme(Rtn(2, "head"), block=128)), {}),
    "looked up": (same(scheme(Grid(2, 16, "head"), Hadamard("head"), block=128)), {}),
    "groups, padded": (squat(2, 32, 128), {"starts": (21,)}),
    # the part of a slab after its padding; the interpreter takes long
    "angles": (same(scheme(Polar(), Random(), block=128)), {"starts": (31 * 128 + 5,)}),
}


class FirstHeads:
    """A kernel that is launched for the first two KV heads alone."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.kernel[grid[0], 2, grid[2]]


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_sizes(name, monkeypatch):
    """8 KV heads of 128, blocks of 128 tokens in two slabs, a window of 192. Two of the heads are attended to: the
    interpreter takes half a minute for all."""
    monkeypatch.setattr(launch, "attend_kernel", FirstHeads(launch.attend_kernel))
    sizes = {"size": 128, "heads": 8, "ratio": 4, "blocks": 33, "window": 192, "splits": 7}
    pair, given = REAL[name]
    monkeypatch.setattr(torch, "empty", torch.zeros)  # read by the merge for the other heads
    case = Case(*pair, **sizes | given, dtype=torch.bfloat16)
    out, level, wanted, levels = (x[:, : 2 * case.ratio] for x in run(case))
    assert error(out, wanted) <= TOLERANCE[case.dtype]
    assert float((level.double() - levels).abs().max()) <= 0.02


ANGLES = {"16": (Polar(), 16), "32, fewer levels": (Polar(levels=2), 32), "32, whole": (Polar(levels=0), 32)}


@pytest.mark.parametrize("name", some(ANGLES, "32, fewer levels"))
def test_heads_and_levels_of_angles(name, monkeypatch):
    stage, size = ANGLES[name]
    check(Case(*same(scheme(stage, Random())), size=size, **SMALL), monkeypatch)


@pytest.mark.parametrize(
    "stage, size",
    [(Polar((3, 2)), 64), (Polar((4, 4)), 64), (Polar(group="all"), 64), (Polar(), 96)],
    ids=str,
)
def test_angles_that_no_kernel_reads(stage, size):
    assert launch.layout(Scheme(stage), 32, Geometry(1, 2, size), "key") is None


@pytest.mark.slow
@pytest.mark.parametrize("size", [80, 96, 256])
@pytest.mark.parametrize("name", ["kivi-2", "rtn-3", "higgs-2-16", "lloyd-2"])
def test_head_sizes(name, size, monkeypatch):
    if (name, size) == ("higgs-2-16", 80):
        pytest.skip("pairs of channels are no words in heads of 80: torch decodes them")
    block = 32 if name == "higgs-2-16" else 128  # 5 tiles of 16 channels · 2 of tokens are no words
    pair = tuple(replace(one, block=block) for one in FAMILIES[name])
    check(Case(*pair, size=size, heads=1, blocks=1), monkeypatch)


QUERIES = {
    "one head": ("rtn-3", {"ratio": 1}),
    "seven heads": ("lloyd-2", {"ratio": 7}),
    "tokens": ("kivi-2", {"ratio": 5, "tokens": 3}),
    "tokens, angles": ("polar", {"ratio": 3, "tokens": 2}),
    "float16": ("higgs-2-16", {"dtype": torch.float16}),
    "bfloat16": ("kivi-2", {"dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("name", some(QUERIES, "bfloat16"))
def test_queries_and_dtypes(name, monkeypatch):
    family, given = QUERIES[name]
    check(Case(*FAMILIES[family], **SMALL | given), monkeypatch)


CORNERS = {
    "no blocks": {"blocks": 0, "window": 1},
    "one block, empty splits": {"blocks": 1, "splits": 5},
    "uneven splits": {"blocks": 3, "splits": 2},
    "over a slab": {"blocks": 33, "splits": 4},
    "window of many": {"window": 70},
    "padded inside a block": {"starts": (5, 33)},
    "padded beyond the blocks": {"starts": (0, 68), "window": 10},
    "sinks in the window": {"starts": (94, 0), "window": 30, "blocks": 3},
}


@pytest.mark.parametrize("corner", some(CORNERS, *list(CORNERS)[:2], "padded beyond the blocks"))
def test_corners(corner, monkeypatch):
    check(replace(Case(*FAMILIES["kivi-2"], **SMALL), **CORNERS[corner]), monkeypatch)


def test_no_sinks_and_blocks_of_16(monkeypatch):
    check(Case(*same(scheme(Rtn(4, "head"), block=16, sinks=0)), **SMALL), monkeypatch)
