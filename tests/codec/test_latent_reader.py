"""Attention to packed latents beside attention to what they decode to."""

from dataclasses import replace

import feeding
import fitted
import pytest
import torch

from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.ops import rope
from kvq_runtime.recipe import preset, with_each

GEOMETRY = feeding.GEOMETRY


COUNTS = (4, 4, 6, 16, 10, 8, 8, 8)  # of 7, ..., 0 bits: what is looked up four at a time, in blocks of 128


def codecs(name: str, counts: tuple[int, ...] = (), **changes):
    recipe = replace(preset(name), **changes)
    if counts:
        recipe = with_each(recipe, lambda each: replace(each, quantize=replace(each.quantize, counts=counts)))
    recipe = recipe if counts else feeding.small(recipe)
    return [
        Codec(recipe, 1, role, GEOMETRY, {n.removeprefix(f"layers.1.{role}."): x for n, x in tensors.items()})
        for role in ("key", "value")
        if (tensors := {n: x for n, x in fitted.tensors(recipe, GEOMETRY).items() if n.startswith(f"layers.1.{role}.")})
    ]


@pytest.mark.parametrize("scaling", [1.0, 1.3])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fisher-3bit", {}),
        ("fisher-head-3bit", {}),
        ("fisher-2bit", {"segment": 16}),
        ("fisher-2bit", {"position": "post"}),
        ("fisher-3bit", {"counts": COUNTS}),
        ("fisher-head-3bit", {"counts": COUNTS}),
        ("fisher-2bit", {"counts": COUNTS, "segment": 16}),
        ("fisher-2bit", {"counts": COUNTS, "segment": 64}),
        ("fisher-2bit", {"counts": COUNTS, "position": "post"}),
    ],
)
def test_scores_and_sums_are_those_of_decoded_tokens(name, changes, scaling):
    key, value = codecs(name, **changes)
    generator = torch.Generator().manual_seed(0)
    rows, blocks, size, (heads, width) = 2, 3, key.block, (GEOMETRY.kv_heads, GEOMETRY.head_size)
    tokens, first = blocks * size, 4
    x_NTC = torch.randn(rows * blocks, size, GEOMETRY.width, generator=generator)
    tables = tuple(
        table.expand(rows, -1, -1)
        for table in feeding.rotary(scaling=scaling).tables(torch.arange(7, 7 + tokens)[None])
    )
    whole = rope.of_middles(tables, key.segment) if key.segment else None
    angles = tables if whole is None else rope.between(tables, whole)

    def at(segment: int):
        assert segment == key.segment
        return rope.by_segment(tables, segment)

    def by_block(pair):
        return tuple(part.reshape(rows * blocks, size, -1) for part in pair)

    q_YND = torch.randn(rows * heads, 5, width, generator=generator)
    p_YNT = torch.rand(rows * heads, 5, tokens - first, generator=generator)
    expected, found = [], []
    for codec in (key, value):
        context = Context(rope=by_block(angles) if codec.role == "key" else None)
        fields = codec.encode(x_NTC, context)
        decoded = codec.restore(codec.decode(fields, context), context).float().unflatten(-1, (heads, -1))
        if codec.segment:
            decoded = rope.rotate(decoded, *by_block(whole))
        decoded_YTD = decoded.reshape(rows, tokens, heads, width).transpose(1, 2).flatten(0, 1)[:, first:]
        blocks_of = codec.packed_reader.view_blocks(
            {n: f.unflatten(0, (rows, blocks)) for n, f in fields.items()}, first
        )
        if codec.role == "key":
            expected.append(q_YND @ decoded_YTD.mT)
            found.append(codec.packed_reader.scores(q_YND, blocks_of, at))
        else:
            expected.append(p_YNT @ decoded_YTD)
            found.append(codec.packed_reader.mix(p_YNT, blocks_of))
    for one, other in zip(found, expected, strict=True):  # decoding rounds latents to bfloat16
        assert float((one - other).norm() / other.norm()) < 0.006
