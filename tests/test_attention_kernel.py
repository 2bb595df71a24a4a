"""Attention over packed blocks gives what softmax gives on the decoded ones, for every family and in every corner."""

from dataclasses import dataclass, replace

import pytest
import torch
from parity import DEVICE, error, normal, poisoned
from torch import Tensor

from kvq_runtime import rope
from kvq_runtime.codec import Codec, Context
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import grid, pack
from kvq_runtime.recipe import Recipe, Side
from kvq_runtime.stages.grid import Grid
from kvq_runtime.stages.lloyd import Lloyd
from kvq_runtime.stages.polar import Polar
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Hadamard, Random
from kvq_runtime.stages.rtn import Rtn

pytest.importorskip("triton")
from kvq_runtime.kernels import slabs
from kvq_runtime.kernels.attention import Encoded, Exact, Turns, attend
from kvq_runtime.kernels.layout import layout

# float16 operands of the matrix products, float32 sums; the window's products are in the model's dtype
TOLERANCE = {torch.float32: 1.5e-3, torch.float16: 2e-3, torch.bfloat16: 8e-3}
FREQUENCIES = 10000.0


@dataclass(frozen=True)
class Case:
    """One layer's cache and a query."""

    key: Side
    value: Side
    size: int = 64
    heads: int = 2
    ratio: int = 2
    tokens: int = 1  # of the query
    batch: int = 2
    blocks: int = 3
    window: int = 20
    splits: int = 2
    starts: tuple[int, ...] = (0, 0)
    position: str = "post"
    dtype: torch.dtype = torch.float32
    scaling: float = 1.0  # of cos and sin
    slow: float = 3.0  # the means of slow channels; those of the others are around 1


def side(quantize, rotate=None, axis="token", sinks=4, block=32) -> Side:
    return Side(quantize, rotate=rotate, axis=axis, sinks=sinks, recent=0, block=block)


def kivi(bits: int, block: int = 32, **settings) -> tuple[Side, Side]:
    return side(Rtn(bits, block), axis="channel", block=block, **settings), side(
        Rtn(bits, "head"), block=block, **settings
    )


def same(one: Side) -> tuple[Side, Side]:
    return one, one


FAMILIES = {
    **{f"kivi-{bits}": kivi(bits) for bits in (1, 2, 3, 4, 8)},
    **{f"rtn-{bits}": same(side(Rtn(bits, "head"))) for bits in (1, 2, 3, 4, 8)},
    **{f"kivi-groups-{bits}": (side(Rtn(bits, 16), axis="channel"), side(Rtn(bits, 16))) for bits in (2, 3, 4)},
    "rtn-groups": same(side(Rtn(1, 32, "absmax"))),
    "rtn-absmax": (side(Rtn(2, 32, "absmax"), axis="channel"), side(Rtn(4, "head", "absmax"))),
    "quarot": same(side(Rtn(4, "head"), Hadamard("head"))),
    **{f"higgs-{dim}-{size}": same(side(Grid(dim, size, "head"), Hadamard("head"))) for dim, size in
       ((2, 16), (2, 64), (2, 256), (4, 64), (4, 256), (8, 256))},
    **{f"lloyd-{bits}": same(side(Lloyd(bits, "head"), Random("head"))) for bits in (1, 2, 3, 4)},
    "polar": same(side(Polar(), Random())),
    "polar-radius8": same(side(Polar(radius="log8"), Random())),
    "polar-full": same(side(Polar((4, 2), levels=0, points="mean"), Random())),
    "polar-low": same(side(Polar((3, 2, 2, 1), levels=0, points="mean"), Random())),
    "mixed": (kivi(2)[0], side(Grid(2, 256, "head"), Hadamard("head"))),
}  # fmt: skip


def frequencies(size: int) -> Tensor:
    return FREQUENCIES ** (-torch.arange(0, size, 2, device=DEVICE) / size)


def turned(case: Case, x_BTHD: Tensor, first: int) -> Tensor:
    """Keys before RoPE at slots from `first` on, turned by their positions."""
    slots = torch.arange(first, first + x_BTHD.shape[1], device=DEVICE)
    positions = slots[None] - torch.tensor(case.starts, device=DEVICE)[:, None]
    angles = positions[..., None].double() * frequencies(case.size)
    return rope.rotate(x_BTHD.double(), case.scaling * angles.cos(), case.scaling * angles.sin())


