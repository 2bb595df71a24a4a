"""Choose how the kernel reads one scheme of a layer: reader, its settings and its tables; None where none reads it.

The kernel takes groups of one head, or of a part of it where codes are ordered, and groups of one channel in a block;
anything else is decoded first. A mean may have been removed, whatever the codes. Keys and values are both ordered, or
neither is: the two kinds lie differently.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from kvq_runtime.codec.kernel_order import KernelOrder, kernel_order
from kvq_runtime.geometry import MATRIX_SIZES, Geometry
from kvq_runtime.kernels.attend import per_token, read_polar, rounded
from kvq_runtime.kernels.attend.settings import (
    LevelSettings,
    PolarSettings,
    RoundedSettings,
    Settings,
    TileSettings,
)
from kvq_runtime.ops import fragment, grid, lloyd, pack, polar
from kvq_runtime.recipe import Role, Scheme
from kvq_runtime.stages.polar import Polar

Tensors = Mapping[str, Tensor]
RUN = 32  # columns of a slot of angles, at most
_NOTHING: Tensors = {}


@dataclass(frozen=True)
class Layout:
    """The kernel's way to read one scheme.

    geometry   of the model, and `block`, the tokens of a block
    bits       of a code, or of an index that is several; of angles, of the lowest level's
    scan       the loop over blocks: that of rounded.py or of per_token.py
    read       the function that scores keys, in rounded.py, or reads a tile of tokens, see per_token.py
    settings   of both, see settings.py
    names      the fields, in the order of their addresses in the block table
    lookup     the codebook in the form `read` takes, or None
    rotation   of a head, float32 [D, D]: x̂ = what is read · rotationᵀ; or None
    mean       whether a mean was removed, which x̂ lacks

    What a launch depends on (launch.py):

    order               how slabs order the codes for it: codec/kernel_order.py; None: as they are encoded
    pre_rope            keys are stored before RoPE
    """

    geometry: Geometry
    block: int
    bits: int
    scan: Any
    read: Any
    settings: Settings
    names: tuple[str, ...]
    lookup: Tensor | None = None
    rotation: Tensor | None = None
    mean: bool = False
    order: KernelOrder | None = None
    pre_rope: bool = False

    @property
    def rounded(self) -> bool:
        """True if codes are stored as the tensor core reads them: rounded ones, or indices into registers."""
        return self.order is not None

    @property
    def reads(self) -> str:
        """Say what a step reads, and what should bind it."""
        if self.order is not None and not self.settings.TABLES:
            return "codes in operand order, by arithmetic; memory bandwidth or latency binds"
        if self.order is not None:
            return "codes in operand order, by a codebook in registers; integer instructions bind"
        return "angles by cos and sin in registers; integer instructions or latency bind"


def layout(
    scheme: Scheme, block: int, geometry: Geometry, role: Role, position: str = "post", tensors: Tensors = _NOTHING
) -> Layout | None:
    """The layout of a scheme whose codes fill bytes and whose groups are a head's, or a block's; None: no kernel.

    role      whether it stores keys or values
    position  of keys, whether they are stored before or after RoPE: the recipe's, "pre" or "post"
    tensors   what was fitted for the quantizer; without it a fitted codebook's layout has no lookup
    """
    if scheme.correct is not None:
        return None
    if scheme.predict is not None and not scheme.predict.cross_layer:
        bare = layout(replace(scheme, predict=None), block, geometry, role, position, tensors)
        return bare and replace(bare, mean=True)
    if scheme.predict is not None:
        return None
    rotation = _rotation(scheme, geometry)
    if scheme.rotate is not None and (rotation is None or scheme.axis == "channel"):
        return None
    ordered = _rounded(scheme, block, geometry, role, role == "key" and position == "pre", rotation)
    if ordered is not None:
        return ordered
    size = geometry.head_size
    after_rope = role == "value" or position == "post"
    if (
        scheme.quantize.kernel != "polar"
        or not after_rope
        or scheme.quantize.group_size(geometry.width, geometry) != size
    ):
        return None
    bare = _polar(scheme, block, geometry, tensors)
    return bare and replace(bare, rotation=_by_pairs(rotation, size))


def _by_pairs(rotation: Tensor | None, size: int) -> Tensor:
    """The rotation of what is read in pairs of a head's two halves."""
    order = torch.arange(size).view(2, -1).mT.flatten()
    return (torch.eye(size, dtype=torch.float32) if rotation is None else rotation)[:, order].contiguous()


def padded(count: int) -> int:
    """Return the padded columns of a tile: a power of two that a matrix product takes."""
    return max(16, triton.next_power_of_2(count))


def tile(slots: int, columns: int) -> TileSettings:
    return TileSettings(slots, columns, padded(columns))


