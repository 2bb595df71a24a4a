"""Read the codes of packed latents as rows of numbers, of which products make latents.

Codes are looked up four at a time (`ops/quads.py`), so blocks lie in quarters. A code of 5 to 7 bits, whose points are
even steps, is two rows, of its low 4 and of its high bits, which count 1 and 16 steps; a gain, even steps of a
logarithm, is looked up with the codes.

X = B · n blocks · 4 quarters · Q groups, 1 or a group a head · j rows of a group · s tokens of a quarter
"""

from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import latent, pack, quads, trellis
from kvq_runtime.stages.stage import Fields, Tensors

QUARTERS = 4


class Rows(NamedTuple):
    """Rows of every group that have one gain.

    rows       their numbers
    y_Xjs      what codes stand for, float32
    gain_X1s   None: 1
    """

    rows: slice
    y_Xjs: Tensor
    gain_X1s: Tensor | None


class Part(NamedTuple):
    """The rows of a run of channels: some bits of their codes.

    bits    how many      even   whether they stand for even steps about 0, or for points of a Gaussian
    factor  what the numbers looked up count, in deviations
    """

    bits: int
    even: bool
    factor: float


class LatentCodes:
    """The codes of one codec's quantizer of latents, `Mixed`, in blocks of so many tokens.

    groups     Q
    channel_j  the channel, of a group, of each row, int64
    factor_j   what its numbers count, in the channel's deviations, float32
    """

    def __init__(self, quantize: Any, geometry: Geometry, tensors: Tensors, block: int, groups: int):
        self.quantize, self.block, self.groups = quantize, block, groups
        runs: list[tuple[int, int]] = quantize.runs(geometry.width)
        device, stored, first = tensors["deviation"].device, sum(count for count, _ in runs), 0
        self.gains = quantize.gain_count(geometry.kv_heads) // groups if quantize.gain else 0
        self._quick = self._fits(runs)
        self._runs = [(count, self._parts(bits)) for count, bits in runs]
        self._unit = block // (32 if self._quick else 8)  # of a channel, words or bytes of one bit
        self._sizes = [count * bits * self._unit for count, bits in runs]
        self._gain = Part(quantize.gain, True, 1.0)
        rows = [(-1, self._gain)] * self.gains
        for count, parts in self._runs:
            channels = range(-(-first // groups), -(-(first + count) // groups))
            rows += [(channel, part) for part in parts for channel in channels]
            first += count
        starts = [quads.start(part.bits, part.even) if self._quick else 0 for _, part in rows]
        self._start_jk = torch.tensor(starts, dtype=torch.int32, device=device)[:, None].repeat(1, block // 16)
        rows = rows[self.gains :]
        self.channel_j = torch.tensor([channel for channel, _ in rows], device=device)
        self.factor_j = torch.tensor([part.factor for _, part in rows], dtype=torch.float32, device=device)
        gain_R = quantize.gain_index(stored, self.gains).tolist() if self.gains > 1 else [0] * stored
        alike = groupby(range(len(rows)), key=lambda row: gain_R[rows[row][0]])
        ends = [(gain, [*places]) for gain, places in alike]
        self._slices = [(slice(places[0], places[-1] + 1), gain) for gain, places in ends]
        if self.gains:
            low_QG1, high_QG1 = tensors["gain_ends"].view(groups, -1, 2, 1).unbind(2)
            self._middle_QG1, self._step_QG1 = (low_QG1 + high_QG1) / 2, (high_QG1 - low_QG1) / (2**quantize.gain - 1)

    def _fits(self, runs: list[tuple[int, int]]) -> bool:
        """True if all codes can be looked up four at a time."""
        widest, codebook = runs[0][1], self.quantize.codebook
        if self.block % quads.EDGE or codebook == "trellis" or any(count % self.groups for count, _ in runs):
            return False
        most = 2 * quads.MAX_BITS - 1 if codebook == "stepped" else quads.MAX_BITS
        return widest <= most and self.quantize.gain <= quads.MAX_BITS

    def _parts(self, bits: int) -> list[Part]:
        """Return the parts of codes of so many bits, in the order in which they are packed."""
        if not self._quick or bits <= quads.MAX_BITS:
            return [Part(bits, False, 1.0)]
        step = latent.step(bits)[0]
        high = bits - quads.MAX_BITS
        return [Part(quads.MAX_BITS, True, step), Part(high, True, step * 2**quads.MAX_BITS)]

    def read(self, fields: Fields) -> list[Rows]:
        """Return the rows of blocks [B, n, ...]."""
        packed_NX, runs = self._units(fields["codes"]), list[tuple[Tensor, Part]]()
        blocks = len(packed_NX)
        if self.gains:
            runs.append((self._units(fields["gain"]).view(blocks, self.gains * self.groups, -1), self._gain))
        for run_NX, (count, parts) in zip(packed_NX.split_with_sizes(self._sizes, 1), self._runs, strict=True):
            run_NRX = run_NX.view(blocks, count, -1)
            sizes = [part.bits * self._unit for part in parts]
            runs += zip(run_NRX.split_with_sizes(sizes, 2), parts, strict=True)
        y_Xjs = self._quads(runs) if self._quick else self._points(runs)
        if not self.gains:
            return [Rows(rows, y_Xjs[:, rows], None) for rows, _ in self._slices]
        code_XGs, y_Xjs = y_Xjs.split_with_sizes([self.gains, y_Xjs.shape[1] - self.gains], 1)
        code_VQGs = code_XGs.unflatten(0, (-1, self.groups))
        gain_XGs = torch.addcmul(self._middle_QG1, code_VQGs, self._step_QG1).exp_().flatten(0, 1)
        return [Rows(rows, y_Xjs[:, rows], gain_XGs[:, gain : gain + 1]) for rows, gain in self._slices]

    def _units(self, packed: Tensor) -> Tensor:
        """Return a field [B, n, ...] as words, or bytes, of blocks, [N, X]."""
        packed_NX = packed.flatten(0, 1).flatten(1).contiguous()
        if not self._quick:
            return packed_NX
        return (packed_NX.clone() if packed_NX.storage_offset() % 4 else packed_NX).view(torch.int32)

    def _quads(self, runs: list[tuple[Tensor, Part]]) -> Tensor:
        """Return all rows, gains first, [X, j, s]."""
        lanes = quads.lanes([(words_NRX, part.bits) for words_NRX, part in runs])
        low_NQjk, high_NQjk = (self._by_group(each) for each in lanes)
        places_N4Qjk = quads.bytes_of(low_NQjk).add_(quads.bytes_of(high_NQjk), alpha=256).add_(self._start_jk)
        words = quads.table(places_N4Qjk.device).index_select(0, places_N4Qjk.view(-1))
        return words.view(torch.float32).view(-1, places_N4Qjk.shape[3], self.block // QUARTERS)

    def _by_group(self, x_NRk: Tensor) -> Tensor:
        """Return channels, which alternate between groups, group by group: [N, Q, r, k]."""
        return x_NRk.unflatten(1, (-1, self.groups)).transpose(1, 2).contiguous()

    def _points(self, runs: list[tuple[Tensor, Part]]) -> Tensor:
        """Return the same of all other codes: of runs that end amid the groups, of other blocks, paths or widths."""
        y_NRT = list[Tensor]()
        for packed_NRX, (bits, even, _) in runs:
            codes_NRT = pack.unpack(packed_NRX.contiguous(), bits, self.block)
            if even:
                y_NRT.append(codes_NRT.float() - (2**bits - 1) / 2)
            elif self.quantize.codebook == "trellis" and bits <= trellis.BITS:
                one_R = torch.ones(codes_NRT.shape[1], device=codes_NRT.device)
                y_NRT.append(trellis.decode_path(codes_NRT, one_R, bits))
            else:
                table = latent.points(bits, self.quantize.codebook == "stepped", codes_NRT.device)
                y_NRT.append(table.index_select(0, codes_NRT.flatten().int()).view(codes_NRT.shape))
        y_NjQ4s = torch.cat(y_NRT, 1).unflatten(2, (QUARTERS, -1)).unflatten(1, (-1, self.groups))
        return y_NjQ4s.permute(0, 3, 2, 1, 4).flatten(0, 2)
