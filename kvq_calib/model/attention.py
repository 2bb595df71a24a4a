"""Compute causal attention where some of what a query reads is decoded and the rest exact.

A tile is a run of queries that read the same: (start, stop, keys decoded, values decoded), the last two counted from
the first token. Tokens that are not decoded are read as they are. Attention's scale is 1/√D.
"""

from torch import Tensor, arange, cat
from torch.nn.functional import scaled_dot_product_attention

from kvq_runtime.recipe import Side

Tile = tuple[int, int, int, int]
TILE = 512  # queries: what a tile's scores take grows with tile × tokens


def tiles(tokens: int, decoded: int = 0) -> list[Tile]:
    """All queries, reading the first `decoded` tokens decoded."""
    return [(start, min(start + TILE, tokens), decoded, decoded) for start in range(0, tokens, TILE)]


def tiles_in_use(key: Side, value: Side, tokens: int, step: int) -> list[Tile]:
    """What queries read from a cache in which tokens arrive in steps.

    A step reads the state before its own flush: whole blocks of what had arrived before it, less `recent`.
    """
    found: list[Tile] = []
    for start in range(0, tokens, step):
        keys, values = (max(0, start - side.recent) // side.block * side.block for side in (key, value))
        stop = min(start + step, tokens)
        if found and found[-1][2:] == (keys, values) and stop - found[-1][0] <= TILE:
            found[-1] = (found[-1][0], stop, keys, values)
        else:
            found.append((start, stop, keys, values))
    return found


def attend(
    q_NTC: Tensor, exact: tuple[Tensor, Tensor], decoded: tuple[Tensor, Tensor], runs: list[Tile], head_size: int
) -> Tensor:
    """The output of attention before its projection, [N, T, C of the queries], for keys and values after RoPE."""
    out = []
    for start, stop, keys, values in runs:
        k, v = (
            cat([x_hat[:, : min(count, stop)], x[:, count:stop]], 1)
            for x, x_hat, count in zip(exact, decoded, (keys, values), strict=True)
        )
        heads = [x.unflatten(-1, (-1, head_size)).transpose(1, 2) for x in (q_NTC[:, start:stop], k, v)]
        seen = arange(stop, device=k.device) <= arange(start, stop, device=k.device)[:, None]
        tile = scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)
        out.append(tile.transpose(1, 2).flatten(2))
    return cat(out, 1)
