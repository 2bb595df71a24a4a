"""Encode latents with gains, factors of a token's latents, G of a token, each of some channels; choose and decode them.

Letters: N blocks · R channels · T tokens of a block · G gains of a token · L levels of a gain
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from kvq_runtime.ops import latent, pack
from kvq_runtime.ops.dispatch import paired


@paired("latent.encode")
def encode(
    z_NRT: Tensor,
    deviation_R: Tensor,
    runs: Sequence[tuple[int, int]],
    ends_G2: Tensor | None,
    bits: int,
    index_R: Tensor,
    steps: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return codes of latents, packed along T, channel by channel, uint8 [N, bytes]; and of the best gains [N, G, T].

    runs      (channels, bits of their codes), of R channels in all
    ends_G2   as in `best`, and what follows; None: tokens have no gains
    """
    parts = [(part, width, deviation_R[part]) for part, width in places(runs)]
    codes_NGT = None
    if ends_G2 is not None:
        codes_NGT = best(z_NRT, parts, ends_G2, bits, index_R, steps)
        z_NRT = z_NRT / of_channels(codes_NGT, ends_G2, bits, index_R)
    packed = [
        pack.pack(latent.encode_points(z_NRT[:, part], scale_R, width, steps), width).flatten(1)
        for part, width, scale_R in parts
    ]
    return torch.cat(packed, 1), codes_NGT


def places(runs: Sequence[tuple[int, int]]) -> Iterator[tuple[slice, int]]:
    """Return which channels each run has, and the bits of their codes."""
    start = 0
    for count, bits in runs:
        yield slice(start, start + count), bits
        start += count


def best(
    z_NRT: Tensor, parts: Iterable[tuple[slice, int, Tensor]], ends_G2: Tensor, bits: int, index_R: Tensor, steps: bool
) -> Tensor:
    """Return the codes of the gains that leave latents [N, R, T] the least error, uint8 [N, G, T].

    parts     some channels, the bits of their codes, and their deviations
    ends_G2   logarithms of the least and the largest gain, of so many `bits`
    index_R   which of the gains each channel has
    steps     whether codes of many bits are of even steps, as in `latent.errors_with_gains`
    """
    levels = [latent.gains(ends_2, bits) for ends_2 in ends_G2]
    error_GLNT = z_NRT.new_zeros(len(levels), 2**bits, len(z_NRT), z_NRT.shape[-1])
    for part, width, deviation_R in parts:
        for group, level_L in enumerate(levels):
            scale_R, z_NrT = deviation_R, z_NRT[:, part]
            if len(levels) > 1:
                own = (index_R[part] == group).nonzero()[:, 0]
                scale_R, z_NrT = scale_R[own], z_NrT[:, own]
            error_GLNT[group] += latent.errors_with_gains(z_NrT, scale_R, width, level_L, steps)
    return error_GLNT.argmin(1).to(torch.uint8).transpose(0, 1).contiguous()


def of_channels(codes_NGT: Tensor, ends_G2: Tensor, bits: int, index_R: Tensor) -> Tensor:
    """Return the gains of channels, float32 [N, R, T], from their codes; `best` says what is what."""
    pairs = zip(ends_G2, codes_NGT.long().unbind(1), strict=True)
    gains = [latent.gains(ends_2, bits)[codes_NT] for ends_2, codes_NT in pairs]
    if len(gains) == 1:
        return gains[0][:, None].expand(-1, len(index_R), -1)
    return torch.stack(gains, 1)[:, index_R.to(codes_NGT.device)]
