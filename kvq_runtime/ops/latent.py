"""Encode latent channels, each with its own calibrated scale: [..., R, T], channel by channel.

    gaussian   code = the cell of z / σ among those that are optimal for a standard Gaussian;    ẑ = σ · centroid
    stepped    of 5 bits and more ẑ = σ step (code - (2^b - 1) / 2), step the best of a standard Gaussian
    uniform    code = round((z - low) / step), step = (high - low) / (2^b - 1);                  ẑ = low + step · code

A centroid of the Gaussian codebook is the exact mean of its cell, E[z | a < z < b] = (φ(a) - φ(b)) / P(a, b). The
boundaries are a table: at 7 and 8 bits they take seconds to find (`scripts/build_tables.py`).

Gaussian channels of few bits are also encoded by paths: `trellis.py`.

Letters: N blocks · R channels · T tokens of a block.

Source: Lloyd, 1982; Max, 1960; Panter and Dite, 1951 (the density of points).
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from kvq_runtime.ops import grid, product, rtn, trellis
from kvq_runtime.ops.constant import constant

MAX_BITS = 8  # bits of a code
# sha256 of the boundaries of 0 to MAX_BITS bits, float64; `python scripts/build_tables.py gaussian` builds them again.
GAUSSIAN = "72ff842e59e68f1904fa5875257ef954cf1efce5828932063d478bff0cda5e70"
FINE, REACH = 64, 8  # cells of a table to a unit, and the largest number in it
PAIRED = 4  # up to so many bits errors are found without codes
STEPPED = 5  # bits from which points of "stepped" are even: a kernel has no room for tables of more than 4
LEVELS = 8  # of importance, on either side of the mean token's


@constant(MAX_BITS + 1)
def gaussian(bits: int) -> tuple[Tensor, Tensor]:
    """Return the 2^bits - 1 boundaries and 2^bits centroids, float64; no bits: the mean alone."""
    if not 0 <= bits <= MAX_BITS:
        raise ValueError(f"bits={bits}; a latent channel has 0 to {MAX_BITS}")
    every = grid.pinned("codebook", "gaussian", grid.tables("codebooks")["gaussian"], GAUSSIAN)
    boundaries = every.split([2**each - 1 for each in range(MAX_BITS + 1)])[bits]
    return boundaries, means(boundaries)


def _ends(boundaries: Tensor) -> Tensor:
    infinity = boundaries.new_full((1,), math.inf)
    return torch.cat([-infinity, boundaries, infinity])


def _mass(ends: Tensor) -> Tensor:
    """Return the share of a standard Gaussian between ends; from the nearer tail, so that no digits are lost."""
    tails, below = torch.special.ndtr(-ends.abs()), ends < 0
    crosses = below[:-1] & (ends[1:] > 0)
    return torch.where(crosses, 1 - tails[:-1] - tails[1:], tails.diff().abs())


def means(boundaries: Tensor) -> Tensor:
    """Return the means of a standard Gaussian between boundaries."""
    ends = _ends(boundaries)
    density = torch.exp(-ends.square() / 2) / math.sqrt(2 * math.pi)
    centroids = -density.diff() / _mass(ends)
    return (centroids - centroids.flip(0)) / 2


@lru_cache(maxsize=MAX_BITS + 1)
def distortion(bits: int) -> float:
    """Return the mean squared error of the Gaussian codebook at unit variance: 1 - E[c²], c means of cells."""
    boundaries, centroids = gaussian(bits)
    return 1 - float((_mass(_ends(boundaries)) * centroids.square()).sum())


def encode_gaussian(z_NRT: Tensor, deviation_R: Tensor, bits: int) -> Tensor:
    """Return codes uint8 [N, R, T] of float32 channels with these standard deviations [R]; one of 0 is coded as zeros.

    A code counts the boundaries below, by a table of cells so narrow that none holds two; one comparison is left.
    """
    x_NRT = z_NRT * product.inverse(deviation_R)[:, None]
    below, following = _cells(bits, x_NRT.device)
    cell = (x_NRT * FINE).clamp_(-REACH * FINE, REACH * FINE - 1).floor_().int()
    cell = cell.clamp_(min=-REACH * FINE).add_(REACH * FINE).flatten()  # a NaN is any whole number until here
    more = x_NRT.flatten() > following.index_select(0, cell)
    return below.index_select(0, cell).add_(more.view(torch.uint8)).view(x_NRT.shape)


@constant(16)
def _cells(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return, for each cell [n, n + 1) / FINE, the boundaries below it, uint8, and the next one, float32."""
    boundaries = gaussian(bits)[0].float()
    assert bool((boundaries.diff() > 1 / FINE).all()) and float(boundaries.abs().max()) < REACH - 1 / FINE
    edges = torch.arange(-REACH * FINE, REACH * FINE, dtype=torch.float32) / FINE
    below = torch.bucketize(edges, boundaries)
    following = torch.cat([boundaries, boundaries.new_full((1,), math.inf)])[below]
    return below.to(device, torch.uint8), following.to(device)


