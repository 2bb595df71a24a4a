"""The assembly that unpacks codes on a GPU, which the interpreter cannot run: followed here, line by line.

Where a kernel has a plain twin of it, the twin's result is compared; its own on a GPU.
"""

import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from kvq_runtime.codec.kernel_order import SIGNED
from kvq_runtime.kernels.attend import fragment, polar
from kvq_runtime.ops.fragment import Order, Plane, order, slab_order


def followed(text: str, operands: list[np.ndarray], outputs: int) -> list[np.ndarray]:
    """What assembly over 32-bit registers leaves in its first operands."""
    held = {f"${outputs + i}": words for i, words in enumerate(operands)}

    def value(name: str) -> np.ndarray:
        return held[name] if name in held else np.full_like(operands[0], int(name, 0))

    def floats(words: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(words).view(np.float16)

    for line in re.findall(r"[^;{}]+;", text):
        name, *given = line.strip(" \n;").replace(",", " ").split()
        if name == ".reg":
            continue
        to, *rest = given
        a, b = value(rest[0]), value(rest[1]) if len(rest) > 1 else None
        if name == "mov.b32":
            held[to] = a
        elif name == "prmt.b32":  # the highest bit of a nibble asks for its byte's, eight times
            source = np.concatenate([a.view(np.uint8).reshape(-1, 4), b.view(np.uint8).reshape(-1, 4)], 1)
            nibbles = value(rest[2])[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)
            selected = np.take_along_axis(source, (nibbles & 7).astype(np.int64), 1)
            selected = np.where(nibbles & 8, (selected >> 7) * np.uint8(255), selected)
            held[to] = np.ascontiguousarray(selected).view(np.uint32)[:, 0]
        elif name == "lop3.b32":
            c = value(rest[2])
            held[to] = {"0xEA": (a & b) | c, "0xAE": (~a & b) | c, "0xD8": (b & c) | (a & ~c)}[rest[3]]
        elif name in ("sub.rn.f16x2", "mul.rn.f16x2"):
            held[to] = {"s": np.subtract, "m": np.multiply}[name[0]](floats(a), floats(b)).view(np.uint32)
        elif name == "fma.rn.f16x2":
            held[to] = (floats(a) * floats(b) + floats(value(rest[2]))).view(np.uint32)
        else:
            held[to] = {"and.b32": np.bitwise_and, "or.b32": np.bitwise_or, "shl.b32": np.left_shift,
                        "shr.b32": np.right_shift}[name](a, b)  # fmt: skip
    return [held[f"${i}"] for i in range(outputs)]


def tiles(made: Order | None, count: int = 0) -> Iterator[tuple[tuple[Plane, ...], int, np.ndarray, list[np.ndarray]]]:
    """Random containers of every run and tile of an order: planes, the tile, its codes, and words of two containers."""
    assert made is not None
    drawn = np.random.default_rng(made.BITS)
    for run in made.RUNS:
        widths = [made.WORDS[plane.WORDS].BITS for plane in run.PLANES]
        containers = [drawn.integers(0, 1 << width, 64, dtype=np.uint16) for width in widths]
        for tile in range(count or made.TILES):
            code = np.zeros(64, np.int64)
            for plane, container in zip(run.PLANES, containers, strict=True):
                part = (container >> (plane.WIDTH * (plane.SLOT + tile))) & ((1 << plane.WIDTH) - 1)
                code |= part.astype(np.int64) << plane.UP
            yield run.PLANES, tile, code, [container.view(np.uint32) for container in containers]


@pytest.mark.parametrize("bits, block, size", [(1, 128, 128), (1, 128, 80), (2, 128, 128), (2, 32, 64), (3, 128, 80),
                                               (4, 128, 96), (8, 128, 64)])  # fmt: skip
def test_operands(bits, block, size):
    """Two containers become 1 + code / weight, exactly, wherever in them a tile's codes are."""
    for planes, tile, code, words in tiles(order(bits, block, size)):
        found = followed(fragment._assembly.fn(planes, tile), words, 1)[0].view(np.float16)
        assert (found == 1 + code / fragment.weight.fn(planes, tile)).all()


@pytest.mark.parametrize("bits, block, size, signed", [(1, 128, 128, True), (2, 128, 128, False), (3, 128, 80, True),
                                                       (4, 128, 96, True), (4, 32, 64, False)])  # fmt: skip
def test_levels(bits, block, size, signed):
    """Two containers become what their codes stand for, wherever in them a tile's codes are."""
    table = np.random.default_rng(bits).integers(0, 1 << 16, 1 << bits, dtype=np.uint16)
    if signed:  # the sign, set where positive, is the lowest bit of three, else the highest
        sign = 1 if bits == 3 else 1 << (bits - 1)
        positive = np.arange(1 << bits) & sign > 0
        table = np.where(positive, table & 0x7FFF, table[np.arange(1 << bits) ^ sign] | 0x8000).astype(np.uint16)
    for planes, tile, code, words in tiles(order(bits, block, size)):
        text = fragment._table_assembly.fn(planes, tile, tuple(table.tolist()))
        assert (followed(text, words, 1)[0].view(np.uint16) == table[code]).all()


@pytest.mark.parametrize("bits", range(1, 8))
def test_slabs(bits):
    """Codes of a slab become numbers of a table, or about their middle, in whichever part of its tiles they are."""
    made = slab_order(bits)
    table = np.sort(np.random.default_rng(bits).integers(1, 0x7C00, 1 << bits >> 1, dtype=np.uint16))
    for planes, tile, code, words in tiles(made, made.TILES // len(made.RUNS)):
        if bits > 4:
            found = followed(fragment._centred_assembly.fn(planes, tile, bits), words, 1)[0].view(np.float16)
            assert (found == code - (2**bits - 1) / 2).all()
            continue
        points = np.concatenate([(table | 0x8000)[::-1], table])
        stored = np.argsort(SIGNED[bits] or range(1 << bits))
        text = fragment._table_assembly.fn(planes, tile, tuple(points[stored].tolist()))
        assert (followed(text, words, 1)[0].view(np.uint16) == points[stored][code]).all()


# ---- words of angles ----------------------------------------------------------------------------------------------

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNT = 1024


@triton.jit
def _lookup(p_table, p_which, p_out):
    o = tl.arange(0, 1024)
    b_x = polar.lookup_bytes(tl.load(p_table + o), tl.load(p_which + o).to(tl.uint32))
    tl.store(p_out + o, b_x.to(tl.int32))


@triton.jit
def _select(p_first, p_second, p_out, NIBBLES: tl.constexpr):
    o = tl.arange(0, 1024)
    b_first, b_second = tl.load(p_first + o).to(tl.uint32), tl.load(p_second + o).to(tl.uint32)
    tl.store(p_out + o, polar.select_bytes(b_first, b_second, NIBBLES).to(tl.int32))


@triton.jit
def _multiply(p_first, p_second, p_out):
    o = tl.arange(0, 1024)
    b_first, b_second = tl.load(p_first + o).to(tl.uint32), tl.load(p_second + o).to(tl.uint32)
    tl.store(p_out + o, polar.multiply_half2(b_first, b_second).to(tl.int32))


def drawn(seed: int) -> torch.Tensor:
    """Words of any bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (COUNT,), generator=generator).int().to(DEVICE)


def run(kernel, *given) -> np.ndarray:
    out = torch.zeros(COUNT, dtype=torch.int32, device=DEVICE)
    kernel[(1,)](*given[:2], out, *given[2:])
    return held(out)


def held(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy().view(np.uint32)


def test_bytes_are_picked():
    low, high, which = drawn(0), drawn(1), drawn(2) & 0x7777
    table = (high.long() << 32) | (low.long() & 0xFFFFFFFF)
    wanted = followed(polar.PRMT.value, [held(low), held(high), held(which)], 1)[0]
    assert (run(_lookup, table, which) == wanted).all()


@pytest.mark.parametrize("nibbles", [0x5410, 0x7362, 0xBA98, 0xFEDC])
def test_bytes_are_mixed(nibbles):
    one, two = drawn(3), drawn(4)
    wanted = followed(polar._prmt.fn(nibbles), [held(one), held(two)], 1)[0]
    assert (run(_select, one, two, nibbles) == wanted).all()


def test_products_of_pairs():
    one, two = (torch.randn(2 * COUNT, generator=torch.Generator().manual_seed(seed)).half() for seed in (5, 6))
    one, two = (x.view(torch.int32).to(DEVICE) for x in (one, two))
    wanted = followed(polar.MUL_HALF2.value, [held(one), held(two)], 1)[0]
    assert (run(_multiply, one, two) == wanted).all()
