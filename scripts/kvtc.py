"""A baseline of kept prefixes after KVTC: principal components of all layers, bits by dynamic programming, DEFLATE.

    x [tokens, L·C]: keys before RoPE of all layers side by side, or values → z = (x - μ) V → groups of consecutive
    components, each token's group rounded to 0, 2, 4 or 8 bits between its own least and greatest → zlib

V are all principal components of calibration's tokens. Groups have 1, 16, 64, 256 or 1,024 components; which there are
and how many bits each has makes the squared error of sampled tokens least for so many bits, of which a group that is
stored takes 32 a token for its range. Sinks are left out.

Source: Staniszewski and Łańcucki, 2025 (KVTC, arXiv:2511.01815).
Differs: the dynamic program has a price of a bit, found by bisection, in place of a table of budgets; it finds the
budgets of the convex hull. Single components come first alone, groups of more begin at multiples of 16. Eight bits are
integers. DEFLATE is zlib's, at its highest level, of packed codes or of a byte each, whichever is smaller.
"""

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

SIZES, BITS = (16, 64, 256, 1024), (2, 4, 8)
SINGLE = 16  # components that may be groups alone
RANGE = 32  # bits of a group's least and greatest, float16 both


@dataclass(frozen=True)
class Group:
    """Consecutive components, and the bits of each; 0: none is stored."""

    start: int
    size: int
    bits: int


@dataclass(frozen=True)
class Basis:
    """Principal components of one role: mean [F], vectors [F, F], the most variance first, and sampled latents."""

    mean: Tensor
    vectors: Tensor
    sample: Tensor


def fit(x_NF: Tensor, sample: int = 512) -> Basis:
    """Fit a basis to the tokens of calibration, float32."""
    mean = x_NF.mean(0)
    centred = x_NF - mean
    vectors = torch.linalg.eigh(centred.T @ centred / len(x_NF))[1].flip(1).contiguous()
    return Basis(mean, vectors, centred[:: max(1, len(x_NF) // sample)] @ vectors)


def rounded(z_NK: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 of each token's row, and its least and greatest, float16 [N]."""
    low, high = z_NK.amin(1).half(), z_NK.amax(1).half()
    step = ((high.float() - low.float()) / (2**bits - 1)).clamp_min(1e-12)
    codes = ((z_NK - low.float()[:, None]) / step[:, None]).round().clamp(0, 2**bits - 1)
    return codes.to(torch.uint8), low, high


def restored(codes: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor:
    """The numbers that codes stand for, float32."""
    step = ((high.float() - low.float()) / (2**bits - 1)).clamp_min(1e-12)
    return codes.float() * step[:, None] + low.float()[:, None]


class Choice:
    """The groups of a basis for any price of a bit: errors of all are computed once."""

    def __init__(self, basis: Basis):
        z_NF = basis.sample
        self.width = z_NF.shape[1]
        energy = torch.cat([torch.zeros(1), z_NF.square().mean(0).cumsum(0)]).tolist()
        self.options: dict[int, list[tuple[Group, float, float]]] = {}  # by start: (group, bits a token, error)
        for start in range(self.width):
            if start >= SINGLE and start % 16:
                continue
            sizes = [1] if start < SINGLE else []
            sizes += [size for size in SIZES if start % 16 == 0 and start + size <= self.width]
            found = []
            for size in sizes:
                part = z_NF[:, start : start + size]
                found.append((Group(start, size, 0), 0.0, energy[start + size] - energy[start]))
                for bits in BITS:
                    error = float((restored(*rounded(part, bits), bits) - part).square().sum(1).mean())
                    found.append((Group(start, size, bits), float(size * bits + RANGE), error))
            self.options[start] = found

    def priced(self, price: float) -> tuple[list[Group], float]:
        """The groups that cost least at this price of a bit, and the bits of a token."""
        best: dict[int, tuple[float, float, Group | None]] = {self.width: (0.0, 0.0, None)}
        for start in sorted(self.options, reverse=True):
            ends = [one for one in self.options[start] if one[0].start + one[0].size in best]
            scored = [(error + price * bits + best[g.start + g.size][0], bits, g) for g, bits, error in ends]
            if scored:
                cost, bits, group = min(scored, key=lambda one: one[0])
                best[start] = (cost, bits + best[group.start + group.size][1], group)
        groups, place = [], 0
        while place < self.width:
            group = best[place][2]
            assert group is not None, "every start has a group that goes on"
            groups.append(group)
            place += group.size
        return groups, best[0][1]

    def within(self, bits: float) -> list[Group]:
        """The groups of at most so many bits per element, before DEFLATE."""
        low, high = 1e-12, 1e6
        for _ in range(60):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.priced(middle)[1] > bits * self.width else (low, middle)
        return self.priced(high)[0]


def coded(x_NF: Tensor, basis: Basis, groups: list[Group]) -> tuple[int, Tensor]:
    """Bytes that tokens take, and what is restored from them, float32 [N, F]."""
    z_NF = (x_NF - basis.mean) @ basis.vectors
    found, streams, packed, ranges = torch.zeros_like(z_NF), [], [], []
    for group in groups:
        if not group.bits:
            continue
        codes, low, high = rounded(z_NF[:, group.start : group.start + group.size], group.bits)
        found[:, group.start : group.start + group.size] = restored(codes, low, high, group.bits)
        each, flat = 8 // group.bits, codes.flatten()
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % each)).view(-1, each).int()
        packed.append((flat << (group.bits * torch.arange(each))).sum(1).to(torch.uint8).numpy().tobytes())
        streams.append(codes.numpy().tobytes())
        ranges.append(torch.stack([low, high]).numpy().tobytes())
    size = min(len(zlib.compress(b"".join(some), 9)) for some in (streams, packed))
    return size + len(zlib.compress(b"".join(ranges), 9)), found @ basis.vectors.T + basis.mean
