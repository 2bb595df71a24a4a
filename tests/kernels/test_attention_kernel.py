"""Attention over packed blocks gives what softmax gives on the decoded ones, for every family and in every corner."""

from dataclasses import replace

import pytest
import torch
from attention_case import FAMILIES, Case, centred, kivi, run, same, scheme, squat
from parity import error, poisoned
from tiers import each_once, some, together

from kvq_runtime.kernels.attend import launch
from kvq_runtime.stages.codebook import Grid, Lloyd
from kvq_runtime.stages.polar import Polar
from kvq_runtime.stages.rotate import Hadamard, Random
from kvq_runtime.stages.rtn import Rtn

# float16 operands of the matrix products, float32 sums; the window's products are in the model's dtype
TOLERANCE = {torch.float32: 1.5e-3, torch.float16: 2e-3, torch.bfloat16: 8e-3}


def check(case: Case, monkeypatch) -> None:
    with poisoned(monkeypatch):
        out, level, wanted, levels = run(case)
    assert error(out, wanted) <= TOLERANCE[case.dtype]
    assert float((level.double() - levels).abs().max()) <= 0.02


# the interpreter takes 40 times as long to read angles; heads that share bytes of them are in test_read_polar
ALONE = {"heads": 1, "blocks": 2}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, monkeypatch):
    check(Case(*FAMILIES[name], **(ALONE if name.startswith("polar") else {})), monkeypatch)


@pytest.mark.parametrize("pair, position", [
    (kivi(2), "post"), (kivi(2), "pre"), (FAMILIES["rtn-4"], "post"), (centred(FAMILIES["higgs-2-16"]), "post"),
])  # fmt: skip
def test_capped_scores(pair, position, monkeypatch):
    """Most scores come near the cap; the window's and the sinks' too."""
    check(Case(*pair, position=position, cap=1.5, starts=(7, 40)), monkeypatch)


@pytest.mark.parametrize("key, value", together([2, 4], [4, 2]))
def test_widths_whose_sub_blocks_differ(key, value, monkeypatch):
    """128 tokens of 2 bits are read at once, and 64 of 4 bits."""
    pair = scheme(Rtn(key, "head"), block=128), scheme(Lloyd(value, "head"), Random("head"), block=128)
    check(Case(*pair, heads=1, blocks=2, starts=(70,)), monkeypatch)


@pytest.mark.parametrize("bits, starts", [(1, (7, 40)), (2, (0, 0)), (4, (7, 40))])
def test_keys_before_rope(bits, starts, monkeypatch):
    check(Case(*kivi(bits), position="pre", starts=starts, blocks=5), monkeypatch)


@pytest.mark.parametrize(
    "pair, starts",
    together([squat(2), squat(3), squat(4), squat(2, block=128), squat(2, 32, 64, sinks=0)], [(7, 40), (0, 0)]),
)
def test_groups_before_rope(pair, starts, monkeypatch):
    check(Case(*pair, position="pre", starts=starts, blocks=5), monkeypatch)


@pytest.mark.parametrize("shape", some([(2, 48), (2, 80), (3, 80), (2, 96), (2, 128), (2, 256)], (3, 80)), ids=str)
def test_groups_before_rope_in_other_heads(shape, monkeypatch):
    bits, size = shape
    check(Case(*squat(bits, 64, 128), size=size, heads=1, blocks=2, position="pre", starts=(0, 21)), monkeypatch)


@pytest.mark.parametrize("ratio, tokens", [(7, 1), (8, 8)])
def test_groups_before_rope_and_query_tokens(ratio, tokens, monkeypatch):
    case = Case(*squat(2), ratio=ratio, tokens=tokens, heads=1, blocks=2, position="pre")
    check(case, monkeypatch)


# ---- with a mean removed -----------------------------------------------------------------------------------------


PADDED = {"starts": (7, 40), "blocks": 5, "splits": 3}


@pytest.mark.parametrize("name", ["kivi-2", "kivi-groups-2", "quarot", "lloyd-3", "polar"])
def test_means(name, monkeypatch):
    check(Case(*centred(FAMILIES[name]), **PADDED | (ALONE if name == "polar" else {})), monkeypatch)


