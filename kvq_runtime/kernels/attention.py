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
from kvq_runtime.kernels.launch import Launch, choose, tall
from kvq_runtime.kernels.layout import Layout, padded
from kvq_runtime.kernels.merge import merge
from kvq_runtime.kernels.tile import on

ROWS = 64  # query heads of a KV head, times query tokens, at most
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
    """

    layout: Layout
    addresses: Tensor
    lookup: Tensor | None = None
    turn: Tensor | None = None

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
    """The constant tables that turn keys before RoPE, see per_channel.py."""

    block_K2T: Tensor
    step_2K: Tensor
    bases_N2K: Tensor
    speed_K: Tensor

    @staticmethod
    def of(frequencies_K: Tensor, scaling: float, block: int, blocks: int) -> "Turns":
        """For blocks of `block` tokens; `scaling` is that of cos and sin in use."""
        speed = frequencies_K.double()

        def circle(positions: Tensor, dim: int) -> Tensor:
            angles = positions.double().to(speed.device)[:, None] * speed
            return torch.stack([angles.cos(), angles.sin()], dim)

        inside = circle(torch.arange(block), 1).permute(2, 1, 0) * scaling
        step, bases = circle(torch.tensor([block]), 1)[0], circle(torch.arange(blocks) * block, 1)
        return Turns(inside.half().contiguous(), step.float().contiguous(), bases.float().contiguous(), speed)


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

    lengths    int32 [3]: encoded blocks, the window's first place in its buffer, its tokens
    starts_B   int32: the first real slot of each row
    scale      of the scores
    turns      for keys before RoPE; the query of a padded row is then one turned by `starts`, see `advanced`
    """
    q_BHTD = q_BHTD.contiguous()
    batch, q_heads, tokens, size = q_BHTD.shape
    heads = keys.layout.settings[4]
    rows = q_heads // heads * tokens
    if rows > ROWS:
        raise ValueError(f"{q_heads} query heads and {tokens} tokens are {rows} rows per KV head; at most {ROWS}")
    launch = launch or choose(q_BHTD.device, keys.layout, values.layout, rows)
    parts = splits + EXACT.value
    part = torch.empty(batch, heads, parts, rows, size, dtype=torch.float32, device=q_BHTD.device)
    lse = torch.empty(batch, heads, parts, rows, dtype=torch.float32, device=q_BHTD.device)
    out, level = torch.empty_like(q_BHTD), lse.new_empty(batch, q_heads, tokens)
    turned = q_BHTD
    if keys.turn is not None:
        turned = q_BHTD.float() @ keys.turn
    elif turns is not None:
        turned = advanced(q_BHTD, starts_B, turns)
    with on(q_BHTD):
        attend_kernel[(batch * heads, parts)](
            turned, q_BHTD, scale * LOG2E, turns, keys.addresses, values.addresses, keys.lookup, values.lookup,
            *exact, exact.k_window.stride(0), starts_B, lengths, part, lse,
            *constants(keys.layout, values.layout, q_heads // heads, tokens, exact.k_sinks.shape[1], splits, launch),
            num_warps=launch.warps, num_stages=launch.stages, maxnreg=min(255, REGISTERS // (32 * launch.warps)),
        )  # fmt: skip
        back, wide = None if values.turn is None else _padded(values.turn.mT), padded(size)
        high = min(16, tall(keys.layout, rows))
        chunk = max(1, MERGED // (high * (COLUMNS if back is None else wide)))
        merge[(batch * heads, triton.cdiv(wide, COLUMNS), triton.cdiv(rows, high))](
            part, lse, back, None, out, level, splits, heads, rows, high, size, wide, EXACT, min(wide, COLUMNS),
            min(chunk, 16), num_warps=4, maxnreg=255,
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


def advanced(q_BHTD: Tensor, starts_B: Tensor, turns: Turns) -> Tensor:
    """The query turned forward by each row's padding, float32: position t of the row is slot start + t."""
    angles = starts_B.double()[:, None, None, None] * turns.speed_K
    cos, sin = angles.cos().float(), angles.sin().float()
    one, two = q_BHTD.float().chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


def _padded(turn: Tensor) -> Tensor:
    wide = padded(len(turn)) - len(turn)
    return torch.nn.functional.pad(turn, (0, wide, 0, wide)).contiguous()
