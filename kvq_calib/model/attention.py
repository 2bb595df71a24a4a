"""Hold what is captured of a layer, and compute its causal attention, where a part of what a query reads is decoded and
the rest exact.

A tile is a run of queries that read the same: (start, stop, decoded), the last counted from the first token. Tokens
that are not decoded are read as they are. Attention's scale is 1/√D.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import dense, rope

Pair = tuple[Tensor, Tensor]
Tile = tuple[int, int, int]
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


def tiles(tokens: int, decoded: int = 0) -> list[Tile]:
    """All queries, reading the first `decoded` tokens decoded."""
    return [(start, min(start + TILE, tokens), decoded) for start in range(0, tokens, TILE)]


def attend(chunk: AttentionInputs, exact: Pair, decoded: Pair, runs: list[Tile], head_size: int) -> Tensor:
    """Attend by the chunk's queries to keys and values after RoPE, before the projection: [N, T, C of the queries]."""

    def by_head(x_NTC: Tensor, size: int) -> Tensor:
        return x_NTC.unflatten(-1, (-1, size)).transpose(1, 2)

    assert chunk.q is not None, "queries were not asked for"
    out = []
    for start, stop, count in runs:
        k, v = (
            torch.cat([x_hat[:, : min(count, stop)], x[:, count:stop]], 1)
            for x, x_hat in zip(exact, decoded, strict=True)
        )
        keys_BHSD, values_BHSD = (by_head(x, head_size) for x in (k, v))
        visible = torch.arange(stop, device=k.device) <= torch.arange(start, stop, device=k.device)[:, None]
        queries = by_head(chunk.q[:, start:stop], head_size)
        tile = dense.attention(queries, keys_BHSD, values_BHSD, visible[None, None], head_size**-0.5, chunk.softmax)
        out.append(tile.transpose(1, 2).flatten(2))
    return torch.cat(out, 1)