@lru_cache(maxsize=MAX_BITS + 1)
def step(bits: int) -> tuple[float, float]:
    """Return the best step of 2^bits evenly spaced points of a standard Gaussian, and the mean squared error it leaves.

    By golden section on the error, an integral over cells of a fine grid.
    """
    x = torch.arange(-10, 10, 1 / 4096, dtype=torch.float64) + 1 / 8192
    density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi) / 4096

    def error(width: float) -> float:
        code = (x / width + 2 ** (bits - 1)).floor().clamp_(0, 2**bits - 1)
        return float(((x - width * (code - (2**bits - 1) / 2)).square() * density).sum())

    low, high = 2.0 / 2**bits, 12.0 / 2**bits
    for _ in range(40):
        thirds = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, thirds[1]) if error(thirds[0]) < error(thirds[1]) else (thirds[0], high)
    return (low + high) / 2, error((low + high) / 2)


def encode_steps(z_NRT: Tensor, deviation_R: Tensor, bits: int) -> Tensor:
    """Return codes uint8 [N, R, T] of float32 channels by even steps of these deviations [R]; the ends clip."""
    x_NRT = z_NRT * (product.inverse(deviation_R) / step(bits)[0])[:, None]
    return x_NRT.nan_to_num_(0.0).add_(2 ** (bits - 1)).floor_().clamp_(0, 2**bits - 1).to(torch.uint8)


def decode_steps(codes_NRT: Tensor, deviation_R: Tensor, bits: int) -> Tensor:
    """Decode codes [N, R, T] of even steps, with deviations [R], to float32."""
    return (codes_NRT.float() - (2**bits - 1) / 2) * (step(bits)[0] * deviation_R)[:, None]


def encode_points(z_NRT: Tensor, deviation_R: Tensor, bits: int, steps: bool) -> Tensor:
    """Return codes uint8 [N, R, T] of the nearest of `points(bits, steps)`."""
    encode = encode_steps if steps and bits >= STEPPED else encode_gaussian
    return encode(z_NRT, deviation_R, bits)


def errors_gaussian(z_NRT: Tensor, deviation_R: Tensor, bits: int) -> Tensor:
    """Return the squared errors [N, R, T] that encoding would leave, without codes: distances to the nearest point."""
    if not 1 <= bits <= PAIRED:
        return (decode_gaussian(encode_gaussian(z_NRT, deviation_R, bits), deviation_R, bits) - z_NRT).square_()
    return _away(z_NRT.abs(), deviation_R[:, None], bits).square_()


def _away(size_NRT: Tensor, scale_R1: Tensor, bits: int) -> Tensor:
    """How far numbers of these sizes are from the nearest point, of either sign.

    Points lie on both sides of zero alike. Of two points c ± h of one side the nearer is | |z| - c | - h away.
    """
    points = gaussian(bits)[1][2 ** (bits - 1) :].float().tolist()
    if bits == 1:
        return size_NRT - points[0] * scale_R1
    nearest = None
    for low, high in zip(points[::2], points[1::2], strict=True):
        away = (size_NRT - (low + high) / 2 * scale_R1).abs_().sub_((high - low) / 2 * scale_R1)
        nearest = away if nearest is None else torch.minimum(nearest.abs_(), away.abs_(), out=nearest)
    assert nearest is not None
    return nearest


