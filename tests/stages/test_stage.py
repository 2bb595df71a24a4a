"""The contract of a stage: every kind is found, answers what it is asked, and is refused where it cannot serve."""

import dataclasses
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_origin

import pytest
import torch

from kvq_runtime.geometry import Geometry, Window
from kvq_runtime.policies.shadow_chunks import ShadowChunks
from kvq_runtime.recipe import Recipe
from kvq_runtime.stages.kinds import kinds, stage_from, stage_json
from kvq_runtime.stages.rtn import Rtn
from kvq_runtime.stages.stage import (
    SLOTS,
    Correction,
    Feedback,
    Predictor,
    Quantizer,
    Rotation,
    Scheme,
    setting_types,
)

GEOMETRY = Geometry(2, 2, 64)
BASES = dict(zip(SLOTS, (Predictor, Rotation, Quantizer, Feedback, Correction), strict=True))
KINDS = [(slot, cls) for slot, classes in kinds().items() for cls in classes.values()]


@pytest.mark.parametrize(("slot", "cls"), KINDS, ids=lambda x: x if isinstance(x, str) else x.kind)
def test_every_kind_keeps_the_contract(slot, cls):
    """A frozen dataclass of settings, of the base class of its slot, and the same after JSON."""
    assert issubclass(cls, BASES[slot]) and cls.slot == slot
    stage = cls()
    assert dataclasses.is_dataclass(stage) and stage_from(slot, stage_json(stage), kinds()[slot]) == stage
    with pytest.raises(dataclasses.FrozenInstanceError):
        stage.kind = "other"
    for name in (name for name, kind in setting_types(cls).items() if get_origin(kind) is Literal):
        with pytest.raises(ValueError, match=f"{name}='other'; use "):
            replace(stage, **{name: "other"})
    for field in dataclasses.fields(cls):
        with pytest.raises(ValueError, match=rf"{slot} {cls.kind}: {field.name}=None; expected a value like"):
            stage_from(slot, stage_json(stage) | {field.name: None}, kinds()[slot])


@dataclass(frozen=True)
class PerBlock(Rtn):
    """Rounding per token after a division by a number per channel, which is stored for a whole block."""

    kind: ClassVar[str] = "per_block"

    def fields(self, rows, width, geometry, dtype):
        return super().fields(rows, width, geometry, dtype) | {"channel": ((width,), torch.float16)}


def test_a_field_that_is_not_token_first_is_refused_where_single_tokens_are_read():
    """Indexed by token it would give another token's numbers: 45% error without an exception, where sizes agree."""
    scheme = Scheme(PerBlock(4, 64))
    plain = Recipe("r", scheme, scheme, window=Window(block=GEOMETRY.width)).check(GEOMETRY)
    with pytest.raises(ValueError, match="r: per_block stores channel for a whole block, so single tokens cannot"):
        replace(plain, policies=(ShadowChunks(),)).check(GEOMETRY)
    token_first = Scheme(Rtn(4, 64))
    Recipe("r", token_first, token_first, policies=(ShadowChunks(),)).check(GEOMETRY)
