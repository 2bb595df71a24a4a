"""Name the stages of a quantizer and their settings. Every method of the field is a Recipe; a recipe is plain JSON.

position  "pre": keys are encoded as they are before RoPE · "post": as the model caches them
Side      predict → rotate → feedback, quantize → correct, per token or per channel, and the tokens kept exact
Recipe    a Side for keys, one for values, other Sides for single layers, and which tokens are held, if not all
"""

import dataclasses
import json
import pkgutil
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import Any, Literal, get_args

from kvq_runtime.geometry import Geometry
from kvq_runtime.stages import (
    escape,
    exact,
    feedback,
    grid,
    lloyd,
    low_rank,
    mixed,
    nuq,
    online,
    polar,
    predict,
    rotate,
    rtn,
    select,
    sparse,
    window,
)  # fmt: skip

KINDS: dict[str, dict[str, type]] = {
    "predict": {kind.kind: kind for kind in predict.KINDS},
    "rotate": {kind.kind: kind for kind in rotate.KINDS},
    "quantize": {kind.kind: kind for module in (exact, grid, lloyd, mixed, nuq, polar, rtn) for kind in module.KINDS},
    "feedback": {kind.kind: kind for kind in feedback.KINDS},
    "correct": {kind.kind: kind for module in (escape, low_rank, sparse) for kind in module.KINDS},
}
LATER = ("feedback", "correct")  # stages younger than the file format: without one, a side does not speak of it
WINDOWS: dict[str, type] = {kind.kind: kind for kind in window.KINDS}
ONLINE: dict[str, type] = {kind.kind: kind for kind in online.KINDS}
OURS = frozenset({"queries", "attention"})  # what a recipe may need that only our own attention hands out
SELECT: dict[str, type] = {kind.kind: kind for kind in select.KINDS}
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


