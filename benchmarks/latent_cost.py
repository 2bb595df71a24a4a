"""Count what attention to latents asks of an H200: a token and layer of Llama-3.1-8B; nothing here is measured.

python -m benchmarks.latent_cost > benchmarks/results/latent-cost.jsonl

bytes         codes and gains; projected queries, written and read; scores kept between two passes (one basis of all
              heads alone); rereads of the basis, from the second-level cache
products      of scores and values, padded to the tensor cores' tiles, and of the projection
instructions  of a warp, by head: counted in the machine code for sm_90 (KEYS and VALUES of a slab, BLOCK besides them,
              PROJECTED of a tile of 64 columns and its slabs)
nanoseconds   each alone, at an H200's limits; 16 bit takes SIXTEEN_BIT, measured

"pre" is keys before RoPE, a basis a head, whose tiles would be multiplied by the basis, rotated, and read as any other
keys. No such kernel exists: of a block, DECODED (products and loads of operands, by slab) and ROTATED were counted by
hand. On an H200 `kivi-2bit-g128` took 2.9 times what its instructions ask (benchmarks/records/h200.md): the kernel that
exists has to show there first that it is faster than 16 bit.
"""

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.cases import SLABS

HEADS, QUERIES, SIZE, COLUMNS = 8, 32, 128, 64
BANDWIDTH, PRODUCTS, ISSUED = 4.8e12, 990e12 / 2, 132 * 4 * 1.755e9  # bytes, products, instructions of warps a second
SIXTEEN_BIT = 0.94
KEYS, VALUES = (278, 192, 212, 212, 219, 130, 125), (345, 262, 281, 280, 282, 197, 191)  # of 7, 6, ... 1 bits
BLOCK, PROJECTED, SLAB_PROJECTED, MEAN_PROJECTED = 1680, 4 * 880, 4 * 85, 4 * 268
DECODED, ROTATED = 8 * (16 + 8), 512 * 5 // 2 + 128 + 256
PREFIX = {"what": "latent cost", "counted": True, "model": "llama-3.1-8b"}


def rows() -> Iterator[dict[str, Any]]:
    for bits, slabs in SLABS.items():
        yield PREFIX | {"bits": bits, "group": "head", "position": "pre"} | before_rope(slabs)
        for group in ("head", "all"):
            for segment in (32, 128):
                yield PREFIX | {"bits": bits, "group": group, "segment": segment} | cost(slabs, group, segment)


def before_rope(slabs: tuple[int, ...]) -> dict[str, Any]:
    latents, codes = 16 * sum(slabs), code_bytes(slabs)
    used = HEADS * latents * SIZE + 2 * QUERIES * (SIZE + latents)
    made = HEADS * (in_block(slabs) + sum(slabs) * DECODED + ROTATED) / 128
    return {"codes_bytes": round(codes)} | limits(codes, used) | issued(made)


def limits(memory: float, used: float) -> dict[str, Any]:
    return {"memory_bytes": round(memory), "products": round(used), "memory_ns": round(1e9 * memory / BANDWIDTH, 3),
            "products_ns": round(1e9 * used / PRODUCTS, 3), "sixteen_bit_ns": SIXTEEN_BIT}  # fmt: skip


def issued(made: float) -> dict[str, Any]:
    return {"instructions": round(made), "instructions_ns": round(1e9 * made / ISSUED, 3)}


def code_bytes(slabs: tuple[int, ...]) -> float:
    """Return the bytes of a token's codes and gains, by head."""
    return 2 * HEADS * 16 * sum(count * (7 - place) for place, count in enumerate(slabs)) / 8 + 2 * HEADS * 3 / 8


def in_block(slabs: tuple[int, ...]) -> int:
    """Return the instructions of a head's block."""
    return BLOCK + sum(count * (k + v) for count, k, v in zip(slabs, KEYS, VALUES, strict=True))


def cost(slabs: tuple[int, ...], group: str, segment: int) -> dict[str, Any]:
    bases = HEADS if group == "head" else 1
    latents = 16 * sum(slabs) * HEADS // bases  # of a query
    codes = code_bytes(slabs)
    projected = 2 * QUERIES * (latents + segment) * 2 / segment
    tile = COLUMNS * HEADS // QUERIES * segment  # tokens of a tile of columns
    padded = 2 if group == "head" else 1  # four of a tile's eight columns are queries of a head
    used = 2 * QUERIES * latents * padded + QUERIES * SIZE * (latents + segment) / segment
    memory = codes + projected + (0 if group == "head" else 2 * 2 * QUERIES)
    found = {"codes_bytes": round(codes), "projected_bytes": round(projected)} | limits(memory, used)
    found["cache_bytes"] = round(2 * bases * latents * SIZE * HEADS // bases / tile)
    if group == "head":
        tiles = PROJECTED + sum(slabs) * SLAB_PROJECTED + segment // 16 * MEAN_PROJECTED
        found |= issued(HEADS * (in_block(slabs) / 128 + tiles / tile))
    return found


if __name__ == "__main__":
    print("\n".join(map(json.dumps, rows())))