@pytest.mark.parametrize("key, value", [(True, False), (False, True)])
def test_a_mean_of_one_side(key, value, monkeypatch):
    check(Case(*centred(FAMILIES["higgs-2-16"], key, value)), monkeypatch)


@pytest.mark.parametrize("size", some([80, 96, 128, 256], 96))
def test_means_in_other_heads(size, monkeypatch):
    """Pairs in heads of 80 have no kernel: codes of one channel each in blocks of 128 stand for them."""
    pair = FAMILIES["higgs-2-16"] if size != 80 else tuple(replace(one, block=128) for one in FAMILIES["lloyd-2"])
    check(Case(*centred(pair), size=size, heads=1, blocks=2, starts=(0, 21)), monkeypatch)


@pytest.mark.parametrize("name, ratio, tokens", [("kivi-2", 7, 1), ("higgs-2-16", 2, 4)])
def test_means_and_query_tokens(name, ratio, tokens, monkeypatch):
    check(Case(*centred(FAMILIES[name]), ratio=ratio, tokens=tokens, heads=1, blocks=2), monkeypatch)


@pytest.mark.parametrize(
    "corner", ["no blocks", "one block, empty splits", "uneven splits", "padded beyond the blocks"]
)
def test_means_in_corners(corner, monkeypatch):
    check(replace(Case(*centred(FAMILIES["higgs-2-16"])), **CORNERS[corner]), monkeypatch)


@pytest.mark.parametrize(
    "name, ratio, tokens",
    [("kivi-2", 9, 1), ("kivi-2", 1, 21), pytest.param("polar", 3, 4, marks=pytest.mark.slow), ("mean", 9, 1)],
)  # fmt: skip
def test_queries_of_several_tiles(name, ratio, tokens, monkeypatch):
    """In one launch, whatever their heads and tokens"""
    pair, grids = centred(FAMILIES["higgs-2-16"]) if name == "mean" else FAMILIES[name], []
    kernel = launch.attend_kernel
    monkeypatch.setattr(launch, "attend_kernel", Gridded(kernel, grids))
    case = Case(*pair, ratio=ratio, tokens=tokens, heads=2, blocks=2)
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
    for pair in (centred(FAMILIES["higgs-2-16"]), FAMILIES["kivi-2"]):
        with pytest.raises(
            ValueError, match="65 rows of queries of each; the kernel takes .* 64 rows of queries, or 8 tokens"
        ):
            run(Case(*pair, ratio=1, tokens=65, heads=1, blocks=1))


def test_a_mean_and_scaled_rope(monkeypatch):
    check(Case(*centred(FAMILIES["higgs-2-16"]), scaling=1.3, dtype=torch.bfloat16, **PADDED), monkeypatch)


@pytest.mark.slow
def test_large_means_of_slow_channels(monkeypatch):
    """At ±100, as biased projections have them, scores of many blocks are off by no more than those without a mean."""
    pair = (replace(FAMILIES["higgs-2-16"][0], block=128), replace(FAMILIES["higgs-2-16"][1], block=128))
    off = []
    for key, slow in ((False, 0.0), (True, 100.0)):
        case = Case(*centred(pair, key, False), size=128, heads=1, blocks=20, splits=1, slow=slow)
        with poisoned(monkeypatch):
            out, level, wanted, levels = run(case)
        off.append((error(out, wanted), float((level.double() - levels).abs().max())))
    assert off[1][0] < 5e-3 and off[1][1] < 0.02


def test_splits_of_very_large_scores(monkeypatch):
    """Means of ±300 make scores of blocks hundreds apart from the window's: no 2^score of them is a float32."""
    pair = centred(FAMILIES["higgs-2-16"], True, False)
    case = Case(*pair, heads=2, blocks=5, splits=3, slow=300.0)
    with poisoned(monkeypatch):
        out, level, wanted, levels = run(case)
    assert float(levels.max()) > 200 and float(levels.min()) < 10
    assert error(out, wanted) < 5e-3 and float((level.double() - levels).abs().max()) < 0.1