def _rounded(
    scheme: Scheme, block: int, geometry: Geometry, role: Role, pairs: bool, rotation: Tensor | None
) -> Layout | None:
    found = kernel_order(scheme, block, geometry, role, pairs)
    if found is None:
        return None
    quantize, order, tables = scheme.quantize, found.order, _tables(scheme, found)
    channel = scheme.axis == "channel"
    if pairs and not channel:
        return None
    low = int(not tables and quantize.range == "minmax")
    group, groups = (found.group, 1) if channel else (block, geometry.head_size // found.group)
    runs = tuple(
        run._replace(FIRST=run.FIRST + part * geometry.head_size // (fragment.EDGE * found.elements))
        for part in range(found.elements) for run in order.RUNS
    )  # fmt: skip
    settings = RoundedSettings(
        quantize.bits, low, group, groups, int(pairs), order.TILES, order.SUBS, order.BYTES, order.WORDS, runs, tables
    )
    score = rounded.before_rope if pairs else rounded.per_channel if channel else rounded.per_token
    names = ("codes", "scale") if tables else ("codes", "step", "low")[: 2 + low]
    return Layout(
        geometry, block, quantize.bits, rounded.scan, score, settings, names,
        rotation=rotation, order=found, pre_rope=pairs,
    )  # fmt: skip


def _tables(scheme: Scheme, found: KernelOrder) -> tuple[tuple[int, ...], ...]:
    """The bits of a float16 for every stored code, for each element that it stands for; () where it is rounded evenly.

    Centroids of `lloyd` are rounded to bfloat16, as the stage looks them up, and so exact in float16.
    """
    quantize = scheme.quantize
    if quantize.kernel == "uniform":
        return ()
    if quantize.kernel == "lloyd":
        points = lloyd.sphere(found.group, quantize.bits)[1].bfloat16()[:, None]
    else:
        points = grid.points(quantize.dim, quantize.size)
    stored = torch.tensor(found.stored or range(len(points)))
    return tuple(tuple(part[stored.argsort()].half().view(torch.uint16).tolist()) for part in points.mT)


def _rotation(scheme: Scheme, geometry: Geometry) -> Tensor | None:
    """The rotation of a whole head, if it is one."""
    if scheme.rotate is None or scheme.rotate.fitted:
        return None
    matrix = scheme.rotate.matrix(geometry.width, geometry)
    if geometry.head_size % len(matrix):
        return None
    return torch.block_diag(*[matrix] * (geometry.head_size // len(matrix)))


def _polar(scheme: Scheme, block: int, geometry: Geometry, tensors: Tensors = _NOTHING) -> Layout | None:
    """Heads of other sizes than matrices have would take more registers in pairs than there are: they are decoded."""
    quantize: Polar = scheme.quantize
    size, bits = quantize.sizes(geometry.width, geometry)
    if size not in MATRIX_SIZES:
        return None
    known = bool(tensors) or not quantize.fitted
    points = quantize.points_of(bits, tensors, torch.device("cpu")) if known else None
    levels, count = _levels(size, bits)
    levels, lookup = _in_pairs(scheme, levels, points)
    each, low = min(RUN, size), int(quantize.radius == "log8")
    settings = PolarSettings(*tile(size // each, each), BYTES=count, LOG8=low, LEVELS=levels)
    return Layout(
        geometry, block, bits[0], per_token.post_rope,
        read_polar.polar_pairs, settings, ("codes", "radius", "norm")[: 2 + low], lookup,
    )  # fmt: skip


def _levels(size: int, bits: tuple[int, ...]) -> tuple[tuple[LevelSettings, ...], int]:
    """Every level, the lowest first; and the bytes of a head's codes."""
    levels, first = [], 0
    for wide, counts in polar.runs(size, bits):
        levels += [LevelSettings(wide, first, sum(counts), sum(counts[:i])) for i in range(len(counts))]
        first += pack.packed_size(sum(counts), wide)
    return tuple(levels), first


def _in_pairs(
    scheme: Scheme, levels: tuple[LevelSettings, ...], points: list[Tensor] | None
) -> tuple[tuple[LevelSettings, ...], Tensor | None]:
    """(levels, lookup) for the reader of pairs.

    A codebook of the whole circle that is not fitted is known by its first half.
    """
    words, found, kept = 0, [], []
    for i, level in enumerate(levels):
        mirrored = int(i == 0 and level.BITS > 3 and not scheme.quantize.fitted)
        found.append(level._replace(WORD=words, MIRRORED=mirrored))
        words += _entries(level.BITS - mirrored)
        kept.append(2 ** (level.BITS - mirrored))
    if points is None:
        return tuple(found), None
    return tuple(found), torch.cat([_words(table[:codes]) for table, codes in zip(points, kept, strict=True)])


def _entries(bits: int) -> int:
    """Words that the points of `bits` bits take."""
    return 2 if bits <= 2 else 2 ** (bits - 1)


def _words(points: Tensor) -> Tensor:
    """Points [codes, 2] times √2, in words of eight bytes: cos, then sin, each four float16; or, of each eight codes,
    the low bytes of cos, the high ones, the low ones of sin, and the high ones."""
    parts = (points.double() * 2**0.5).half().mT.contiguous()
    if len(points) <= 4:
        return torch.nn.functional.pad(parts, (0, 4 - len(points))).view(torch.int64).flatten()
    return parts.view(torch.uint8).view(2, -1, 8, 2).permute(1, 0, 3, 2).contiguous().view(torch.int64).flatten()
