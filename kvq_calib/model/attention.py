"""Hold what is captured of a layer, and compute its causal attention. Attention's scale is 1/√D."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import dense, rope

Pair = tuple[Tensor, Tensor]
TILE = 512  # queries: what a tile's scores take grows with tile × tokens


@dataclass(frozen=True)
class Captured:
    """One layer's keys, values and queries of a chunk, before RoPE, all heads side by side, and its output.

    softmax   what the layer's attention has beside scores
    """

    k_NTC: Tensor
    v_NTC: Tensor
    q_NTC: Tensor | None
    h_BTE: Tensor
    softmax: dense.Softmax = dense.PLAIN


@dataclass(frozen=True)
class AttentionInputs:
    """Attention's inputs in one layer of one chunk, float32 [N, T, C], all heads side by side.

    k_pre   keys before RoPE; `k`, `q`: keys and queries after RoPE
    rope    cos and sin of the positions, [1, T, K] each
    softmax   what the layer's attention has beside scores
    """

    k_pre: Tensor
    k: Tensor
    v: Tensor
    q: Tensor | None
    rope: Pair
    softmax: dense.Softmax = dense.PLAIN


def inputs(captured: Captured, tables: Pair, geometry: Geometry) -> AttentionInputs:
    """Apply RoPE to what a layer captured, queries included."""
    k, v, q = captured.k_NTC.float(), captured.v_NTC.float(), captured.q_NTC
    tables = tables[0][:, : k.shape[1]], tables[1][:, : k.shape[1]]  # of as many entries, where these are cached
    turned_k = apply_rope(k, tables, geometry.kv_heads)
    turned_q = None if q is None else q.float()
    if turned_q is not None:
        turned_q = apply_rope(turned_q, tables, turned_q.shape[-1] // geometry.head_size)
    return AttentionInputs(k, turned_k, v, turned_q, tables, captured.softmax)


def apply_rope(x_NTC: Tensor, tables: Pair, heads: int) -> Tensor:
    """Rotate every head by its token's position."""
    return rope.rotate(x_NTC.unflatten(-1, (heads, -1)), *tables).flatten(-2)


def attend(chunk: AttentionInputs, k_NTC: Tensor, v_NTC: Tensor, head_size: int) -> Tensor:
    """Attend by the chunk's queries to keys after RoPE, before the projection: [N, T, C of the queries]."""

    def by_head(x_NTC: Tensor) -> Tensor:
        return x_NTC.unflatten(-1, (-1, head_size)).transpose(1, 2)

    assert chunk.q is not None, "queries were not asked for"
    out, tokens = [], k_NTC.shape[1]
    for start in range(0, tokens, TILE):
        stop = min(start + TILE, tokens)
        keys_BHSD, values_BHSD, queries = by_head(k_NTC[:, :stop]), by_head(v_NTC[:, :stop]), chunk.q[:, start:stop]
        seen = torch.arange(stop, device=k_NTC.device) <= torch.arange(start, stop, device=k_NTC.device)[:, None]
        tile = dense.attention(
            by_head(queries), keys_BHSD, values_BHSD, seen[None, None], head_size**-0.5, chunk.softmax
        )
        out.append(tile.transpose(1, 2).flatten(2))
    return torch.cat(out, 1)
