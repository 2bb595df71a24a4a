"""Encode latent channels by paths through a bitshift trellis, one path along the tokens of each block and channel.

    decode   ẑ_t = σ · table[s_t],   s_t = the last 7 bits of the channel's codes up to token t, zeros before the block
    encode   the codes of least Σ_t g_t² (z_t / g_t σ - table[s_t])² of all, g a token's gain, by Viterbi's algorithm

A code has as many bits as a Lloyd–Max code and leaves 1.23 (1 bit), 1.42, 1.52, 1.44 and 1.22 times (5 bits) less
squared error of a Gaussian channel; codes of 6 bits and more are Lloyd–Max codes (`latent.py`). A search over 2^8
states instead would leave 2 to 12% less, in twice the time.

Letters: N blocks · R channels · T tokens of a block.

Source: Tseng et al., 2024 (QTIP), section 3; Marcellin and Fischer, 1990 (trellis-coded quantization).
Differs: see `trellis.py`, whose tables and search these are.
"""

import torch
from torch import Tensor

from kvq_runtime.ops import latent, trellis

MEMORY = 7  # bits that a number is decoded from
MAX_BITS = 5  # bits of a code
# Of a standard Gaussian in blocks of 128 tokens; `scripts/build_tables.py` prints them.
DISTORTIONS = {1: 0.29562, 2: 0.08264, 3: 0.02273, 4: 0.00658, 5: 0.00204}


def encode(z_NRT: Tensor, deviation_R: Tensor, bits: int, gain_NT: Tensor | None = None) -> Tensor:
    """Codes uint8 [N, R, T] of float32 channels, divided by their tokens' gains, with these deviations [R].

    bits      1 to MAX_BITS
    gain_NT   what errors of a token are multiplied with when it is decoded; None: 1
    """
    N, R, T = z_NRT.shape
    scale_R = torch.where(deviation_R > 0, 1 / deviation_R.clamp_min(torch.finfo(torch.float32).tiny), 0.0)
    rows = (z_NRT * scale_R[:, None]).reshape(N * R, T)
    values = trellis.table(bits, MEMORY).to(rows.device, torch.float32)
    if gain_NT is None:
        path = trellis.best_path(rows[:, None], rows.new_ones(N * R, 1), values, bits)
    else:  # groups of one token each
        path = trellis.best_path(rows[..., None], gain_NT.repeat_interleave(R, 0), values, bits)
    return (path & (2**bits - 1)).to(torch.uint8).view(N, R, T)


def decode(codes_NRT: Tensor, deviation_R: Tensor, bits: int) -> Tensor:
    """Decode codes [N, R, T] of whole blocks to float32; or of `history(bits)` tokens, of which the last is right."""
    codes, state = codes_NRT.int(), torch.zeros_like(codes_NRT, dtype=torch.int32)
    for past in range(min(history(bits), codes.shape[-1])):
        state[..., past:] |= codes[..., : codes.shape[-1] - past] << past * bits
    values = trellis.table(bits, MEMORY).to(codes.device, torch.float32)
    return values.index_select(0, (state & 2**MEMORY - 1).flatten()).view(codes.shape) * deviation_R[:, None]


def like(z_NRT: Tensor, deviation_R: Tensor, bits: int) -> Tensor:
    """Channels with errors of the size that paths leave, without a search: α z + β ẑ, ẑ of Lloyd–Max codes.

    Of a Gaussian z, α and β give it the variance of what paths decode to, 1 - D, and the same covariance with z: what
    is fitted to read the one reads the other as well.
    """
    left, paths = latent.distortion(bits), DISTORTIONS[bits]
    beta = (paths * (1 - paths) / left / (1 - left)) ** 0.5
    alpha = 1 - paths - beta * (1 - left)
    rounded_NRT = latent.decode_gaussian(latent.encode_gaussian(z_NRT, deviation_R, bits), deviation_R, bits)
    return rounded_NRT.mul_(beta).add_(z_NRT, alpha=alpha)


def history(bits: int) -> int:
    """Return the number of tokens, the last one among them, whose codes are in a state."""
    return -(-MEMORY // bits)
