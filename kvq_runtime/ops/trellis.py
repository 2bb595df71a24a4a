"""Encode numbers by a path through a bitshift trellis: each gets k bits, and is decoded from the last L of the stream.

    decode   x̂_t = scale · table[s_t],   s_t = the L bits that end with element t's = (s_{t-1} · 2^k + code_t) mod 2^L
    encode   the codes of least Σ_t (x_t - rms · table[s_t])², found among all by Viterbi's algorithm

So 2^L values serve at k bits: a shift and a lookup decode what a vector quantizer would need a far larger codebook
for. One path goes through all groups of a row, a token's heads one after another. Before its first element stand zeros,
which are not stored: the search begins in state 0 and is exact in one pass; only the first L/k elements of a row choose
among fewer values. The stream is packed as it is read, most significant bits first: k bits an element. Each group is
divided by its root mean square, encoded, and the stored scale is the least-squares one, as in `grid.py`.

Letters: N rows · G groups of K elements · T = G·K · S = 2^L states · J = 2^k codes · P = S/J, of L - k bits

Source: Tseng et al., 2024 (QTIP), section 3: the bitshift trellis; Viterbi, 1967; Marcellin and Fischer, 1990.
Differs: a known first state (they close the path, approximately, in two passes); L of 8 or 10 and a trained table
where they have 16 and values computed from the state; one number for each state, not two.
"""

import math

import torch
from torch import Tensor

from kvq_runtime.ops import dispatch, grid
from kvq_runtime.ops.constant import constant
from kvq_runtime.ops.pack import take, word_table
from kvq_runtime.ops.rotation import Rotation, rotate

# sha256 of each table's bfloat16 little-endian bytes; `python scripts/build_tables.py` builds them again.
DIGESTS: dict[tuple[int, int], str] = {
    (1, 8): "41be4a2181b72544a35e0725110d57d8a7d09fc3d60eab0bf8606ea79833b86a",
    (1, 10): "49cd09d9999715aad6c7d614a2e4cba1f06c51056930e824db0d7ef8c92b1b9c",
    (2, 8): "07fc23bc5742530db397c574a2326ae5e683d2324dfeac6b757eb4953c7a7cad",
    (2, 10): "7eeee96611464d89158c963421182eb329e5373c26c2a5ed31361c4582bdbbc6",
    (3, 8): "54d2461c8270042eef4be0f366df51c71f8278b42b67cacc5427510724b2515c",
    (3, 10): "cb87685214fbc1a7add141f08d24a15dec17260dab0c91cfa6ef2000183d5612",
    (4, 8): "ab2f54141b92e275acb38daa853ee49ff9b6c14888ce0acc455e302b756b6974",
    (4, 10): "dd7393348d4d7df078433e87a9ca9836bf299add8a7b5509393e1f784df2f13f",
    (1, 7): "7e630d94eef57106887327857820db8030c334e40df0c6f40cfcf16c00508deb",
    (2, 7): "86fa2ec99a319c73d3a7e4466cf13749afd0940e4176df14f18ea916863411da",
    (3, 7): "d4d27b3c1a7cd86c2fd43843e08242e2777fa83f8c74cc7bc5b3178cdd2ba6e7",
    (4, 7): "4e1d543fb14c4ce85773874634d4286e0ced59d06d660acdc6994911ced34d1b",
    (5, 7): "61c0878df5bbcb33f826f42979f2eed1e72d883c1fc5d8fe2163378a5ab8f3b1",
}
BITS = (1, 2, 3, 4)

_STEP, _PATHS = 1 << 19, 1 << 26  # numbers that one step of the search works on, and bytes that all steps of it keep
UNREACHED = 2.0**60  # the cost of states that no path has reached
_FAINTEST = 2.0**-10  # of the loudest group's size: the least that a group is weighed with


@constant(16)
def table(bits: int, memory: int) -> Tensor:
    """Return the value of each state, bfloat16 [2^memory], checked against its pinned digest."""
    name = f"k{bits}_l{memory}"
    if name not in grid.tables("trellises"):
        raise ValueError(f"no trellis with bits={bits} memory={memory}; there are {sorted(DIGESTS)}")
    return grid.pinned("trellis", name, grid.tables("trellises")[name], DIGESTS[bits, memory])


