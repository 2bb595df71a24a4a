"""Round latent channels, those of a basis, each in as many bits as it is worth: SVDq's and aqua-fisher's quantizer."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import latent, pack, token_gain, trellis
from kvq_runtime.ops.rotation import Rotation, rotate
from kvq_runtime.stages.stage import NOTHING, Fields, Quantizer, Site, Specs, Tensors

# What errors cost with paths that weigh tokens, of what they cost with others, by which bits are shared out: by
# SmolLM2's gradients 0.80 to 0.87 (two sequences, 2 bits), of Gaussian channels 0.77 to 0.83 if ln w deviates by 0.8.
WEIGHED = 0.8


def flat(scale: Tensor) -> Tensor:
    """Return numbers of stored channels, [R], from those by head, [H, R / H], or as they are."""
    return scale if scale.ndim == 1 else scale.mT.flatten()


@dataclass(frozen=True)
class Mixed(Quantizer):
    """Round latent channels of run i, `counts[i]` of them, to `bits[i]` bits.

    bits       of each run, falling, 0 to 8
    counts     channels of each run, all channels of a token in all; empty: runs of one length, or as `target` says
    target     bits per element, the gain's among them, that the fit finds `counts` for, by reverse water-filling on the
               eigenvalues; `bits` are then k, k-1, ..., 0. Before the fit, all channels have bits as equal as whole
               numbers allow. 0: `bits` and `counts` are what they are
    codebook   "gaussian": Lloyd–Max with the channel's calibrated deviation · "stepped": the same of at most 4 bits,
               above them even steps, which a kernel computes · "trellis": the same deviation, and of at most 5 bits the
               best path through a trellis along a block's tokens · "uniform": rounding between calibrated ends
    gain       bits of a token's gain, between calibrated ends, 0 to 8; 0: none
    gains      gains of a token, each of as many neighbouring slabs of channels; "head": one of each head, of a basis by
               head
    slab       channels of which every run has a multiple, of each head where the basis is by head
    shared     the targets of all schemes that say so are one budget, which calibration shares out among layers, keys
               and values; what is fitted has a target of its own
    weighed    of a trellis: paths are those of the least error in what matters. A token's error counts as much as its
               own key, or value, says (`ops/latent.importance`), by a direction that calibration fits to gradients

    Latent channels come in the order of their eigenvalues, so a schedule is a list of runs: so many channels of so many
    bits. Channels of 0 bits are not stored, and their columns are not in the basis. Codes are packed along the tokens
    of a block, channel by channel, so that a run may have any number of channels and no bit is lost to padding.

    With `gain` bits, every token has a factor of its own, on a log scale: z ≈ g ẑ, ẑ from codes of z / g. Channels keep
    the calibrated proportions of their scales; a token's own gain says how large it is as a whole, so that text of
    another kind than the calibration's, and outliers, are rounded in cells of their own size. A token costs `gain` bits
    more. All gains are tried, and the one with the least error in the latents is taken.

    What is decoded does not depend on `weighed`: it says which of the paths is searched for. All tokens have as many
    bits, but a path gives those that count more of its freedom.

    Source: Hong et al., 2025 (SVDq), equations 2, 3 and 6 and algorithm 1.
    Differs: ranges are calibrated, so that tokens of the decode phase are encoded too (theirs are of the whole prompt,
    and later tokens stay in 16 bit). The gain is not theirs: shape-gain quantization is Buzo et al., 1980; Gersho and
    Gray, 1992, section 12.10.
    """

    kind: ClassVar[str] = "mixed"
    optional: ClassVar[tuple[str, ...]] = ("gains", "slab")
    fitted: ClassVar[bool] = True
    takes_latents: ClassVar[bool] = True
    reads_tokens: ClassVar[bool] = True
    bits: tuple[int, ...] = (7, 6, 5, 4, 3, 2, 1, 0)
    counts: tuple[int, ...] = ()
    target: float = 0.0
    codebook: Literal["gaussian", "stepped", "uniform", "trellis"] = "gaussian"
    gain: int = 0
    gains: int | Literal["head"] = 1
    slab: int = 1
    shared: bool = False
    weighed: bool = False

    def __post_init__(self):
        super().__post_init__()
        for name in ("bits", "counts"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        falling = list(self.bits) == sorted(self.bits, reverse=True)
        if not self.bits or not falling or self.bits[0] == 0 or any(not 0 <= b <= latent.MAX_BITS for b in self.bits):
            raise ValueError(f"bits={list(self.bits)}; use falling numbers from {latent.MAX_BITS} to 0, not only 0")
        if self.counts and (len(self.counts) != len(self.bits) or min(self.counts) < 0):
            raise ValueError(f"counts={list(self.counts)}; give one for each of bits={list(self.bits)}, at least 0")
        if not 0 <= self.target <= self.bits[0]:
            raise ValueError(f"target={self.target}; use at least 0 and at most the {self.bits[0]} of the first run")
        if not 0 <= self.gain <= 8:
            raise ValueError(f"gain={self.gain}; use 0 to 8 bits a token")
        if self.gains != "head" and not 1 <= self.gains <= 64:
            raise ValueError(f'gains={self.gains}; use 1 to 64, or "head"')
        if not 1 <= self.slab <= 1024:
            raise ValueError(f"slab={self.slab}; use 1 to 1024 channels")
        if self.gain and self.codebook == "uniform":
            raise ValueError(f'gain={self.gain} with codebook "uniform"; use "gaussian", "stepped" or "trellis"')
        if self.weighed and self.codebook != "trellis":
            raise ValueError(f'weighed=True with codebook "{self.codebook}"; only paths, "trellis", weigh tokens')
        if self.shared and not self.target:
            raise ValueError("shared=True, but there is no target to share; give one")
        if self.target and self.bits != tuple(range(self.bits[0], -1, -1)):
            raise ValueError(f"bits={list(self.bits)}; with a target use all of {self.bits[0]}, ..., 1, 0")

    def runs(self, width: int) -> list[tuple[int, int]]:
        """(channels, bits) of the runs that are stored, out of `width` channels."""
        counts = self.counts or (self._even(width) if self.target else self._equal(width))
        if sum(counts) != width:
            raise ValueError(f"counts={list(counts)} are {sum(counts)} channels; a token has {width}")
        runs = [(count, bits) for count, bits in zip(counts, self.bits, strict=True) if count and bits]
        if not runs:
            raise ValueError(f"target={self.target} stores nothing of {width} channels; use more")
        return runs

    def _equal(self, width: int) -> tuple[int, ...]:
        if width % len(self.bits):
            raise ValueError(f"{len(self.bits)} runs of one length do not divide {width} channels; give counts")
        return (width // len(self.bits),) * len(self.bits)

    def _even(self, width: int) -> tuple[int, ...]:
        low, more = divmod(max(self.budget(width), 0), width)
        return tuple({low + 1: more, low: width - more}.get(bits, 0) for bits in self.bits)

    def budget(self, width: int, heads: int = 1) -> int:
        """Bits of one token's codes that `target` allows."""
        return round(self.target * width) - self.gain * self.gain_count(heads)

    def gain_count(self, heads: int) -> int:
        """Return the number of gains of a token, of so many heads."""
        return heads if self.gains == "head" else self.gains

    def gain_index(self, stored: int, gains: int) -> Tensor:
        """Return which of a token's gains each stored channel has, int64 [R]."""
        channel_R = torch.arange(stored)
        if self.gains == "head":
            return channel_R % gains
        return channel_R // self.slab * gains // max(stored // self.slab, 1)

    def stored(self, width: int) -> int:
        """R: how many latent channels have any bits."""
        return sum(count for count, _ in self.runs(width))

    def tensors(self, site: Site, geometry: Geometry) -> Specs:
        """The scales of the stored channels; logarithms of the least and the largest gain; what tells importance."""
        names = ("low", "high") if self.codebook == "uniform" else ("deviation",)
        stored, heads = self.stored(geometry.width), geometry.kv_heads
        shape = (heads, stored // heads) if self.gains == "head" else (stored,)  # so that workers share heads out
        specs: Specs = {name: (shape, torch.float32) for name in names}
        gains = self.gain_count(geometry.kv_heads)
        specs |= {"gain_ends": ((2,) if self.gains == 1 else (gains, 2), torch.float32)} if self.gain else {}
        return specs | ({"importance": ((geometry.width,), torch.float32)} if self.weighed else {})

    def check(self, site: Site) -> None:
        if site.scheme.axis != "token" or site.window.block % 8:
            raise ValueError('mixed bits need axis "token" and a block of a multiple of 8 tokens')
        if self.weighed and (site.scheme.predict is None or site.scheme.correct is not None):
            raise ValueError("weighed=True needs a prediction, if only of the mean, and no correction; set it to false")
        if (self.gains == "head") != (getattr(site.scheme.rotate, "group", "all") == "head") and self.gain:
            raise ValueError(
                'gains of each head and a basis of each head belong together; use group="head" and gains="head"'
            )
        if site.geometry is not None and self.target and not self.counts:
            unit = self.unit(site.scheme, site.geometry)
            if site.geometry.width % unit:
                raise ValueError(
                    f"slab={self.slab} asks for runs of {unit} channels, which do not divide a token's "
                    f"{site.geometry.width}; use a divisor"
                )
        super().check(site)

    def unit(self, scheme: Any, geometry: Geometry) -> int:
        """Return the number of channels that get bits together."""
        return self.slab * (geometry.kv_heads if getattr(scheme.rotate, "group", "all") == "head" else 1)

    def check_prompt_fit(self) -> None:
        if self.target:
            raise ValueError(f"target={self.target} would differ by row; fitted to the prompt give counts")
        if self.weighed:
            raise ValueError("weighed=True takes gradients, which a prompt has not; fit it by a calibration")

    def fields(self, rows: int, width: int, geometry: Geometry, dtype: torch.dtype):
        """Names, shapes and dtypes of what one block [rows, width] is stored as."""
        size = sum(count * pack.packed_size(rows, bits) for count, bits in self.runs(width))
        fields: Specs = {"codes": ((size,), torch.uint8)}
        if self.gain:
            gains, size = self.gain_count(geometry.kv_heads), pack.packed_size(rows, self.gain)
            fields["gain"] = ((size,) if self.gains == 1 else (gains, size), torch.uint8)
        return fields

    def encode(
        self,
        x_NTC: Tensor,
        rotation: Rotation,
        tensors: Tensors,
        geometry: Geometry,
        level_NT: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Rotate rows of any float dtype to R latent channels, by a basis [C, R], and encode those channel by channel.

        level_NT   how much errors of tokens count, of `importance`; None: alike
        """
        z_NRT = rotate(x_NTC, rotation).mT.contiguous()
        if self.codebook in ("gaussian", "stepped"):
            ends_G2 = tensors["gain_ends"].view(-1, 2) if self.gain else None
            gains = self.gain_count(geometry.kv_heads) if self.gain else 1
            index_R = self.gain_index(self.stored(geometry.width), gains)
            runs, scale_R, steps = self.runs(geometry.width), self.scale(tensors), self.codebook == "stepped"
            packed, codes_NGT = token_gain.encode(z_NRT, scale_R, runs, ends_G2, self.gain, index_R, steps)
        else:
            z_NRT, codes_NGT, gain_NRT = self._over_gains(z_NRT, tensors, geometry)
            scale_NRT = self._scales(gain_NRT, level_NT, geometry.width)
            parts = []
            for part, bits, scales in self._parts(geometry.width, tensors):
                scale = None if scale_NRT is None else scale_NRT[:, part]
                parts.append(pack.pack(self._codes(z_NRT[:, part], scales, bits, scale), bits).flatten(1))
            packed = torch.cat(parts, 1)
        stored = {}
        if codes_NGT is not None:
            gains = pack.pack(codes_NGT, self.gain)
            stored["gain"] = gains[:, 0] if self.gains == 1 else gains
        return {"codes": packed} | stored

    def decode(
        self, fields: Fields, width: int, geometry: Geometry, tensors: Tensors = NOTHING, out: Tensor | None = None
    ) -> Tensor:
        """Decode to bfloat16 [N, T, R]; blocks have a multiple of 8 tokens."""
        packed = fields["codes"]
        rows = 8 * packed.shape[1] // sum(count * bits for count, bits in self.runs(width))
        gain_NRT = None
        if self.gain:
            gains = fields["gain"][:, None] if self.gains == 1 else fields["gain"]
            gain_NRT = self.gains_of(pack.unpack(gains, self.gain, rows), tensors, width)
        values, start = [], 0
        for part, bits, scales in self._parts(width, tensors):
            count = part.stop - part.start
            stop = start + count * pack.packed_size(rows, bits)
            codes_NRT = pack.unpack(packed[:, start:stop].unflatten(1, (count, -1)), bits, rows)
            values_NRT = self._values(codes_NRT, scales, bits)
            values.append((values_NRT if gain_NRT is None else gain_NRT[:, part] * values_NRT).bfloat16())
            start = stop
        return torch.cat(values, 1).mT

    def scale(self, tensors: Tensors) -> Tensor:
        """Return the deviation of each stored channel, float32 [R]."""
        return flat(tensors["deviation"])

    def at(
        self, fields: Fields, block_N: Tensor, token_N: Tensor, block: int, geometry: Geometry, tensors: Tensors
    ) -> Tensor:
        """Decode single tokens to bfloat16 [N, R]; codes are stored by channel, so each is read alone."""
        packed, start, values = fields["codes"].flatten(), block_N[:, None] * fields["codes"].shape[1], []
        gain_NR = None
        if self.gain:
            gains = fields["gain"].flatten(1)
            first = gains.shape[1] * block_N[:, None] + torch.arange(
                0, gains.shape[1], pack.packed_size(block, self.gain), device=gains.device
            )
            codes_NG = pack.pick(gains.flatten(), first, token_N[:, None], self.gain, block)
            gain_NR = self.gains_of(codes_NG[..., None], tensors, geometry.width)[..., 0]
        for part, bits, scales in self._parts(geometry.width, tensors):
            size, count = pack.packed_size(block, bits), part.stop - part.start
            first = start + size * torch.arange(count, device=packed.device)
            codes = [self._picked(packed, first, token_N - past, bits, block) for past in self._past(bits)]
            values_NR = self._values(torch.stack(codes, -1), scales, bits)[..., -1]
            values.append((values_NR if gain_NR is None else gain_NR[:, part] * values_NR).bfloat16())
            start = start + count * size
        return torch.cat(values, 1)

    def approximated(
        self, x_NRW: Tensor, rotation: Rotation, tensors: Tensors, geometry: Geometry, level_NT: Tensor | None = None
    ) -> Tensor:
        """Approximate what codes decode to, bfloat16 [N, T, R]: `latent.like_path` in place of paths of 2 bits or more.

        Paths of one bit are searched: a search of few steps is cheap, and `like` supposes Gaussian channels. On
        SmolLM2-135M half a bit fitted to it diverged by 0.137 nats, fitted to paths by 0.125. Of 2 bits and more, paths
        that weigh tokens leave more squared error than this, about a third, of tokens that count less.
        """
        z_NRT, _, gain_NRT = self._over_gains(rotate(x_NRW, rotation).mT.contiguous(), tensors, geometry)
        scale_NRT = self._scales(gain_NRT, level_NT, geometry.width)
        values = []
        for part, bits, scales in self._parts(geometry.width, tensors):
            if not self._in_paths(bits):
                values.append(self._values(self._codes(z_NRT[:, part], scales, bits), scales, bits))
            elif bits > 1:
                values.append(latent.like_path(z_NRT[:, part], scales["deviation"], bits))
            else:
                scale = None if scale_NRT is None else scale_NRT[:, part]
                values.append(trellis.on_path(z_NRT[:, part], scales["deviation"], bits, scale))
        values_NRT = torch.cat(values, 1)
        return (values_NRT if gain_NRT is None else gain_NRT * values_NRT).bfloat16().mT

    def _over_gains(
        self, z_NRT: Tensor, tensors: Tensors, geometry: Geometry
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return latents over their gains, codes of gains [N, G, T], and gains [N, R, T]; None: there are none."""
        if not self.gain:
            return z_NRT, None, None
        codes_NGT = self.best_gain(z_NRT, tensors, geometry.width)
        gain_NRT = self.gains_of(codes_NGT, tensors, geometry.width)
        return z_NRT / gain_NRT, codes_NGT, gain_NRT

    def _scales(self, gain_NRT: Tensor | None, level_NT: Tensor | None, width: int) -> Tensor | None:
        """Return the factors of latents' errors, as tokens count: [N, R, T]; None: 1."""
        if level_NT is None:
            return gain_NRT
        scale_N1T = latent.token_scale(level_NT)[:, None]
        return scale_N1T.expand(-1, self.stored(width), -1) if gain_NRT is None else scale_N1T * gain_NRT

    def _past(self, bits: int) -> range:
        """Return how far back the codes are that a token is decoded from, the farthest first."""
        return range(trellis.history(bits) - 1 if self._in_paths(bits) else 0, -1, -1)

    def _picked(self, packed: Tensor, first: Tensor, token_N: Tensor, bits: int, block: int) -> Tensor:
        """Codes [N, R] of single tokens; before a block stand zeros."""
        codes_NR = pack.pick(packed, first, token_N.clamp_min(0)[:, None], bits, block)
        return codes_NR.masked_fill((token_N < 0)[:, None], 0)

    def _in_paths(self, bits: int) -> bool:
        return self.codebook == "trellis" and bits <= trellis.BITS

    def _in_steps(self, bits: int) -> bool:
        return self.codebook == "stepped" and bits >= latent.STEPPED

    def distortions(self) -> list[float]:
        """Return what the errors of 0, 1, ... bits cost, of a Gaussian channel of unit variance."""
        costs = [latent.distortion(bits) for bits in range(self.bits[0] + 1)]
        if self.codebook == "stepped":
            costs[latent.STEPPED :] = [latent.step(bits)[1] for bits in range(latent.STEPPED, self.bits[0] + 1)]
        if self.codebook == "trellis":
            costs[1 : trellis.BITS + 1] = list(trellis.DISTORTIONS.values())[: self.bits[0]]
        if self.weighed:
            costs[1 : trellis.BITS + 1] = [WEIGHED * cost for cost in costs[1 : trellis.BITS + 1]]
        return costs

    def best_gain(self, z_NRT: Tensor, tensors: Tensors, width: int) -> Tensor:
        """Return the codes of the gains that leave latents [N, R, T] the least error, uint8 [N, G, T].

        Of a trellis the error is taken to be that of Lloyd–Max codes: a path is searched once, for the gains chosen.
        """
        ends_G2, steps = tensors["gain_ends"].view(-1, 2), self.codebook == "stepped"
        index_R = self.gain_index(self.stored(width), len(ends_G2)).to(z_NRT.device)
        parts = ((part, bits, scales["deviation"]) for part, bits, scales in self._parts(width, tensors))
        return token_gain.best(z_NRT, parts, ends_G2, self.gain, index_R, steps)

    def gains_of(self, codes_NGT: Tensor, tensors: Tensors, width: int) -> Tensor:
        """Return the gains of stored channels, float32 [N, R, T], from their codes."""
        index_R = self.gain_index(self.stored(width), codes_NGT.shape[1])
        return token_gain.of_channels(codes_NGT, tensors["gain_ends"].view(-1, 2), self.gain, index_R)

    def _parts(self, width: int, tensors: Tensors) -> Iterator[tuple[slice, int, dict[str, Tensor]]]:
        """Return the channels of each run, their bits, and what scales them."""
        scales = {name: flat(tensors[name]) for name in ("low", "high", "deviation") if name in tensors}
        for part, bits in token_gain.places(self.runs(width)):
            yield part, bits, {name: scale[part] for name, scale in scales.items()}

    def _codes(self, z_NRT: Tensor, scales: Tensors, bits: int, scale_NRT: Tensor | None = None) -> Tensor:
        if self._in_paths(bits):
            return trellis.encode_path(z_NRT, scales["deviation"], bits, scale_NRT)
        if self.codebook != "uniform":
            return latent.encode_points(z_NRT, scales["deviation"], bits, self.codebook == "stepped")
        return latent.encode_uniform(z_NRT, scales["low"], scales["high"], bits)

    def _values(self, codes_NRT: Tensor, scales: Tensors, bits: int) -> Tensor:
        if self._in_paths(bits):
            return trellis.decode_path(codes_NRT, scales["deviation"], bits)
        if self._in_steps(bits):
            return latent.decode_steps(codes_NRT, scales["deviation"], bits)
        if self.codebook != "uniform":
            return latent.decode_gaussian(codes_NRT, scales["deviation"], bits)
        return latent.decode_uniform(codes_NRT, scales["low"], scales["high"], bits)
