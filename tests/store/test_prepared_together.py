"""Blocks that are prepared for their codec together are what they are alone, wherever padding and sinks lie."""

from dataclasses import replace

import pytest
import torch
from feeding import RECIPES, feed, make, tensors
from torch import Tensor

from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.store.encode import Encoder
from kvq_runtime.store.layer import LayerStore

TOKENS = 300


def real(*gaps: range) -> Tensor:
    """Two rows, of which the first is padded there."""
    real_BT = torch.ones(2, TOKENS, dtype=torch.bool)
    for gap in gaps:
        real_BT[0, gap.start : gap.stop] = False
    return real_BT


PADDED = {
    "none": None,
    "left": real(range(37)),
    "middle": real(range(50, 75)),
    "right": real(range(250, 300)),
    "everywhere": real(range(5), range(40, 43), range(90, 120)),
}


@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("sinks", [0, 4, 40], ids=lambda count: f"{count} sinks")
@pytest.mark.parametrize("name", ["kivi-2bit", "rtn-2bit", "squat-pre-2bit", "aqua-2bit"])
def test_blocks_of_a_prompt(name: str, sinks: int, padding: str, monkeypatch: pytest.MonkeyPatch):
    recipe, prepared = RECIPES[name], list[int]()
    recipe = replace(recipe, window=replace(recipe.window, sinks=sinks))
    together, prepare = Encoder._inputs, Encoder._input

    def compared(self: Encoder, store: LayerStore, role: int, count: int) -> tuple[Tensor, Context]:
        x_NTC, context = together(self, store, role, count)
        alone = [prepare(self, store, role, block, 1) for block in range(store.blocks, store.blocks + count)]
        assert torch.equal(x_NTC, torch.cat([x_BnTC for x_BnTC, _ in alone], 1).flatten(0, 1))
        for place, part in enumerate(context.rope or ()):
            assert torch.equal(part, torch.cat([rope[place] for _, rope in alone if rope], 1).flatten(0, 1))
        assert (context.rope is None) == (alone[0][1] is None)
        return x_NTC, context

    monkeypatch.setattr(Codec, "one_launch", lambda self, x: True)
    monkeypatch.setattr(Encoder, "together", 32)
    monkeypatch.setattr(Encoder, "_inputs", compared)
    monkeypatch.setattr(Encoder, "_input", lambda self, *given: prepared.append(given[-1]) or prepare(self, *given))
    feed(make(recipe), tensors(TOKENS, rows=2), 0, TOKENS, PADDED[padding])
    assert (max(prepared) > 1) == (padding != "right")