@dataclass(frozen=True)
class Recipe:
    """A quantizer for the whole cache of a model, named in lower case (`aqua-2bit`).

    window   what may keep more than the recent tokens exact, or None: `sinks`, `recent` and `block` say it all
    online   the tokens of each row to which stages are fitted in the cache, or None: they are calibrated
    """

    name: str
    key: Side
    value: Side
    position: Literal["pre", "post"] = "post"
    layers: Mapping[int, tuple[Side, Side]] = field(default_factory=dict)
    summary: str = field(default="", compare=False)
    window: Any = None
    select: Any = None
    online: Any = None

    def at(self, layer: int) -> tuple[Side, Side]:
        """The Sides of keys and values in this layer."""
        return self.layers.get(layer, (self.key, self.value))

    def side(self, layer: int, half: Half) -> Side:
        """One of the two Sides of this layer."""
        return self.at(layer)[HALVES.index(half)]

    def with_sides(self, layer: int, key: Side, value: Side) -> "Recipe":
        """The same recipe with these Sides in one layer."""
        return replace(self, layers={**self.layers, layer: (key, value)})

    @property
    def sides(self) -> list[Side]:
        """Every Side the recipe names."""
        return [self.key, self.value, *(side for pair in self.layers.values() for side in pair)]

    @property
    def fitted(self) -> bool:
        """Whether the recipe has stages that need calibration."""
        return self.online is None and any(side.fitted for side in self.sides)

    def fits(self, side: Side) -> bool:
        """Whether a cache fits this side itself."""
        return self.online is not None and side.fitted

    @cached_property
    def chained(self) -> bool:
        """Whether a layer is predicted from decoded layers, so that layers are encoded and read in order."""
        return any(isinstance(side.predict, predict.Linear) for side in self.sides)

    @cached_property
    def needs(self) -> frozenset[str]:
        """What the cache is told beside keys and values: "positions" (with cos and sin), "queries", "attention".

        Queries that choose chunks are not among it: where nobody tells them, all tokens are read.
        """
        asked = {key.feedback.queries for key, _ in self._pairs() if key.feedback} if self.online else set()
        turned = self.position == "pre" or any(pair[0].predict is not None for pair in self._pairs())
        wanted = {
            "positions": turned or bool(asked - {"after"}),
            "queries": bool(asked),
            "attention": self.window is not None or isinstance(self.select, select.Heavy),
        }
        return frozenset(name for name in wanted if wanted[name])

    @property
    def arrival_dependent(self) -> bool:
        """Whether blocks depend on how tokens arrive: then same calls, same blocks; else same tokens, same blocks."""
        changing = self.window is not None or isinstance(self.select, select.Heavy)
        return changing or self.online is not None

    @property
    def widest(self) -> "Recipe":
        """The same recipe with a window that is always as long as its own may become."""
        if self.window is None:
            return self
        return replace(self.with_exact(recent=self.window.most(self.key.recent, self.key.block)), window=None)

    def with_exact(self, sinks: int | None = None, recent: int | None = None) -> "Recipe":
        """The recipe with so many exact tokens at the start of every row, and at its end; None: its own."""
        given = {name: value for name, value in (("sinks", sinks), ("recent", recent)) if value is not None}

        def changed(pair: tuple[Side, Side]) -> tuple[Side, Side]:
            return replace(pair[0], **given), replace(pair[1], **given)

        key, value = changed((self.key, self.value))
        return replace(self, key=key, value=value, layers={n: changed(pair) for n, pair in self.layers.items()})

    def _pairs(self) -> list[tuple[Side, Side]]:
        return [(self.key, self.value), *self.layers.values()]

    def check(self, geometry: Geometry | None = None) -> "Recipe":
        """Return the recipe, or raise a ValueError that says what cannot be, and what to do."""
        if self.position not in ("pre", "post"):
            raise ValueError(f'{self.name}: position={self.position!r}; use "pre" or "post"')
        for side in self.sides:
            self._check_side(side)
        if any(value.feedback for _, value in self._pairs()):
            raise ValueError(f"{self.name}: queries say nothing of values; give feedback to keys alone")
        if self.position == "post" and any(
            key.feedback and key.feedback.queries != "after" for key, _ in self._pairs()
        ):
            raise ValueError(f'{self.name}: keys after RoPE meet queries after RoPE; use queries="after", or "pre"')
        if any(isinstance(pair[0].rotate, rotate.OutputBasis) for pair in self._pairs()):
            raise ValueError(f"{self.name}: an output basis weighs values; give keys a plain basis")
        windows = {(pair[0].window, pair[1].window) for pair in self._pairs()}
        if len(windows) > 1:
            raise ValueError(f"{self.name}: sinks, recent and block differ by layer; they belong to the whole recipe")
        if self.window is not None and not isinstance(self.window, tuple(WINDOWS.values())):
            raise ValueError(f"{self.name}: window={self.window!r}; use one of {sorted(WINDOWS)}, or None")
        if (self.chained or self.window) and self.key.window != self.value.window:
            raise ValueError(
                f"{self.name}: keys and values of a predicted recipe, or one with a dynamic window, are encoded "
                "together; give both the same "
                f"sinks, recent and block (given {self.key.window} and {self.value.window})"
            )
        if self.select is not None and not isinstance(self.select, tuple(SELECT.values())):
            raise ValueError(f"{self.name}: select={self.select!r}; use one of {sorted(SELECT)}, or none")
        if self.select is not None and self.window is not None:
            raise ValueError(f"{self.name}: tokens are selected behind a fixed window; drop select, or window")
        if isinstance(self.select, select.Heavy) and self.key.window != self.value.window:
            raise ValueError(f"{self.name}: tokens are held with key and value; give both the same window")
        if isinstance(self.select, select.Chunks):
            self._check_chunks()
        if self.online is not None:
            self._check_online()
        if geometry is not None:
            self._check_geometry(geometry)
        return self

    def _check_chunks(self) -> None:
        if any(side.block % self.select.chunk for side in self.sides):
            raise ValueError(f"{self.name}: chunks of {self.select.chunk} do not divide the blocks; use chunks that do")
        if self.chained or any(side.correct or side.axis != "token" for side in self.sides):
            raise ValueError(
                f"{self.name}: single tokens are decoded; use sides per token, with no prediction or mending"
            )
        if self.position == "post" and any(pair[0].predict for pair in self._pairs()):
            raise ValueError(f"{self.name}: a mean after RoPE turns with each token; encode keys before RoPE")

    def _check_online(self) -> None:
        if not isinstance(self.online, tuple(ONLINE.values())):
            raise ValueError(f"{self.name}: online={self.online!r}; use one of {sorted(ONLINE)}, or None")
        if not any(side.fitted for side in self.sides):
            raise ValueError(f"{self.name}: nothing is fitted; drop online")
        if self.window is not None or self.select is not None:
            raise ValueError(f"{self.name}: a choice of tokens does not wait for a fit; drop window, select, or online")
        for side in self.sides:
            if side.predict is not None and not isinstance(side.predict, predict.Mean):
                raise ValueError(f"{self.name}: {side.predict.kind} needs calibration; online use a mean, or nothing")
            if isinstance(side.correct, escape.Escape) or isinstance(side.rotate, rotate.OutputBasis):
                stage = side.correct or side.rotate
                raise ValueError(f"{self.name}: {stage.kind} needs calibration; drop it, or online")
            if side.fitted_quantizer and not isinstance(side.quantize, (mixed.Mixed, polar.PolarFitted)):
                raise ValueError(
                    f"{self.name}: {side.quantize.kind} needs calibration; online use mixed or polar_fitted"
                )
            if isinstance(side.quantize, mixed.Mixed) and side.quantize.target:
                raise ValueError(f"{self.name}: target={side.quantize.target} would differ by row; online give counts")
        if any(key.feedback and key.feedback.queries == "averaged" for key, _ in self._pairs()):
            raise ValueError(f'{self.name}: queries are averaged over distances offline; use "before" or "after"')
        if self.position == "post" and any(key.predict for key, _ in self._pairs()):
            raise ValueError(f'{self.name}: a mean of keys is fitted online before RoPE alone; use position "pre"')

    def _check_side(self, side: Side) -> None:
        for name, least in (("sinks", 0), ("recent", 0), ("block", 1)):
            given = getattr(side, name)
            if not isinstance(given, int) or isinstance(given, bool) or not least <= given <= 1 << 20:
                raise ValueError(f"{self.name}: {name}={given!r}; use a whole number from {least} to {1 << 20}")
        if side.axis not in ("token", "channel"):
            raise ValueError(f'{self.name}: axis={side.axis!r}; use "token" or "channel"')
        if not isinstance(side.quantize, tuple(KINDS["quantize"].values())):
            raise ValueError(f"{self.name}: quantize={side.quantize!r}; use one of {sorted(KINDS['quantize'])}")
        if isinstance(side.quantize, exact.Exact) and (side.rotate or side.predict or side.axis != "token"):
            raise ValueError(f"{self.name}: exact keeps tokens as they are; drop predict, rotate and axis")
        if isinstance(side.quantize, mixed.Mixed) != isinstance(side.rotate, rotate.Basis):
            raise ValueError(f"{self.name}: a basis and mixed bits belong together; give both, or neither")
        if isinstance(side.quantize, mixed.Mixed) and (side.axis != "token" or side.block % 8):
            raise ValueError(f'{self.name}: mixed bits need axis "token" and a block of a multiple of 8 tokens')
        if isinstance(side.correct, escape.Escape) and (side.axis != "token" or side.block > 32767):
            raise ValueError(f'{self.name}: escape needs axis "token" and blocks below 32768')
        if side.correct is not None and isinstance(side.quantize, exact.Exact):
            raise ValueError(f"{self.name}: exact leaves nothing to correct; drop correct")
        if side.fitted_quantizer and side.axis != "token":
            raise ValueError(f'{self.name}: {side.quantize.kind} is fitted to tokens; use axis "token"')
        if isinstance(side.quantize, nuq.Nuq) and side.rotate:
            raise ValueError(f"{self.name}: nuq takes channels as they are; use it without rotate")

        if side.feedback is not None and isinstance(side.quantize, (exact.Exact, mixed.Mixed)):
            raise ValueError(
                f"{self.name}: feedback needs channels that are rounded in groups, not {side.quantize.kind}"
            )

    def _check_geometry(self, geometry: Geometry) -> None:
        beyond = [layer for layer in self.layers if not 0 <= layer < geometry.layers]
        if beyond:
            raise ValueError(f"{self.name}: settings for layers {beyond}, but the model has {geometry.layers}")
        for layer in range(geometry.layers):
            for half in HALVES:
                side = self.side(layer, half)
                width = geometry.width if side.axis == "token" else side.block
                try:
                    side.quantize.order(width, geometry)
                    if side.rotate is not None and not isinstance(side.rotate, rotate.Basis):
                        side.rotate.size(width, geometry)
                    if side.feedback is not None:
                        side.feedback.check(side.axis, side.rotate, side.quantize, geometry)
                    if side.correct is not None:
                        side.correct.fields(side.block, geometry)
                except ValueError as error:
                    raise ValueError(f"{self.name}, layer {layer} {half}: {error}") from None

    def to_json(self) -> dict:
        """The recipe as JSON; `from_json` gives back an equal one."""
        sides = {"key": _side_json(self.key), "value": _side_json(self.value)}
        layers = {
            str(layer): {half: _side_json(side) for half, side in zip(HALVES, pair, strict=True)}
            for layer, pair in sorted(self.layers.items())
        }
        found = {"name": self.name, "position": self.position, **sides, "layers": layers, "summary": self.summary}
        later = {
            "window": self.window,
            "select": self.select,
            "online": self.online,
        }  # not spoken of where there is none, as in older files
        return found | {name: _stage_json(stage) for name, stage in later.items() if stage is not None}

    @staticmethod
    def from_json(given: Any) -> "Recipe":
        """Read a recipe; unknown keys, kinds and types are refused with a ValueError."""
        optional = {"layers", "summary", "window", "select", "online"}
        _keys(given, {"name", "position", "key", "value"} | optional, "recipe", optional)
        for name in ("name", "position", "summary"):
            if not isinstance(given.get(name, ""), str):
                raise ValueError(f"recipe: {name} must be text, not {given[name]!r}")
        layers = given.get("layers", {})
        if not isinstance(layers, dict) or any(layer not in map(str, range(1 << 12)) for layer in layers):
            raise ValueError("recipe: layers must be an object whose names are layer numbers")
        for layer in layers.values():
            _keys(layer, {"key", "value"}, "recipe layer")
        return Recipe(
            name=given["name"],
            position=given["position"],
            key=_side_from(given["key"]),
            value=_side_from(given["value"]),
            layers={int(n): (_side_from(pair["key"]), _side_from(pair["value"])) for n, pair in layers.items()},
            select=_stage_from("select", given.get("select"), SELECT),
            summary=given.get("summary", ""),
            window=_stage_from("window", given.get("window"), WINDOWS),
            online=_stage_from("online", given.get("online"), ONLINE),
        ).check()


