"""The contract of a stage: every kind is found, answers what it is asked, and is refused where it cannot serve."""

import dataclasses
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_origin

import pytest

from kvq_runtime.geometry import Geometry
from kvq_runtime.policies.shadow_chunks import ShadowChunks
from kvq_runtime.recipe import Recipe
from kvq_runtime.stages.kinds import kinds, stage_from, stage_json
from kvq_runtime.stages.rtn import Rtn
from kvq_runtime.stages.stage import (
    NOTHING,
    SLOTS,
    Correction,
    Feedback,
    Predictor,
    Quantizer,
    Rotation,
    Scheme,
    setting_types,
)
from kvq_runtime.vllm import plugin

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
class Differences(Rtn):
    """Rounding of the difference to the token before: each field begins with the token, and says nothing alone."""

    kind: ClassVar[str] = "differences"
    by_token: ClassVar[bool] = False

    def encode(self, x_NRW, rotation, tensors, geometry):
        return super().encode(x_NRW.diff(dim=1, prepend=0 * x_NRW[:, :1]), rotation, tensors, geometry)

    def decode(self, fields, width, geometry, tensors=NOTHING, out=None):
        return super().decode(fields, width, geometry, tensors).cumsum(1)


def test_tokens_that_are_encoded_together_are_not_read_alone_whatever_the_shapes_of_fields():
    """Decoded alone a token would be wrong by 141%, without an exception."""
    together, alone = Scheme(Differences(4, 64)), Scheme(Rtn(4, 64))
    plain = Recipe("r", together, alone).check(GEOMETRY)
    with pytest.raises(ValueError, match="r: differences encodes the tokens of a block together, so single tokens"):
        replace(plain, policies=(ShadowChunks(),)).check(GEOMETRY)
    assert plugin.by_block(plain)
    by_token = Recipe("r", alone, alone)
    replace(by_token, policies=(ShadowChunks(),)).check(GEOMETRY)
    assert not plugin.by_block(by_token)
    assert plugin.by_block(Recipe("r", replace(alone, axis="channel"), alone))
