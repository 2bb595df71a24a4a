"""The assembly that unpacks codes on a GPU, which the interpreter cannot run: followed here, line by line."""

import re

import numpy as np
import pytest
import torch

from kvq_runtime.ops import pack

pytest.importorskip("triton")
from kvq_runtime.kernels import unpack

COLUMNS = 16  # bytes of a run


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
        elif name == "prmt.b32":
            source = np.concatenate([a.view(np.uint8).reshape(-1, 4), b.view(np.uint8).reshape(-1, 4)], 1)
            selected = [source[:, int(rest[2], 0) >> (4 * i) & 7] for i in range(4)]
            held[to] = np.ascontiguousarray(np.stack(selected, 1)).view(np.uint32)[:, 0]
        elif name == "sub.rn.f16x2":
            held[to] = (floats(a) - floats(b)).view(np.uint32)
        else:
            held[to] = {"and.b32": np.bitwise_and, "or.b32": np.bitwise_or, "shl.b32": np.left_shift,
                        "shr.b32": np.right_shift}[name](a, b)  # fmt: skip
    return [held[f"${i}"] for i in range(outputs)]


def packed(bits: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """(codes [streams, columns], the runs of their bytes as words of four)."""
    streams = 8 // (bits & -bits)
    drawn = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (streams * COLUMNS,), dtype=torch.uint8, generator=drawn)
    runs = pack.pack(codes, bits).numpy().reshape(-1, COLUMNS)
    return codes.numpy().reshape(streams, COLUMNS), [run.view(np.uint32) for run in runs]


@pytest.mark.parametrize("bits", range(1, 9))
def test_halves(bits):
    codes, runs = packed(bits)
    for stream, wanted in enumerate(codes):
        words = followed(unpack._halves.fn(stream, bits), runs, 2)
        found = np.stack(words, 1).copy().view(np.float16).flatten()
        assert (found == wanted.astype(np.float16) * unpack.weight.fn(stream, bits)).all()


@pytest.mark.parametrize("bits, paired", [*((bits, 0) for bits in range(1, 8)), *((bits, 1) for bits in range(1, 5))])
def test_indices(bits, paired):
    codes, runs = packed(bits)
    streams = len(codes) >> paired
    for stream in range(streams):
        found = followed(unpack._indices.fn(stream, streams, bits, paired), runs, 1)[0].view(np.uint8)
        wanted = codes[stream] | (codes[streams + stream] << bits if paired else 0)
        assert (found == wanted).all()