REAL = {
    "a scale a channel": (kivi(2, block=128), {}),
    "a scale a token": (same(scheme(Rtn(2, "head"), block=128)), {}),
    "groups of 32": (squat(2, 32, 128), {}),
    "looked up": (same(scheme(Grid(2, 16, "head"), Hadamard("head"), block=128)), {}),
    "before RoPE": (squat(2, 32, 128), {"position": "pre", "starts": (21,)}),
    # what padding leaves of a slab each; the interpreter takes long
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
def test_real_sizes_as_a_gpu_would_be_launched(name, monkeypatch):
    """8 KV heads of 128, blocks of 128 tokens in two slabs, a window of 192. Two of the heads are attended to: the
    interpreter takes half a minute for all."""
    monkeypatch.setattr(launch, "attend_kernel", FirstHeads(launch.attend_kernel))
    sizes = {"size": 128, "heads": 8, "ratio": 4, "blocks": 33, "window": 192, "splits": 7}
    pair, given = REAL[name]
    monkeypatch.setattr(torch, "empty", torch.zeros)  # what other heads leave to the merge
    case = Case(*pair, **sizes | given, dtype=torch.bfloat16)
    out, level, wanted, levels = (x[:, : 2 * case.ratio] for x in run(case))
    assert error(out, wanted) <= TOLERANCE[case.dtype]
    assert float((level.double() - levels).abs().max()) <= 0.02


REPRESENTATIVE = ["kivi-2", "rtn-3", "higgs-2-16", "lloyd-2", "polar"]


@pytest.mark.parametrize("name, size", [*each_once(REPRESENTATIVE[:-1], [80, 96, 128, 256]), ("polar", 128)])
def test_head_sizes(name, size, monkeypatch):
    block = 128 if name in ("kivi-2", "rtn-3", "lloyd-2") else 32  # 5 tiles of 16 channels · 2 of tokens are no words
    if (name, size) == ("higgs-2-16", 80):  # pairs of channels are no words in any block: torch decodes them
        name, block = "lloyd-2", 128
    pair = tuple(replace(one, block=block) for one in FAMILIES[name])
    check(Case(*pair, size=size, heads=1, blocks=2), monkeypatch)


@pytest.mark.parametrize("name, query", each_once(REPRESENTATIVE, [(1, 1), (7, 1), (5, 3), (8, 8)]))
def test_ratios_and_query_tokens(name, query, monkeypatch):
    ratio, tokens = query
    check(Case(*FAMILIES[name], ratio=ratio, tokens=tokens, heads=1, blocks=2), monkeypatch)


@pytest.mark.parametrize("name, dtype", each_once(REPRESENTATIVE, [torch.float16, torch.bfloat16]))
def test_dtypes(name, dtype, monkeypatch):
    check(Case(*FAMILIES[name], dtype=dtype, **(ALONE if name == "polar" else {})), monkeypatch)


CORNERS = {
    "no blocks": {"blocks": 0, "window": 1},
    "one block, empty splits": {"blocks": 1, "splits": 5},
    "uneven splits": {"blocks": 5, "splits": 3},
    "over a slab": {"blocks": 33, "splits": 4, "heads": 1},
    "window of one": {"window": 1},
    "window of many": {"window": 70},
    "padded inside a block": {"starts": (5, 33)},
    "padded beyond the blocks": {"starts": (0, 99), "window": 10},
    "sinks in the window": {"starts": (94, 0), "window": 30},
}


@pytest.mark.parametrize("corner, name", each_once([*CORNERS], ["kivi-2", "higgs-2-16"]))
def test_corners(name, corner, monkeypatch):
    check(replace(Case(*FAMILIES[name]), **CORNERS[corner]), monkeypatch)


@pytest.mark.parametrize("pair", [kivi(2, sinks=0), kivi(2, block=64), same(scheme(Rtn(4, "head"), block=16))])
def test_blocks_and_no_sinks(pair, monkeypatch):
    check(Case(*pair), monkeypatch)
