"""What files hold beside codes, against the files of a store."""

import pytest
import torch

from kvq_runtime.geometry import Geometry
from kvq_runtime.prefix import block_file
from kvq_runtime.prefix.block_file import beside
from kvq_runtime.recipe import preset


def test_sinks_and_frames_beside_codes_by_hand():
    recipe, geometry = preset("rest-1bit"), Geometry(30, 3, 64)
    frame = 8 * block_file.frame(128) / (128 * 2 * 30 * 192)
    assert beside(recipe, geometry) == pytest.approx(4 * 16 / 1024 + frame)
    assert beside(recipe, geometry, 4096) == pytest.approx(4 * 16 / 4096 + frame)
    assert beside(recipe, geometry, 1) == beside(recipe, geometry, 128) == pytest.approx(0.5 + frame)


@pytest.mark.parametrize("number", [0, 7])
def test_a_frame_is_what_a_file_has_beside_its_tensors(number):
    """Of a block with sinks another name stands in it."""
    recipe, geometry = preset("rest-1bit"), Geometry(2, 2, 16)
    codes = torch.zeros(128, 32, dtype=torch.int8)
    tensors = {f"layers.{n}.{role}.quantize.rung": torch.zeros(32, dtype=torch.uint8) for n in range(2)
               for role in ("key", "value")}  # fmt: skip
    form = block_file.BlockFormat(recipe, geometry, (0, 1), torch.bfloat16, tensors)
    block = block_file.Block({n: ({"codes": codes}, {"codes": codes}) for n in range(2)}, torch.zeros(2, 2, 4, 32))
    link = block_file.Link("1" * 64, "2" * 64, number, tuple(range(1000, 1128)))
    data = form.to_bytes(block, link)
    head = 8 + int.from_bytes(data[:8], "little")
    assert block_file.frame(128) == pytest.approx(head + block_file.entropy.HEADER, rel=0.08)