def mean_of(case: Case, half: str) -> Tensor:
    """What a mean removed, before RoPE, [C]: large in the slower half of the frequencies."""
    mean_HKF = normal(case.heads * case.size, seed=11 + (half == "value")).view(case.heads, 2, -1)
    mean_HKF[..., mean_HKF.shape[-1] // 2 :] = case.slow * mean_HKF[..., mean_HKF.shape[-1] // 2 :].sign()
    return mean_HKF.flatten()


def restored(one: Side, fields: dict[str, Tensor], geometry: Geometry) -> Tensor:
    """What a side's blocks stand for, all in float32, [N, T, C]."""
    quantize = one.quantize
    width = geometry.width if one.axis == "token" else one.block
    if isinstance(quantize, Grid):  # the stage looks up in bfloat16
        codes = pack.unpack(fields["codes"], quantize.bits, geometry.head_size // quantize.dim)
        x = grid.decode(codes, fields["scale"], grid.points(quantize.dim, quantize.size).to(DEVICE)).flatten(-2)
    else:
        stored = quantize.decode(fields, width, geometry).float()
        x = torch.empty_like(stored)
        x[..., quantize.order(width, geometry).to(DEVICE)] = stored
    if one.rotate is not None:
        turn = one.rotate.matrix(width, geometry).to(DEVICE)
        x = (x.unflatten(-1, (-1, len(turn))) @ turn.mT).flatten(-2)
    return x if one.axis == "token" else x.mT


def encoded(case: Case, half: str, x_BTC: Tensor) -> tuple[Encoded, Tensor, list]:
    """The blocks of one side in two slabs, the last with room to spare, and what they decode to."""
    geometry = Geometry(1, case.heads, case.size)
    bare = [replace(one, predict=None) for one in (case.key, case.value)]
    recipe = Recipe("test", *bare, "post")
    codec = Codec(recipe, 0, half, geometry, {}).to(torch.device(DEVICE))
    one = case.key if half == "key" else case.value
    x_NTC = x_BTC.reshape(-1, one.block, geometry.width)
    fields = codec.encode(x_NTC, Context())
    decoded = restored(one, fields, geometry).reshape(x_BTC.shape)
    rows = {name: field.unflatten(0, (case.batch, -1)) for name, field in fields.items()}
    parts, stop = [], 0
    while stop < case.blocks or not parts:
        first, stop = stop, min(stop + slabs.SLAB, case.blocks)
        pad = 1 if stop == case.blocks else 0
        parts.append({
            name: torch.cat([field[:, first:stop], torch.full_like(field[:, :1], 77)[:, :pad]], 1).contiguous()
            if field.shape[1] else field.new_full((case.batch, 1, *field.shape[2:]), 77)
            for name, field in rows.items()
        })  # fmt: skip
    shape = layout(one, geometry, case.position if half == "key" else "post")
    assert shape is not None
    return Encoded.of(shape, slabs.table(parts, shape.names, len(parts) + 1, torch.device(DEVICE))), decoded, parts


def run(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, log-sum-exp) of the kernel and of softmax in float64."""
    sinks, block, width = case.key.sinks, case.key.block, case.heads * case.size
    coded = case.blocks * block
    past = {half: normal(case.batch, coded, width, seed=seed) for seed, half in enumerate(("key", "value"))}
    windows = {
        half: normal(case.batch, case.window, width, seed=9 + seed) for seed, half in enumerate(("key", "value"))
    }
    if case.key.axis == "channel":
        past["key"] += 3 * normal(width, seed=5)  # channels with means of their own, as keys have
    kept = {half: normal(case.batch, sinks, width, seed=3 + seed) for seed, half in enumerate(("key", "value"))}
    query = normal(case.batch, case.heads * case.ratio, case.tokens, case.size, seed=7).to(case.dtype)
    read, whole, alive = {}, {}, []
    for half in ("key", "value"):
        read[half], decoded, parts = encoded(case, half, past[half])
        alive.append(parts)
        decoded, given = decoded.double().unflatten(2, (case.heads, -1)), torch.zeros_like(past[half])
        if getattr(case, half).predict is not None:
            read[half] = replace(read[half], mean=mean_of(case, half))
            given = mean_of(case, half).expand_as(given)
        given = given.unflatten(2, (case.heads, -1))
        if half == "key" and case.position == "pre":
            decoded = turned(case, decoded + given, 0)
        else:
            decoded = decoded + (turned(case, given, 0) if half == "key" else given)
        kept[half], windows[half] = kept[half].to(case.dtype), windows[half].to(case.dtype)
        for row, start in enumerate(case.starts):
            count = max(0, min(sinks, coded - start))
            decoded[row, start : start + count] = kept[half][row, :count].double().unflatten(1, (case.heads, -1))
        whole[half] = torch.cat([decoded, windows[half].double().unflatten(2, (case.heads, -1))], 1)
    buffers = [torch.nn.functional.pad(windows[half], (0, 0, 3, 2), value=float("nan")) for half in ("key", "value")]
    lengths = torch.tensor([case.blocks, 3, case.window], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor(case.starts, dtype=torch.int32, device=DEVICE)
    turns = None
    if case.position == "pre" or case.key.predict is not None:
        turns = Turns.of(frequencies(case.size), case.scaling, block, case.blocks + 1, starts, case.position)
    exact = Exact(*buffers, kept["key"], kept["value"])
    scale = case.size**-0.5
    out, level = attend(query, read["key"], read["value"], exact, lengths, starts, scale, case.splits, turns)
    return out, level, *reference(case, query, whole["key"], whole["value"], scale)


def reference(case: Case, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    count = key.shape[1]
    k, v = (x.double().repeat_interleave(case.ratio, 2).transpose(1, 2) for x in (key, value))
    s = query.double() @ k.mT * scale
    slots = torch.arange(count, device=DEVICE)
    seen = slots[None, None, None] >= torch.tensor(case.starts, device=DEVICE)[:, None, None, None]
    last = count - case.tokens + torch.arange(case.tokens, device=DEVICE)
    s = s.masked_fill(~(seen & (slots[None] <= last[:, None])), float("-inf"))
    return s.softmax(-1) @ v, s.logsumexp(-1) / torch.log(torch.tensor(2.0))


def check(case: Case, monkeypatch) -> None:
    with poisoned(monkeypatch):
        out, level, wanted, levels = run(case)
    assert error(out, wanted) <= TOLERANCE[case.dtype]
    assert float((level.double() - levels).abs().max()) <= 0.02


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, monkeypatch):
    check(Case(*FAMILIES[name]), monkeypatch)


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("starts", [(0, 0), (7, 40)])
def test_keys_before_rope(bits, starts, monkeypatch):
    check(Case(*kivi(bits), position="pre", starts=starts, blocks=5), monkeypatch)


def squat(bits: int, group: int = 16, block: int = 32, **settings) -> tuple[Side, Side]:
    """Several groups in a block, and in a head."""
    key = side(Rtn(bits, group), axis="channel", block=block, **settings)
    return key, side(Rtn(bits, 16), block=block, **settings)


@pytest.mark.parametrize("pair", [squat(2), squat(3), squat(4), squat(2, block=128), squat(2, 24, 48, sinks=0)])
@pytest.mark.parametrize("starts", [(0, 0), (7, 40)])
def test_groups_before_rope(pair, starts, monkeypatch):
    check(Case(*pair, position="pre", starts=starts, blocks=5), monkeypatch)


@pytest.mark.parametrize("size", [48, 80, 96, 128, 256])
def test_groups_before_rope_in_other_heads(size, monkeypatch):
    check(Case(*squat(2), size=size, heads=1, blocks=2, position="pre", starts=(0, 21)), monkeypatch)


@pytest.mark.parametrize("ratio, tokens", [(1, 1), (7, 1), (5, 3), (8, 8)])
def test_groups_before_rope_and_query_tokens(ratio, tokens, monkeypatch):
    case = Case(*squat(2), ratio=ratio, tokens=tokens, heads=1, blocks=2, position="pre")
    check(case, monkeypatch)


# ---- with a mean removed -----------------------------------------------------------------------------------------


def centred(pair: tuple[Side, Side], key: bool = True, value: bool = True) -> tuple[Side, Side]:
    """The sides with a mean removed."""
    found = [replace(one, predict=Mean() if there else None) for one, there in zip(pair, (key, value), strict=True)]
    return found[0], found[1]


PADDED = {"starts": (7, 40), "blocks": 5, "splits": 3}


@pytest.mark.parametrize("name", ["kivi-2", "kivi-groups-2", "rtn-4", "quarot", "higgs-2-16", "lloyd-3", "polar"])
def test_means(name, monkeypatch):
    check(Case(*centred(FAMILIES[name]), **PADDED), monkeypatch)


@pytest.mark.parametrize("key, value", [(True, False), (False, True)])
def test_a_mean_of_one_side(key, value, monkeypatch):
    check(Case(*centred(FAMILIES["higgs-2-16"], key, value)), monkeypatch)


@pytest.mark.parametrize("size", [80, 96, 128, 256])
def test_means_in_other_heads(size, monkeypatch):
    check(Case(*centred(FAMILIES["higgs-2-16"]), size=size, heads=1, blocks=2, starts=(0, 21)), monkeypatch)


@pytest.mark.parametrize("name", ["kivi-2", "higgs-2-16"])
@pytest.mark.parametrize("ratio, tokens", [(7, 1), (2, 4)])
def test_means_and_query_tokens(name, ratio, tokens, monkeypatch):
    check(Case(*centred(FAMILIES[name]), ratio=ratio, tokens=tokens, heads=1, blocks=2), monkeypatch)


@pytest.mark.parametrize(
    "corner", ["no blocks", "one block, empty splits", "uneven splits", "padded beyond the blocks"]
)
def test_means_in_corners(corner, monkeypatch):
    check(replace(Case(*centred(FAMILIES["higgs-2-16"])), **CORNERS[corner]), monkeypatch)


@pytest.mark.parametrize("name", ["kivi-2", "polar", "mean"])
@pytest.mark.parametrize("ratio, tokens", [(9, 1), (3, 4)])
def test_query_heads_take_turns(name, ratio, tokens, monkeypatch):
    """Where one launch has no room for all of them."""
    pair = centred(FAMILIES["higgs-2-16"]) if name == "mean" else FAMILIES[name]
    check(Case(*pair, ratio=ratio, tokens=tokens, heads=2, blocks=2), monkeypatch)


def test_too_many_query_tokens():
    for pair, tokens in ((centred(FAMILIES["higgs-2-16"]), 9), (FAMILIES["kivi-2"], 65)):
        with pytest.raises(ValueError, match=f"{tokens} rows per KV head: too many for a tile"):
            run(Case(*pair, ratio=1, tokens=tokens, heads=1, blocks=1))


def test_a_mean_and_scaled_rope(monkeypatch):
    check(Case(*centred(FAMILIES["higgs-2-16"]), scaling=1.3, dtype=torch.bfloat16, **PADDED), monkeypatch)


@pytest.mark.parametrize("pair", [kivi(2), squat(2)], ids=["kivi", "squat"])
def test_a_mean_before_rope(pair, monkeypatch):
    check(Case(*centred(pair), position="pre", scaling=0.9, **PADDED), monkeypatch)


def test_large_means_of_slow_channels(monkeypatch):
    """At ±100, as biased projections have them, scores of many blocks are off by no more than those without a mean."""
    pair = (replace(FAMILIES["higgs-2-16"][0], block=128), replace(FAMILIES["higgs-2-16"][1], block=128))
    off = []
    for key, slow in ((False, 0.0), (True, 100.0)):
        case = Case(*centred(pair, key, False), size=128, heads=1, blocks=20, splits=1, batch=1, starts=(0,), slow=slow)
        with poisoned(monkeypatch):
            out, level, wanted, levels = run(case)
        off.append((error(out, wanted), float((level.double() - levels).abs().max())))
    assert off[1][0] < 5e-3 and off[1][1] < 0.02


REPRESENTATIVE = ["kivi-2", "rtn-3", "higgs-2-16", "lloyd-2", "polar"]


@pytest.mark.parametrize("name", REPRESENTATIVE)
@pytest.mark.parametrize("size", [80, 96, 128, 256])
def test_head_sizes(name, size, monkeypatch):
    pair = FAMILIES[name]
    if name == "rtn-3" and size == 256:
        pair = FAMILIES["rtn-2"]
    check(Case(*pair, size=size, heads=1, blocks=2), monkeypatch)


@pytest.mark.parametrize("name", REPRESENTATIVE)
@pytest.mark.parametrize("ratio, tokens", [(1, 1), (7, 1), (5, 3), (8, 8)])
def test_ratios_and_query_tokens(name, ratio, tokens, monkeypatch):
    check(Case(*FAMILIES[name], ratio=ratio, tokens=tokens, heads=1, blocks=2), monkeypatch)


@pytest.mark.parametrize("name", REPRESENTATIVE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes(name, dtype, monkeypatch):
    check(Case(*FAMILIES[name], dtype=dtype), monkeypatch)


CORNERS = {
    "no blocks": {"blocks": 0, "window": 1},
    "one block, empty splits": {"blocks": 1, "splits": 5},
    "uneven splits": {"blocks": 5, "splits": 3},
    "over a slab": {"blocks": 33, "splits": 4, "batch": 1, "starts": (0,), "heads": 1},
    "window of one": {"window": 1},
    "window of many": {"window": 70},
    "padded inside a block": {"starts": (5, 33)},
    "padded beyond the blocks": {"starts": (0, 99), "window": 10},
    "sinks in the window": {"starts": (94, 0), "window": 30},
}


@pytest.mark.parametrize("name", ["kivi-2", "higgs-2-16"])
@pytest.mark.parametrize("corner", CORNERS)
def test_corners(name, corner, monkeypatch):
    check(replace(Case(*FAMILIES[name]), **CORNERS[corner]), monkeypatch)


@pytest.mark.parametrize("pair", [kivi(2, sinks=0), kivi(2, block=48), same(side(Rtn(4, "head"), block=24))])
def test_blocks_and_no_sinks(pair, monkeypatch):
    check(Case(*pair), monkeypatch)
