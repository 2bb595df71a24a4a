"""Choose how the kernel reads one scheme of a layer: scan, its settings and its tables; None where none reads it.

The kernel takes codes in operand order (codec/kernel_order.py), whose groups are a head's, a part of it, or a channel's
in a block; or angles of whole heads; or latents of a basis a head (codec/latent_order.py), of keys by segment. Blocks
of other schemes are decoded first. A mean may have been removed. Keys before RoPE have no kernel. Keys and values are
of one kind, for each has its scan.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from kvq_runtime.codec.kernel_order import SIGNED, KernelOrder, kernel_order
from kvq_runtime.codec.latent_order import LatentOrder, latent_order
from kvq_runtime.geometry import MATRIX_SIZES, Geometry
from kvq_runtime.kernels.attend import latent as latents
from kvq_runtime.kernels.attend import polar, rounded
from kvq_runtime.kernels.attend.arguments import (
    Latents,
    LatentSettings,
    Pages,
    PolarSettings,
    RoundedSettings,
    SlabSettings,
    TileSettings,
)  # fmt: skip
from kvq_runtime.ops import fragment, grid, latent, lloyd
from kvq_runtime.recipe import Role, Scheme

Tensors = Mapping[str, Tensor]
RUN = 32  # columns of a slot of angles, at most
WIDTHS = (7, 6, 5, 4, 3, 2, 1)  # bits of slabs of latents
_NOTHING: Tensors = {}


@dataclass(frozen=True)
class Layout:
    """The kernel's way to read one scheme's blocks.

    geometry   of the model, and `block`, the tokens of a block
    scan       the loop over blocks: that of rounded.py, polar.py or latent.py
    scores     the function that scores keys, in rounded.py; else None
    settings   of both, see arguments.py
    names      the fields, in the order of their addresses in the block table
    order      of the codes in slabs; None: they lie as they are encoded
    lookup     the codebooks of angles, see `_lookup`; `Latents`; or None
    rotation   of a head, float16 [D, D]: x̂ = what is read · rotation; of values' latents [H, D, D]; or None
    addresses  of the blocks: their block table, int64 [slabs, 1 + fields]; or the pages of an engine's cache
    mean       what was removed from each channel, of keys before RoPE, float32 [C], or None
    """

    geometry: Geometry
    block: int
    scan: Any
    scores: Any
    settings: RoundedSettings | PolarSettings | LatentSettings
    names: tuple[str, ...]
    order: KernelOrder | LatentOrder | None = None
    lookup: Tensor | Latents | None = None
    rotation: Tensor | None = None
    addresses: Tensor | Pages | None = None
    mean: Tensor | None = None

    def on(self, device: torch.device) -> "Layout":
        """Return the same with its tables on a device."""
        lookup = self.lookup
        if isinstance(lookup, Latents):
            lookup = lookup._replace(**{n: x.to(device) for n, x in lookup._asdict().items() if isinstance(x, Tensor)})
        elif lookup is not None:
            lookup = lookup.to(device)
        return replace(self, lookup=lookup, rotation=None if self.rotation is None else self.rotation.to(device))

    @property
    def tables(self) -> list[Tensor]:
        """Return the tensors of lookup and rotation."""
        lookup = self.lookup if isinstance(self.lookup, Latents) else (self.lookup,)
        return [x for x in (*lookup, self.rotation) if isinstance(x, Tensor)]


def layout(
    scheme: Scheme, block: int, geometry: Geometry, role: Role, tensors: Tensors = _NOTHING, segment: int = 0
) -> Layout | None:
    """Lay out a scheme whose codes fill bytes and whose groups are a head's, or a block's; None: no kernel.

    role      whether it stores keys, after RoPE, or values
    tensors   what was fitted for quantizer and basis; without it a layout of what is fitted has no lookup
    segment   tokens of a segment, of keys that are turned back to its middle; 0: of keys after RoPE, and values
    """
    if scheme.correct is not None or (scheme.predict is not None and scheme.predict.cross_layer):
        return None
    if scheme.quantize.takes_latents or segment:
        return _latent(scheme, block, geometry, role, tensors, segment)
    rotation = _rotation(scheme, geometry)
    if scheme.rotate is not None and (rotation is None or scheme.axis == "channel"):
        return None
    return _rounded(scheme, block, geometry, role, rotation) or _polar(scheme, block, geometry, rotation, tensors)


def padded(count: int) -> int:
    """Pad the columns of a tile to a power of two that a matrix product takes."""
    return max(16, triton.next_power_of_2(count))


def tile(slots: int, columns: int) -> TileSettings:
    return TileSettings(slots, columns, padded(columns))


def _rounded(scheme: Scheme, block: int, geometry: Geometry, role: Role, rotation: Tensor | None) -> Layout | None:
    ordered = kernel_order(scheme, block, geometry, role)
    if ordered is None or (scheme.quantize.kernel == "uniform" and scheme.quantize.range != "minmax"):
        return None
    quantize, order, tables = scheme.quantize, ordered.order, _tables(scheme, ordered)
    channel = scheme.axis == "channel"
    group, groups = (ordered.group, 1) if channel else (block, geometry.head_size // ordered.group)
    runs = tuple(
        run._replace(FIRST=run.FIRST + part * geometry.head_size // (fragment.EDGE * ordered.elements))
        for part in range(ordered.elements) for run in order.RUNS
    )  # fmt: skip
    names = ("codes", "scale") if tables else ("codes", "step", "low")
    settings = RoundedSettings(
        quantize.bits, len(names), group, groups, order.TILES, order.SUBS, order.BYTES, order.WORDS, runs,
        tables,
    )  # fmt: skip
    scores = rounded.per_channel if channel else rounded.per_token
    return Layout(geometry, block, rounded.scan, scores, settings, names, ordered, rotation=_back(rotation))


def _tables(scheme: Scheme, ordered: KernelOrder) -> tuple[tuple[int, ...], ...]:
    """The bits of a float16 for every stored code, for each element that it stands for; () where it is rounded evenly.

    Centroids of `lloyd` are rounded to bfloat16, as the stage looks them up, and so exact in float16.
    """
    quantize = scheme.quantize
    if quantize.kernel == "uniform":
        return ()
    if quantize.kernel == "lloyd":
        points = lloyd.sphere(ordered.group, quantize.bits)[1].bfloat16()[:, None]
    else:
        points = grid.points(quantize.dim, quantize.size)
    stored = torch.tensor(ordered.stored or range(len(points)))
    return tuple(tuple(part[stored.argsort()].half().view(torch.uint16).tolist()) for part in points.mT)


def _rotation(scheme: Scheme, geometry: Geometry) -> Tensor | None:
    """Return the rotation of a whole head, float32 [D, D]; None where it is fitted, or is none of a head."""
    if scheme.rotate is None or scheme.rotate.fitted:
        return None
    matrix = scheme.rotate.matrix(geometry.width, geometry)
    if geometry.head_size % len(matrix):
        return None
    return torch.block_diag(*[matrix] * (geometry.head_size // len(matrix)))


def _latent(
    scheme: Scheme, block: int, geometry: Geometry, role: Role, tensors: Tensors, segment: int
) -> Layout | None:
    """Lay out latents by head, of keys by segment of at least 16 tokens."""
    order = latent_order(scheme, block, geometry, role) if scheme.quantize.takes_latents else None
    if order is None or (tensors and not order.runs) or segment % fragment.EDGE or (role == "key") != (segment > 0):
        return None
    quantize: Any = scheme.quantize
    names = ("codes", "gain") if quantize.gain else ("codes",)
    settings = LatentSettings(len(names), quantize.gain, segment, tuple(_slab(bits) for bits in WIDTHS))
    lookup = rotation = None
    if tensors:
        counts = {bits: slabs for slabs, bits in order.runs}
        each = [sum(counts.values()), *(counts.get(bits, 0) for bits in WIDTHS)]
        slabs = torch.tensor(each, dtype=torch.uint8).view(torch.int64)
        gains = _gains(tensors["gain_ends"], quantize.gain, order.heads) if quantize.gain else None
        basis_HRD = _scaled(order, tensors["dual" if "dual" in tensors else "basis"], quantize.scale(tensors))
        lookup = Latents(slabs, gains, basis_HRD.half() if role == "key" else None)
        if role == "value":
            rest = geometry.head_size - basis_HRD.shape[1]
            rotation = torch.nn.functional.pad(basis_HRD, (0, 0, 0, rest)).half()
    return Layout(geometry, block, latents.scan, None, settings, names, order, lookup, rotation)


def _slab(bits: int) -> SlabSettings:
    """How a slab of this width is read: of up to four bits with a table, the points as they are stored."""
    order, table = fragment.slab_order(bits), ()
    if bits < latent.STEPPED:
        points = latent.gaussian(bits)[1][torch.tensor(SIGNED[bits] or range(2**bits)).argsort()]
        table = (tuple(points.half().view(torch.uint16).tolist()),)
    return SlabSettings(bits, order.BYTES, order.WORDS, order.RUNS, table)


def _scaled(order: LatentOrder, dual_HDR: Tensor, deviation_R: Tensor) -> Tensor:
    """Return the dual basis times deviations and the steps of even points: what points are multiplied with, float32
    [H, R, D] of a head's R stored channels."""
    scale_HR = deviation_R.float().view(-1, order.heads).mT
    runs = [(fragment.EDGE * n, latent.step(bits)[0] if bits >= latent.STEPPED else 1.0) for n, bits in order.runs]
    step_R = torch.cat([scale_HR.new_full((count,), step) for count, step in runs])
    return (dual_HDR.float() * (scale_HR * step_R)[:, None]).mT.contiguous()