@dispatch.paired("path.best_path")
def best_path(x_NGK: Tensor, rms_NG: Tensor, table_S: Tensor, bits: int) -> Tensor:
    """The states int64 [N, G · K] of the path from state 0 with the least Σ (rms · (x - table[state]))², all float32.

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
    """Factors that turn costs from the units of one group into those of the next: float32 [G - 1, N]."""
    share_NG = (rms_NG / rms_NG.amax(1, keepdim=True)).nan_to_num(1.0).clamp_min(_FAINTEST).square()
    return (share_NG[:, :-1] / share_NG[:, 1:]).mT.contiguous()


def _traced(last_N: Tensor, oldest_TPN: Tensor, bits: int) -> Tensor:
    """The states [N, T] of the path to the last one: before each stands what was dropped, then all but its code."""
    steps, newer, rows = oldest_TPN.shape
    found_TN, row_N = last_N.new_empty(steps, rows, dtype=torch.int32), torch.arange(rows, device=last_N.device)
    found, oldest = found_TN.unbind(), oldest_TPN.flatten(1).unbind()
    found[-1].copy_(last_N)
    for step in range(steps - 1, 0, -1):
        kept_N = found[step] >> bits
        oldest_N = oldest[step - 1].index_select(0, torch.add(row_N, kept_N, alpha=rows))
        torch.add(kept_N, oldest_N, alpha=newer, out=found[step - 1])
    return found_TN.T.long()


def encode(x: Tensor, bits: int, memory: int, rotation: Rotation = None) -> tuple[Tensor, Tensor]:
    """Rotate rows of groups [..., G, K] of any float dtype, and encode their elements.

    bits, memory   k, 1 to 4, and L: one of `DIGESTS`. Other ones are a ValueError

    Returns the packed streams, uint8 [..., bytes], and scale float16 [..., G].
    """
    x = rotate(x, rotation)
    values = table(bits, memory).to(x.device).float()
    rows = x.reshape(-1, *x.shape[-2:])
    rms = torch.linalg.vector_norm(rows, dim=-1).div_(rows.shape[-1] ** 0.5)
    path = best_path(rows / rms.where(rms > 0, 1.0)[..., None], rms, values, bits)
    chosen = values[path].view(rows.shape)
    scale = torch.linalg.vecdot(rows, chosen) / chosen.square().sum(-1)
    packed = pack(path & (2**bits - 1), bits)
    return packed.view(*x.shape[:-2], packed.shape[-1]), scale.half().view(x.shape[:-1])


def packed_size(count: int, bits: int) -> int:
    """Bytes of a stream of `count` elements; its last byte is padded with zeros."""
    return -(-count * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """The stream of codes [..., n] in [0, 2**bits), most significant bits first: uint8 [..., packed_size(n, bits)]."""
    whole, size = math.lcm(8, bits), packed_size(codes.shape[-1], bits)
    codes = torch.nn.functional.pad(codes.int(), (0, -codes.shape[-1] % (whole // bits)))
    places = torch.arange(whole // bits - 1, -1, -1, dtype=torch.int32, device=codes.device) * bits
    words = (codes.unflatten(-1, (-1, whole // bits)) << places).sum(-1, dtype=torch.int32)
    shifts = torch.arange(whole - 8, -8, -8, dtype=torch.int32, device=codes.device)
    return ((words[..., None] >> shifts) & 255).to(torch.uint8).flatten(-2)[..., :size]


def states(packed: Tensor, bits: int, memory: int, count: int) -> Tensor:
    """The state at each of `count` elements of packed streams [..., bytes]: int32 [..., count]."""
    return _bits_before(packed, memory, torch.arange(1, count + 1, dtype=torch.int32, device=packed.device) * bits)


def decode(packed: Tensor, bits: int, memory: int, count: int, dtype: torch.dtype) -> Tensor:
    """The values of packed streams [..., bytes], without their scale: [..., count], rounded to bfloat16.

    One lookup gives the elements of a byte where those fill it, or else each alone.
    """
    together = 8 // bits if 8 % bits == 0 and count * bits % 8 == 0 else 1
    ends = torch.arange(together, count + 1, together, dtype=torch.int32, device=packed.device) * bits
    index = _bits_before(packed, memory + bits * (together - 1), ends)
    rows = take(_rows(bits, memory, together, dtype, packed.device), index, dtype)
    return rows.view(*packed.shape[:-1], count)


@constant(32)
def _rows(bits: int, memory: int, together: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values of all windows of `together` elements, as a table for `take`."""
    window = torch.arange(2 ** (memory + bits * (together - 1)), device=device)
    places = torch.arange(together - 1, -1, -1, device=device) * bits
    values = table(bits, memory).to(device, dtype)
    return word_table(values[(window[:, None] >> places) & (2**memory - 1)])


def _bits_before(packed: Tensor, width: int, ends: Tensor) -> Tensor:
    """The `width` bits, at most 17, that end before each of the bits `ends`: int32 [..., ends].

    They lie in the byte of the last of them and in the two before it; before a stream stand zeros.
    """
    byte = torch.nn.functional.pad(packed, (2, 0)).int()
    words = (byte[..., :-2] << 16) | (byte[..., 1:-1] << 8) | byte[..., 2:]
    last = ends - 1
    return (words[..., last // 8] >> (7 - last % 8)) & (2**width - 1)
