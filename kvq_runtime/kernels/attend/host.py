"""Attend to a layer's packed blocks, sinks and window without decoding them: two launches, and one to rotate.

Nothing here asks the device anything: lengths and starts are tensors on it, slabs are reached through a table, the
number of splits is fixed; so that a decode step can be captured as one graph.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kvq_runtime.kernels.attend import EXACT
from kvq_runtime.kernels.attend import attend as attend_kernel
from kvq_runtime.kernels.launch import Launch, at_once, choose, tall
from kvq_runtime.kernels.layout import Layout, padded
from kvq_runtime.kernels.merge import merge
from kvq_runtime.kernels.tile import FUSED, on

COLUMNS = 32  # channels that one program merges
MERGED = 4096  # elements of partial results that it has in registers
REGISTERS = 65536  # of a multiprocessor; ptxas would rather spill than take more than its own guess
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Encoded:
    """One side's blocks.

    layout      how they are read
    addresses   the slabs, see slabs.py
    lookup      the layout's lookup on the device, or None
    turn        its rotation on the device, float32, or None
    mean        what was removed from each channel, of keys before RoPE, float32 [C], or None
    """

    layout: Layout
    addresses: Tensor
    lookup: Tensor | None = None
    turn: Tensor | None = None
    mean: Tensor | None = None

    @staticmethod
    def of(layout: Layout, addresses: Tensor) -> "Encoded":
        """With the layout's tensors on the device of the addresses."""
        lookup, turn = (None if x is None else x.to(addresses.device) for x in (layout.lookup, layout.turn))
        return Encoded(layout, addresses, lookup, turn)


class Exact(NamedTuple):
    """What is held exactly, keys and values alike: windows [B, W, C], a buffer; the sinks of each row [B, S, C]."""

    k_window: Tensor
    v_window: Tensor
    k_sinks: Tensor
    v_sinks: Tensor


class Turns(NamedTuple):
    """The constant tables that follow positions, see turn.py; and the frequencies and scaling they are of."""

    block: Tensor
    step_2K: Tensor
    bases_N2K: Tensor
    leads_B2K: Tensor
    speed_K: Tensor
    scaling: float

    @staticmethod
    def of(
        frequencies_K: Tensor, scaling: float, block: int, blocks: int, starts_B: Tensor, position: str = "pre"
    ) -> "Turns":
        """For blocks of `block` tokens; `scaling` is that of cos and sin in use, `position` the recipe's."""
        speed = frequencies_K.double()
        inside_T2K = _circle(torch.arange(block), speed)
        if position == "pre":
            table = inside_T2K.permute(2, 1, 0)
        else:
            # 1 - cos x = 2 sin²(x / 2), which loses nothing where cos is near 1
            half_TK = _circle(torch.arange(block) / 2, speed)[:, 1]
            table = torch.stack([-2 * half_TK.square(), inside_T2K[:, 1]], 1)
        step, bases = _circle(torch.tensor([block]), speed)[0], _circle(torch.arange(blocks) * block, speed)
        made = table.half().contiguous(), step.float(), bases.float()
        return Turns(*made, leads(starts_B, speed, scaling), speed, scaling)


def leads(starts_B: Tensor, speed_K: Tensor, scaling: float) -> Tensor:
    """What turns each row by its padding: position t of the row is slot start + t. [B, 2, K], times `scaling`."""
    return (_circle(starts_B, speed_K) * scaling).float()


def _circle(positions_N: Tensor, speed_K: Tensor) -> Tensor:
    """cos and sin, float64 [N, 2, K]."""
    angles = positions_N.to(speed_K.device).double()[:, None] * speed_K
    return torch.stack([angles.cos(), angles.sin()], 1)