def _gains(ends: Tensor, bits: int, heads: int) -> Tensor:
    """Return log2 of each head's least gain, and from one gain to the next: float32 [H, 2]."""
    low, high = (ends.double().view(heads, 2) / math.log(2)).unbind(1)
    return torch.stack([low, (high - low) / (2**bits - 1)], 1).float().contiguous()


def _polar(scheme: Scheme, block: int, geometry: Geometry, rotation: Tensor | None, tensors: Tensors) -> Layout | None:
    """Lay out the paper's angles, of 4 bits and of 2 in the levels above, and 16-bit radii, of whole heads."""
    quantize: Any = scheme.quantize
    size = geometry.head_size
    if quantize.kernel != "polar" or size not in MATRIX_SIZES:
        return None
    group, bits = quantize.sizes(geometry.width, geometry)
    if group != size or len(bits) < 2 or bits != (4,) + (2,) * (len(bits) - 1):
        return None
    mirrored = not quantize.fitted
    known = bool(tensors) or mirrored
    lookup = _lookup(quantize.points_of(bits, tensors, torch.device("cpu")), mirrored) if known else None
    columns = min(RUN, size)
    settings = PolarSettings(*tile(size // columns, columns), len(bits), int(mirrored))
    pairs = torch.arange(size).view(2, -1).mT.flatten()  # read in pairs of a head's two halves
    turned = (torch.eye(size, dtype=torch.float32) if rotation is None else rotation)[:, pairs].contiguous()
    return Layout(geometry, block, polar.scan, None, settings, ("codes", "radius"), None, lookup, _back(turned))


def _back(rotation: Tensor | None) -> Tensor | None:
    """Return what undoes a rotation of rows, float16, as kernels read it."""
    return None if rotation is None else rotation.mT.half().contiguous()


def _lookup(points: list[Tensor], mirrored: bool) -> Tensor:
    """Return the points [codes, 2] of each level times √2, in int64 words of eight bytes; the lowest level comes last.

    A level of four codes is cos, then sin, each four float16. The lowest is, of each eight codes, the low bytes of cos,
    the high ones, the low ones of sin, and the high ones; of one that is mirrored the first eight codes alone.
    """
    scaled = [(level.double() * 2**0.5).half().mT.contiguous() for level in points]
    lowest = scaled[0][:, : 8 if mirrored else 16].contiguous().view(torch.uint8).view(2, -1, 8, 2)
    words = [level.view(torch.int64) for level in scaled[1:]]
    words.append(lowest.permute(1, 0, 3, 2).contiguous().view(torch.int64))
    return torch.cat([word.flatten() for word in words])
