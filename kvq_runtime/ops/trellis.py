"""Encode latent channels by paths through a bitshift trellis, one along the tokens of each block and channel.

    decode   ẑ_t = σ · table[s_t],   s_t = the last L bits of the channel's codes of k bits up to token t, zeros before
    encode   the codes of least Σ_t g_t² (z_t / g_t σ - table[s_t])² of all, g a token's gain, by Viterbi's algorithm

So 2^L values serve at k bits: a shift and a lookup decode what a vector quantizer would need a far larger codebook
for. The search begins in state 0 and is exact in one pass; only the first L/k tokens of a block choose among fewer
values. A path leaves 1.23 (1 bit), 1.42, 1.52, 1.44 and 1.22 times (5 bits) less squared error than Lloyd–Max codes. A
search over 2^8 states instead would leave 2 to 12% less, in twice the time.

Letters: N blocks, in `best_path` rows · R channels · T tokens of a block · G groups of K elements · S = 2^L states ·
J = 2^k codes · P = S/J, of L - k bits

Source: Tseng et al., 2024 (QTIP), section 3: the bitshift trellis; Viterbi, 1967; Marcellin and Fischer, 1990.
Differs: a known first state (they close the path, approximately, in two passes); L of 7 and a trained table where they
have 16 and values computed from the state; one number for each state, not two.
"""

import torch
from torch import Tensor

from kvq_runtime.ops import dispatch, grid, product
from kvq_runtime.ops.constant import constant

# sha256 of each table's bfloat16 little-endian bytes; `python scripts/build_tables.py` builds them again.
DIGESTS = {
    1: "7e630d94eef57106887327857820db8030c334e40df0c6f40cfcf16c00508deb",
    2: "86fa2ec99a319c73d3a7e4466cf13749afd0940e4176df14f18ea916863411da",
    3: "d4d27b3c1a7cd86c2fd43843e08242e2777fa83f8c74cc7bc5b3178cdd2ba6e7",
    4: "4e1d543fb14c4ce85773874634d4286e0ced59d06d660acdc6994911ced34d1b",
    5: "61c0878df5bbcb33f826f42979f2eed1e72d883c1fc5d8fe2163378a5ab8f3b1",
}
MEMORY = 7  # L, bits that a number is decoded from
BITS = 5  # of a code, at most
# Errors of a standard Gaussian in blocks of 128 tokens; `scripts/build_tables.py` prints them.
DISTORTIONS = {1: 0.29562, 2: 0.08264, 3: 0.02273, 4: 0.00658, 5: 0.00204}

_STEP, _PATHS = 1 << 19, 1 << 26  # numbers that one step of the search works on, and bytes that all steps of it keep
UNREACHED = 2.0**60  # the cost of states that no path has reached
_FAINTEST = 2.0**-10  # of the loudest group's size: the least that a group is weighed with


@constant(16)
def table(bits: int) -> Tensor:
    """Return the value of each state, bfloat16 [2^MEMORY], checked against its pinned digest."""
    name = f"k{bits}_l{MEMORY}"
    return grid.pinned("trellis", name, grid.tables("trellises")[name], DIGESTS[bits])


