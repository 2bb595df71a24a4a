"""Name the stages that keys, or values, of a layer go through, and the tokens that stay exact; and as JSON."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvq_runtime.kinds import KINDS, LATER, check_keys, stage_from, stage_json
from kvq_runtime.stages import escape, predict

Half = Literal["key", "value"]
HALVES: tuple[Half, ...] = get_args(Half)


@dataclass(frozen=True)
class Side:
    """How the keys, or the values, of a layer are stored.

    predict   what is subtracted first, or None
    rotate    the rotation of what is left, or None
    quantize  the rounding
    feedback  what the error of channels rounded before moves in those after, or None; of keys
    correct   what mends the rounding, or None
    axis      "token": groups are channels of one token; "channel": groups are tokens of one channel, inside a block
    sinks     tokens at the start of every row that stay exact
    recent    newest tokens that stay exact, at least
    block     tokens that are encoded together
    """

    quantize: Any
    predict: Any = None
    rotate: Any = None
    feedback: Any = None
    correct: Any = None
    axis: Literal["token", "channel"] = "token"
    sinks: int = 4
    recent: int = 128
    block: int = 128

    @property
    def window(self) -> tuple[int, int, int]:
        """(sinks, recent, block): what decides when a token is encoded."""
        return self.sinks, self.recent, self.block

    @property
    def fitted_quantizer(self) -> bool:
        """Whether the quantizer has tensors of its own, from calibration."""
        return hasattr(self.quantize, "specs")

    @property
    def fitted(self) -> bool:
        """Whether any stage needs calibration."""
        escapes = isinstance(self.correct, escape.Escape)
        return bool(self.predict or self.feedback) or escapes or self.fitted_quantizer

    def inputs(self, layer: int, half: Half) -> tuple[bool, tuple[int, ...]]:
        """What the prediction of this layer reads: (this layer's decoded keys?, which layers below)."""
        if not isinstance(self.predict, predict.Linear):
            return False, ()
        below = tuple(depth for depth in self.predict.below if depth <= layer)
        return (half == "value" and self.predict.keys and bool(below or not self.predict.below)), below

    def predictor(self, layer: int, half: Half) -> Any:
        """The predictor of this layer: with nothing underneath to predict from, the mean."""
        keys, below = self.inputs(layer, half)
        if isinstance(self.predict, predict.Linear) and not keys and not below:
            return predict.Mean()
        return self.predict


def side_json(side: Side) -> dict:
    """A side as JSON; without the stages of `LATER` that it does not have, as in files older than those."""
    given = {f.name: getattr(side, f.name) for f in dataclasses.fields(side)}
    given |= {stage: stage_json(given[stage]) for stage in KINDS if given[stage] is not None}
    return {name: value for name, value in given.items() if value is not None or name not in LATER}


def side_from(given: Any) -> Side:
    """Read a side; unknown keys, kinds and types are refused with a ValueError."""
    names = {f.name for f in dataclasses.fields(Side)}
    check_keys(given, names, "side", optional=names - {"quantize"})
    stages = {stage: stage_from(stage, given.get(stage), kinds) for stage, kinds in KINDS.items()}
    return Side(**{**given, **stages})