def _side_json(side: Side) -> dict:
    """A side as JSON; without the stages of `LATER` that it does not have, as in files older than those."""
    given = {f.name: getattr(side, f.name) for f in dataclasses.fields(side)}
    given |= {stage: _stage_json(given[stage]) for stage in KINDS if given[stage] is not None}
    return {name: value for name, value in given.items() if value is not None or name not in LATER}


def _stage_json(stage: Any) -> dict:
    return {"kind": stage.kind} | json.loads(json.dumps(dataclasses.asdict(stage)))


def _side_from(given: Any) -> Side:
    names = {f.name for f in dataclasses.fields(Side)}
    _keys(given, names, "side", optional=names - {"quantize"})
    stages = {stage: _stage_from(stage, given.get(stage), kinds) for stage, kinds in KINDS.items()}
    return Side(**{**given, **stages})


def _stage_from(stage: str, given: Any, kinds: Mapping[str, type]) -> Any:
    if given is None:
        return None
    if not isinstance(given, dict) or not isinstance(given.get("kind"), str) or given["kind"] not in kinds:
        raise ValueError(f"{stage}={given!r:.200}; use an object with a kind of {sorted(kinds)}")
    cls: Any = kinds[given["kind"]]
    settings = {key: value for key, value in given.items() if key != "kind"}
    types = {f.name: f.default for f in dataclasses.fields(cls)}
    _keys(settings, set(types), f"{stage} {cls.kind}", optional=set(types))
    for name, value in settings.items():
        if not _like(value, types[name], name):
            raise ValueError(f"{stage} {cls.kind}: {name}={value!r:.200}; a value like {types[name]!r} is meant")
    return cls(**settings)


