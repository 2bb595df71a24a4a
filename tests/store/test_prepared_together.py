"""Blocks that are prepared for their codec together are what they are alone, wherever padding and sinks lie."""

from dataclasses import replace

import pytest
import torch
from feeding import RECIPES, feed, make, state, tensors
from torch import Tensor

from kvq_runtime.codec.codec import Codec
from kvq_runtime.store.encode import Encoder

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
@pytest.mark.parametrize("sinks", [0, 4, 20], ids=lambda count: f"{count} sinks")
@pytest.mark.parametrize("name", ["kivi-2bit", "rtn-2bit", "squat-pre-2bit", "aqua-2bit"])
def test_blocks_of_a_prompt(name: str, sinks: int, padding: str, monkeypatch: pytest.MonkeyPatch):
    recipe = RECIPES[name]
    recipe = replace(recipe, window=replace(recipe.window, sinks=sinks))
    x_LKBTC, real_BT = tensors(TOKENS, rows=2), PADDED[padding]
    alone = make(recipe)
    feed(alone, x_LKBTC, 0, TOKENS, real_BT)
    monkeypatch.setattr(Codec, "one_launch", lambda self, x: True)
    monkeypatch.setattr(Encoder, "together", 32)
    prepared: list[int] = []
    prepare = Encoder._input
    monkeypatch.setattr(Encoder, "_input", lambda self, *given: prepared.append(given[-1]) or prepare(self, *given))
    together = make(recipe)
    feed(together, x_LKBTC, 0, TOKENS, real_BT)
    assert (max(prepared) > 1) == (padding != "right")
    for one, other in zip(state(alone), state(together), strict=True):
        for field, x in one.items():
            torch.testing.assert_close(other[field], x, rtol=0, atol=0, equal_nan=True)
