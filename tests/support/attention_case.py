"""A layer's packed cache and a query, attended to by the kernel and by softmax in float64 over what it decodes to."""

from dataclasses import dataclass, replace

import pytest
import torch
from parity import DEVICE, normal
from torch import Tensor

from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.geometry import SLAB, Geometry
from kvq_runtime.ops import grid, pack, rope
from kvq_runtime.recipe import Recipe, Role, Scheme, Window
from kvq_runtime.stages.codebook import Grid, Lloyd
from kvq_runtime.stages.polar import Polar
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Hadamard, Random
from kvq_runtime.stages.rtn import Rtn

pytest.importorskip("triton")
from kvq_runtime.kernels.attend.launch import Exact, Layout, RopeTables, attend, block_table, layout

FREQUENCIES = 10000.0


@dataclass(frozen=True)
class Sized(Scheme):
    """A scheme, and the window of the recipe that a case has it in."""

    sinks: int = 4
    block: int = 32


@dataclass(frozen=True)
class Case:
    """One layer's cache and a query."""

    key: Sized
    value: Sized
    size: int = 64
    heads: int = 2
    ratio: int = 2
    tokens: int = 1  # of the query
    blocks: int = 3
    window: int = 20
    splits: int = 2
    starts: tuple[int, ...] = (0,)  # of each row
    dtype: torch.dtype = torch.float32
    scaling: float = 1.0  # of cos and sin
    slow: float = 3.0  # the means of slow channels; those of the others are around 1
    cap: float | None = None  # of scores

    @property
    def batch(self) -> int:
        return len(self.starts)


def scheme(quantize, rotate=None, axis="token", sinks=4, block=32) -> Sized:
    return Sized(quantize, rotate=rotate, axis=axis, sinks=sinks, block=block)


def kivi(bits: int, block: int = 32, **settings) -> tuple[Sized, Sized]:
    return scheme(Rtn(bits, block), axis="channel", block=block, **settings), scheme(
        Rtn(bits, "head"), block=block, **settings
    )


def squat(bits: int, group: int = 16, block: int = 32, **settings) -> tuple[Sized, Sized]:
    """Several groups in a block, and in a head."""
    key = scheme(Rtn(bits, group), axis="channel", block=block, **settings)
    return key, scheme(Rtn(bits, 16), block=block, **settings)


def centred(pair: tuple[Sized, Sized], key: bool = True, value: bool = True) -> tuple[Sized, Sized]:
    """The sides with a mean removed."""
    found = [replace(one, predict=Mean() if there else None) for one, there in zip(pair, (key, value), strict=True)]
    return found[0], found[1]


def same(one: Sized) -> tuple[Sized, Sized]:
    return one, one


FAMILIES = {
    **{f"kivi-{bits}": kivi(bits) for bits in (1, 2, 3)},
    **{f"rtn-{bits}": same(scheme(Rtn(bits, "head"))) for bits in (1, 3, 4, 8)},
    **{f"kivi-groups-{bits}": (scheme(Rtn(bits, 16), axis="channel"), scheme(Rtn(bits, 16))) for bits in (2, 3)},
    "quarot": same(scheme(Rtn(4, "head"), Hadamard("head"))),
    "higgs-2-16": same(scheme(Grid(2, 16, "head"), Hadamard("head"))),
    **{f"lloyd-{bits}": same(scheme(Lloyd(bits, "head"), Random("head"))) for bits in (1, 2, 3, 4)},
    "polar": same(scheme(Polar(), Random())),
    "polar-whole": same(scheme(Polar(levels=0, points="mean"), Random())),
    "mixed": (kivi(2)[0], scheme(Rtn(4, "head"), Hadamard("head"))),
}  # fmt: skip


def frequencies(size: int) -> Tensor:
    return FREQUENCIES ** (-torch.arange(0, size, 2, device=DEVICE) / size)


def turned(case: Case, x_BTHD: Tensor) -> Tensor:
    """Turn keys by the positions of their slots."""
    slots = torch.arange(x_BTHD.shape[1], device=DEVICE)
    positions = slots[None] - torch.tensor(case.starts, device=DEVICE)[:, None]
    angles = positions[..., None].double() * frequencies(case.size)
    return rope.rotate(x_BTHD.double(), case.scaling * angles.cos(), case.scaling * angles.sin())