def _like(value: Any, example: Any, name: str) -> bool:
    """Whether a JSON value has the type of a setting's default."""
    if isinstance(example, tuple):
        return isinstance(value, list) and len(value) <= 8 and all(_like(item, 1, name) for item in value)
    if isinstance(example, bool) or isinstance(value, bool):
        return isinstance(example, bool) and isinstance(value, bool)
    if name in ("group", "fit_tokens"):
        return isinstance(value, (int, str))
    return isinstance(value, (int, float) if isinstance(example, float) else type(example))


def _keys(given: Any, names: set[str], what: str, optional: Set[str] = frozenset()) -> None:
    if not isinstance(given, dict):
        raise ValueError(f"{what}: an object is meant, not {given!r:.200}")
    unknown, missing = set(given) - names, names - set(given) - optional
    if unknown or missing:
        raise ValueError(f"{what}: unknown keys {sorted(unknown)}, missing keys {sorted(missing)}")


def presets() -> dict[str, Recipe]:
    """Every recipe that comes with kvq, by name: each file of `kvq_runtime/recipes` lists its own in `recipes()`."""
    package = import_module("kvq_runtime.recipes")
    files = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    found = [recipe for name in files for recipe in import_module(f"kvq_runtime.recipes.{name}").recipes()]
    return {recipe.name: recipe for recipe in found}


def preset(name: str) -> Recipe:
    """The recipe of this name; `kvq recipes` lists them."""
    known = presets()
    if name not in known:
        close = [other for other in known if other.split("-")[0] == name.split("-")[0]] or sorted(known)
        raise ValueError(f"no recipe {name!r}; there are {', '.join(close)} (kvq recipes lists all)")
    return known[name]