def errors_stepped(z_NRT: Tensor, deviation_R: Tensor, bits: int) -> Tensor:
    """Return the squared errors [N, R, T] of even steps."""
    return (decode_steps(encode_steps(z_NRT, deviation_R, bits), deviation_R, bits) - z_NRT).square_()


def errors_with_gains(z_NRT: Tensor, deviation_R: Tensor, bits: int, gain_G: Tensor, steps: bool = False) -> Tensor:
    """Return the squared errors of all channels, if tokens had each of these gains: [G, N, T].

    steps   whether codes of STEPPED bits and more are of even steps
    """
    if steps and bits >= STEPPED:
        return torch.stack([errors_stepped(z_NRT, gain * deviation_R, bits).sum(1) for gain in gain_G])
    if not 1 <= bits <= PAIRED:
        return torch.stack([errors_gaussian(z_NRT, gain * deviation_R, bits).sum(1) for gain in gain_G])
    size_NRT = z_NRT.abs()
    scales = (gain * deviation_R[:, None] for gain in gain_G)
    return torch.stack([_away(size_NRT, scale_R1, bits).square_().sum(1) for scale_R1 in scales])


@constant(64)
def points(bits: int, steps: bool, device: torch.device) -> Tensor:
    """Return what codes of so many bits stand for, in deviations, float32 [2^bits]; `steps`: of "stepped"."""
    if steps and bits >= STEPPED:
        return ((torch.arange(2**bits) - (2**bits - 1) / 2) * step(bits)[0]).float().to(device)
    return gaussian(bits)[1].float().to(device)


def decode_gaussian(codes_NRT: Tensor, deviation_R: Tensor, bits: int) -> Tensor:
    """Decode codes [N, R, T] of 1 to 8 bits, with deviations [R], to float32."""
    table = gaussian(bits)[1].to(codes_NRT.device, torch.float32)
    return table.index_select(0, codes_NRT.flatten().int()).view(codes_NRT.shape) * deviation_R[:, None]


def encode_uniform(z_NRT: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor:
    """Return codes uint8 [N, R, T] of float32 channels between ends [R] or [N, R]; what is outside them is clipped."""
    return rtn.coded(z_NRT, low, (high - low) / (2**bits - 1), bits)


def decode_uniform(codes_NRT: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor:
    """Decode codes [N, R, T] of 1 to 8 bits, with ends [R] or [N, R], to float32."""
    step = (high - low) / (2**bits - 1)
    return torch.addcmul(low[..., None], codes_NRT.float(), step[..., None])


def gains(ends_2: Tensor, bits: int) -> Tensor:
    """Return the 2^bits factors of tokens, float32: evenly spaced logarithms between these ends."""
    low, high = ends_2.double()
    return torch.exp(low + (high - low) * torch.arange(2**bits, device=ends_2.device) / (2**bits - 1)).float()


def like_path(z_NRT: Tensor, deviation_R: Tensor, bits: int) -> Tensor:
    """Return channels with errors of the size that paths leave, without a search: α z + β ẑ, ẑ of Lloyd–Max codes.

    Of a Gaussian z, α and β give it the variance of what paths decode to, 1 - D, and the same covariance with z: what
    is fitted to read the one reads the other as well.
    """
    left, paths = distortion(bits), trellis.DISTORTIONS[bits]
    beta = (paths * (1 - paths) / left / (1 - left)) ** 0.5
    alpha = 1 - paths - beta * (1 - left)
    rounded_NRT = decode_gaussian(encode_gaussian(z_NRT, deviation_R, bits), deviation_R, bits)
    return rounded_NRT.mul_(beta).add_(z_NRT, alpha=alpha)


def importance(x_NTC: Tensor, direction_C: Tensor) -> Tensor:
    """Return levels of how much errors of tokens count, int8 [N, T], from their rows about the mean: ln w = level / 2.

    level = 2 u x, rounded, from -LEVELS to LEVELS      so few that machines nearly always find the same ones
    """
    level_NT = ((x_NTC.float() * direction_C).sum(-1) * 2).round_()
    return level_NT.nan_to_num_(0.0).clamp_(-LEVELS, LEVELS).to(torch.int8)


def token_scale(level_NT: Tensor) -> Tensor:
    """Return the square root of what errors of tokens of these levels count, float32."""
    return (level_NT.float() / 4).exp_()