def attend(
    q_BHTD: Tensor,
    keys: Encoded,
    values: Encoded,
    exact: Exact,
    lengths: Tensor,
    starts_B: Tensor,
    scale: float,
    splits: int,
    turns: Turns | None = None,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor]:
    """The attention of query tokens that are the last of the window: out [B, Hq, Tq, D] and log2 Σ 2^s [B, Hq, Tq].

    Query heads that one launch has no room for take turns, and read the blocks again: see `launch.at_once`.

    lengths    int32 [3]: encoded blocks, the window's first place in its buffer, its tokens
    starts_B   int32: the first real slot of each row
    scale      of the scores
    turns      for keys before RoPE, and for keys after it whose mean was removed
    """
    q_BHTD = q_BHTD.contiguous()
    batch, q_heads, tokens, size = q_BHTD.shape
    heads = keys.layout.settings[4]
    ratio, rows = q_heads // heads, q_heads // heads * tokens
    few = at_once(keys.layout, values.layout, ratio, tokens)
    if not few:
        raise ValueError(f"{q_heads} query heads and {tokens} tokens are {rows} rows per KV head: too many for a tile")
    if few < ratio:
        rest = (keys, values, exact, lengths, starts_B, scale, splits, turns, launch)
        done = [attend(part.flatten(1, 2), *rest) for part in q_BHTD.unflatten(1, (heads, ratio)).split(few, 2)]
        out, level = (torch.cat([x.unflatten(1, (heads, -1)) for x in found], 2) for found in zip(*done, strict=True))
        return out.flatten(1, 2), level.flatten(1, 2)
    launch = launch or choose(q_BHTD.device, keys.layout, values.layout, rows)
    parts = splits + EXACT.value
    part = torch.empty(batch, heads, parts, rows, size, dtype=torch.float32, device=q_BHTD.device)
    lse = torch.empty(batch, heads, parts, rows, dtype=torch.float32, device=q_BHTD.device)
    out, level = torch.empty_like(q_BHTD), lse.new_empty(batch, q_heads, tokens)
    turned = q_BHTD if keys.turn is None else q_BHTD.float() @ keys.turn
    tables = None if turns is None else (*turns[:4], keys.mean)
    with on(q_BHTD):
        attend_kernel[(batch * heads, parts)](
            turned, q_BHTD, scale * LOG2E, tables, keys.addresses, values.addresses, keys.lookup, values.lookup,
            *exact, exact.k_window.stride(0), starts_B, lengths, part, lse,
            *constants(keys.layout, values.layout, ratio, tokens, exact.k_sinks.shape[1], splits, launch),
            num_warps=launch.warps, num_stages=launch.stages, maxnreg=min(255, REGISTERS // (32 * launch.warps)),
            **FUSED,
        )  # fmt: skip
        back, wide = None if values.turn is None else _padded(values.turn.mT), padded(size)
        high = min(16, tall(keys.layout, rows))
        chunk = max(1, MERGED // (high * (COLUMNS if back is None else wide)))
        merge[(batch * heads, triton.cdiv(wide, COLUMNS), triton.cdiv(rows, high))](
            part, lse, back, values.mean, out, level, splits, heads, rows, high, size, wide, EXACT, min(wide, COLUMNS),
            min(chunk, 16), num_warps=4, maxnreg=255, **FUSED,
        )  # fmt: skip
    return out, level


def constants(keys: Layout, values: Layout, ratio: int, tokens: int, sinks: int, splits: int, launch: Launch) -> tuple:
    """The compile-time arguments of the kernel, in its order."""
    size, heads, block = keys.settings[3:6]
    plain = (1, size, padded(size), size, heads, block, 0)
    rows = tall(keys, ratio * tokens)
    return (
        heads, ratio, tokens, rows, launch.tile, sinks, splits, keys.scan, keys.read, keys.settings,
        values.read, values.settings, plain, not triton.knobs.runtime.interpret,
    )  # fmt: skip


def _padded(turn: Tensor) -> Tensor:
    wide = padded(len(turn)) - len(turn)
    return torch.nn.functional.pad(turn, (0, wide, 0, wide)).contiguous()