@dispatch.paired("trellis.best_path")
def best_path(x_NGK: Tensor, rms_NG: Tensor, table_S: Tensor, bits: int) -> Tensor:
    """Find states int64 [N, G · K] of the path from state 0 of least Σ (rms · (x - table[state]))², all float32.

    Every sum is made of single additions and products, in one order: a row's path does not depend on its company. Costs
    are compared to 2^-18 of their size: of paths that are nearer to each other than that, one is taken.
    """
    count, states = x_NGK[0].numel() if len(x_NGK) else 0, len(table_S)
    if not count:
        return torch.zeros(len(x_NGK), x_NGK.shape[1] * x_NGK.shape[2], dtype=torch.int64, device=x_NGK.device)
    room = max(1, min(_STEP // states, _PATHS // ((states >> bits) * count)))
    strips = zip(x_NGK.split(room), rms_NG.split(room), strict=True)
    return torch.cat([_best_path(x_ngk, rms_ng, table_S, bits) for x_ngk, rms_ng in strips])


def _best_path(x_NGK: Tensor, rms_NG: Tensor, table_S: Tensor, bits: int) -> Tensor:
    """By dynamic programming: the cost of the best path that ends in each state, in units of its group's rms²."""
    (rows, groups, size), codes, states = x_NGK.shape, 2**bits, len(table_S)
    x_TN = x_NGK.flatten(1).mT.contiguous()
    ratio_GN = ratios(rms_NG)
    slope_S1, bias_S1 = -table_S[:, None], table_S.square()[:, None] / 2
    oldest_J11 = torch.arange(1, codes, dtype=torch.int32, device=x_NGK.device)[:, None, None]
    oldest_TPN = torch.empty(groups * size, states // codes, rows, dtype=torch.uint8, device=x_NGK.device)
    cost_SN = x_NGK.new_empty(states, rows)
    cost_JPN, best_PN = cost_SN.view(codes, -1, rows), x_NGK.new_full((states // codes, rows), UNREACHED)
    cost_PJN, bits_JPN = cost_SN.view(-1, codes, rows), cost_JPN.view(torch.int32)
    (first_JPN, later_JPN), costs = (bits_JPN[:-1], bits_JPN[1:]), cost_JPN.unbind()
    best_P1N, best_bits_PN = best_PN[:, None], best_PN.view(torch.int32)
    best_PN[0] = 0.0
    for step, (x_N, oldest_PN) in enumerate(zip(x_TN.unbind(), oldest_TPN.unbind(), strict=True)):
        if step and step % size == 0:
            best_PN *= ratio_GN[step // size - 1]
        # (x - c)² / 2 without x² / 2, which all paths share; addcmul of two broadcast factors takes thrice as long
        torch.mul(slope_S1, x_N, out=cost_SN).add_(bias_S1)
        cost_PJN.add_(best_P1N)
        # The oldest code stands in a cost's last bits, of which it has more than enough: one minimum finds both.
        first_JPN.bitwise_and_(-codes)  # the last code sets all of them
        later_JPN.bitwise_or_(oldest_J11)
        torch.minimum(*costs, out=best_PN) if codes == 2 else torch.amin(cost_JPN, 0, out=best_PN)
        oldest_PN.copy_(best_bits_PN)  # the last eight bits
    return _traced(cost_SN.argmin(0), oldest_TPN.bitwise_and_(codes - 1), bits)


def ratios(rms_NG: Tensor) -> Tensor:
    """Return factors that turn costs from the units of one group into those of the next: float32 [G - 1, N]."""
    share_NG = (rms_NG / rms_NG.amax(1, keepdim=True)).nan_to_num(1.0).clamp_min(_FAINTEST).square()
    return (share_NG[:, :-1] / share_NG[:, 1:]).mT.contiguous()


def _traced(last_N: Tensor, oldest_TPN: Tensor, bits: int) -> Tensor:
    """Trace the states [N, T] of the path to the last one: before each, what was dropped and all but its code."""
    steps, newer, rows = oldest_TPN.shape
    state_TN, row_N = last_N.new_empty(steps, rows, dtype=torch.int32), torch.arange(rows, device=last_N.device)
    states, oldest = state_TN.unbind(), oldest_TPN.flatten(1).unbind()
    states[-1].copy_(last_N)
    for step in range(steps - 1, 0, -1):
        kept_N = states[step] >> bits
        oldest_N = oldest[step - 1].index_select(0, torch.add(row_N, kept_N, alpha=rows))
        torch.add(kept_N, oldest_N, alpha=newer, out=states[step - 1])
    return state_TN.T.long()


def encode_path(z_NRT: Tensor, deviation_R: Tensor, bits: int, scale_NRT: Tensor | None = None) -> Tensor:
    """Return codes uint8 [N, R, T] of float32 channels, divided by their tokens' gains, with these deviations [R].

    bits        1 to BITS
    scale_NRT   factors of errors when tokens are decoded, [N, R or 1, T]; None: 1
    """
    return (_path(z_NRT, deviation_R, bits, scale_NRT) & (2**bits - 1)).to(torch.uint8)


def on_path(z_NRT: Tensor, deviation_R: Tensor, bits: int, scale_NRT: Tensor | None = None) -> Tensor:
    """Return what those codes decode to, float32, of whole blocks."""
    path_NRT = _path(z_NRT, deviation_R, bits, scale_NRT)
    values = table(bits).to(z_NRT.device, torch.float32)
    return values.index_select(0, path_NRT.flatten()).view(z_NRT.shape) * deviation_R[:, None]


def _path(z_NRT: Tensor, deviation_R: Tensor, bits: int, scale_NRT: Tensor | None) -> Tensor:
    N, R, T = z_NRT.shape
    rows = (z_NRT * product.inverse(deviation_R)[:, None]).reshape(N * R, T)
    values = table(bits).to(rows.device, torch.float32)
    if scale_NRT is None:
        path = best_path(rows[:, None], rows.new_ones(N * R, 1), values, bits)
    else:  # groups of one token each
        path = best_path(rows[..., None], scale_NRT.expand(N, R, T).reshape(N * R, T), values, bits)
    return path.reshape(N, R, T)


def decode_path(codes_NRT: Tensor, deviation_R: Tensor, bits: int) -> Tensor:
    """Decode codes [N, R, T] of whole blocks to float32; or of `history(bits)` tokens, of which the last is right."""
    codes, state = codes_NRT.int(), torch.zeros_like(codes_NRT, dtype=torch.int32)
    for past in range(min(history(bits), codes.shape[-1])):
        state[..., past:] |= codes[..., : codes.shape[-1] - past] << past * bits
    values = table(bits).to(codes.device, torch.float32)
    return values.index_select(0, (state & 2**MEMORY - 1).flatten()).view(codes.shape) * deviation_R[:, None]


def history(bits: int) -> int:
    """Return the number of tokens, the last one among them, whose codes are in a state."""
    return -(-MEMORY // bits)