def mean_of(case: Case, role: str) -> Tensor:
    """What a mean removed, before RoPE, [C]: large in the slower half of the frequencies."""
    mean_HKF = normal(case.heads * case.size, seed=11 + (role == "value")).view(case.heads, 2, -1)
    mean_HKF[..., mean_HKF.shape[-1] // 2 :] = case.slow * mean_HKF[..., mean_HKF.shape[-1] // 2 :].sign()
    return mean_HKF.flatten()


def restored(one: Sized, fields: dict[str, Tensor], geometry: Geometry) -> Tensor:
    """What a side's blocks stand for, all in float32, [N, T, C]."""
    quantize = one.quantize
    width = geometry.width if one.axis == "token" else one.block
    if isinstance(quantize, Grid):  # the stage looks up in bfloat16
        codes = pack.unpack(fields["codes"], quantize.bits, geometry.head_size // quantize.dim)
        vectors = grid.points(quantize.dim, quantize.size).to(DEVICE)[codes.int()]
        x = (vectors.mT.flatten(-2) * fields["scale"].float()[..., None]).flatten(-2)
    else:
        stored = quantize.decode(fields, width, geometry).float()
        x = torch.empty_like(stored)
        x[..., quantize.order(width, geometry).to(DEVICE)] = stored
    if one.rotate is not None:
        turn = one.rotate.matrix(width, geometry).to(DEVICE)
        x = (x.unflatten(-1, (-1, len(turn))) @ turn.mT).flatten(-2)
    return x if one.axis == "token" else x.mT


def encoded(case: Case, role: Role, x_BTC: Tensor) -> tuple[Layout, Tensor, list]:
    """The blocks of one side in two slabs, the last with room to spare, and what they decode to."""
    geometry = Geometry(1, case.heads, case.size)
    bare = [replace(one, predict=None) for one in (case.key, case.value)]
    recipe = Recipe("test", *bare, "post", window=Window(case.key.sinks, 0, case.key.block))
    codec = Codec(recipe, 0, role, geometry, {}).to(torch.device(DEVICE))
    one = case.key if role == "key" else case.value
    x_NTC = x_BTC.reshape(-1, one.block, geometry.width)
    fields = codec.encode(x_NTC, Context())
    decoded = restored(one, fields, geometry).reshape(x_BTC.shape)
    rows = {name: field.unflatten(0, (case.batch, -1)) for name, field in fields.items()}
    parts, stop = [], 0
    while stop < case.blocks or not parts:
        first, stop = stop, min(stop + SLAB, case.blocks)
        pad = 1 if stop == case.blocks else 0
        parts.append({
            name: torch.cat([field[:, first:stop], torch.full_like(field[:, :1], 77)[:, :pad]], 1).contiguous()
            if field.shape[1] else field.new_full((case.batch, 1, *field.shape[2:]), 77)
            for name, field in rows.items()
        })  # fmt: skip
    shape = layout(one, one.block, geometry, role)
    assert shape is not None
    if shape.order is not None:
        parts = [shape.order.arranged(part) for part in parts]
    device = torch.device(DEVICE)
    table = block_table(parts, shape.names, len(parts) + 1, device)
    return replace(shape.on(device), addresses=table), decoded, parts


def run(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, log-sum-exp) of the kernel and of softmax in float64."""
    sinks, block, width = case.key.sinks, case.key.block, case.heads * case.size
    coded = case.blocks * block
    past = {role: normal(case.batch, coded, width, seed=seed) for seed, role in enumerate(("key", "value"))}
    windows = {
        role: normal(case.batch, case.window, width, seed=9 + seed) for seed, role in enumerate(("key", "value"))
    }
    if case.key.axis == "channel":
        past["key"] += 3 * normal(width, seed=5)  # channels with means of their own, as keys have
    kept = {role: normal(case.batch, sinks, width, seed=3 + seed) for seed, role in enumerate(("key", "value"))}
    query = normal(case.batch, case.heads * case.ratio, case.tokens, case.size, seed=7).to(case.dtype)
    read, whole, alive = {}, {}, []
    for role in ("key", "value"):
        read[role], decoded, parts = encoded(case, role, past[role])
        alive.append(parts)
        decoded, given = decoded.double().unflatten(2, (case.heads, -1)), torch.zeros_like(past[role])
        if getattr(case, role).predict is not None:
            read[role] = replace(read[role], mean=mean_of(case, role))
            given = mean_of(case, role).expand_as(given)
        given = given.unflatten(2, (case.heads, -1))
        decoded = decoded + (turned(case, given) if role == "key" else given)
        kept[role], windows[role] = kept[role].to(case.dtype), windows[role].to(case.dtype)
        for row, start in enumerate(case.starts):
            count = max(0, min(sinks, coded - start))
            decoded[row, start : start + count] = kept[role][row, :count].double().unflatten(1, (case.heads, -1))
        whole[role] = torch.cat([decoded, windows[role].double().unflatten(2, (case.heads, -1))], 1)
    buffers = [torch.nn.functional.pad(windows[role], (0, 0, 3, 2), value=float("nan")) for role in ("key", "value")]
    lengths = torch.tensor([case.blocks, 3, case.window], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor(case.starts, dtype=torch.int32, device=DEVICE)
    tables = None
    if case.key.predict is not None:
        tables = RopeTables.of(frequencies(case.size), case.scaling, block, case.blocks + 1, starts)
    exact = Exact(*buffers, kept["key"], kept["value"])
    scale = case.size**-0.5
    out, level = attend(query, read["key"], read["value"], exact, lengths, starts, scale, case.splits, tables, case.cap)
    return out, level, *reference(case, query, whole["key"], whole["value"], scale)


def reference(case: Case, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    count = key.shape[1]
    k, v = (x.double().repeat_interleave(case.ratio, 2).transpose(1, 2) for x in (key, value))
    s = query.double() @ k.mT * scale
    s = s if case.cap is None else case.cap * torch.tanh(s / case.cap)
    slots = torch.arange(count, device=DEVICE)
    seen = slots[None, None, None] >= torch.tensor(case.starts, device=DEVICE)[:, None, None, None]
    last = count - case.tokens + torch.arange(case.tokens, device=DEVICE)
    s = s.masked_fill(~(seen & (slots[None] <= last[:, None])), float("-inf"))
    return s.softmax(-1) @ v, s.logsumexp(-1) / torch.log(torch.tensor(2.0))
