"""Name the stages of a quantizer and their settings. Every method of the field is a Recipe; a recipe is plain JSON.

position  "pre": keys are encoded as they are before RoPE · "post": as the model caches them
Side      predict → rotate → feedback, quantize → correct, per token or per channel, and the tokens kept exact
Recipe    a Side for keys, one for values, other Sides for single layers, and which tokens are held, if not all

What a stage may be is in `kinds.py`, a Side in `side.py`, what cannot be combined in `recipe_check.py`.
"""

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from importlib import import_module
from typing import Any, Literal

from kvq_runtime import recipe_check
from kvq_runtime.geometry import Geometry
from kvq_runtime.kinds import ONLINE, SELECT, WINDOWS, check_keys, stage_from, stage_json
from kvq_runtime.side import HALVES, Half, Side, side_from, side_json
from kvq_runtime.stages import predict, select

__all__ = ["HALVES", "OURS", "Half", "Recipe", "Side", "preset", "presets"]

OURS = frozenset({"queries", "attention"})  # what a recipe may need that only our own attention hands out


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
    def pairs(self) -> list[tuple[Side, Side]]:
        """The Sides of keys and values that the recipe names: everywhere, and in single layers."""
        return [(self.key, self.value), *self.layers.values()]

    @property
    def sides(self) -> list[Side]:
        """Every Side the recipe names."""
        return [side for pair in self.pairs for side in pair]

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
        asked = {key.feedback.queries for key, _ in self.pairs if key.feedback} if self.online else set()
        turned = self.position == "pre" or any(pair[0].predict is not None for pair in self.pairs)
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

    def check(self, geometry: Geometry | None = None) -> "Recipe":
        """Return the recipe, or raise a ValueError that says what cannot be, and what to do."""
        recipe_check.check(self, geometry)
        return self

    def to_json(self) -> dict:
        """The recipe as JSON; `from_json` gives back an equal one."""
        sides = {"key": side_json(self.key), "value": side_json(self.value)}
        layers = {
            str(layer): {half: side_json(side) for half, side in zip(HALVES, pair, strict=True)}
            for layer, pair in sorted(self.layers.items())
        }
        found = {"name": self.name, "position": self.position, **sides, "layers": layers, "summary": self.summary}
        later = {"window": self.window, "select": self.select, "online": self.online}  # None: unsaid, as in older files
        return found | {name: stage_json(stage) for name, stage in later.items() if stage is not None}

    @staticmethod
    def from_json(given: Any) -> "Recipe":
        """Read a recipe; unknown keys, kinds and types are refused with a ValueError."""
        optional = {"layers", "summary", "window", "select", "online"}
        check_keys(given, {"name", "position", "key", "value"} | optional, "recipe", optional)
        for name in ("name", "position", "summary"):
            if not isinstance(given.get(name, ""), str):
                raise ValueError(f"recipe: {name} must be text, not {given[name]!r}")
        layers = given.get("layers", {})
        if not isinstance(layers, dict) or any(layer not in map(str, range(1 << 12)) for layer in layers):
            raise ValueError("recipe: layers must be an object whose names are layer numbers")
        for layer in layers.values():
            check_keys(layer, {"key", "value"}, "recipe layer")
        return Recipe(
            name=given["name"],
            position=given["position"],
            key=side_from(given["key"]),
            value=side_from(given["value"]),
            layers={int(n): (side_from(pair["key"]), side_from(pair["value"])) for n, pair in layers.items()},
            select=stage_from("select", given.get("select"), SELECT),
            summary=given.get("summary", ""),
            window=stage_from("window", given.get("window"), WINDOWS),
            online=stage_from("online", given.get("online"), ONLINE),
        ).check()


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
        families = ", ".join(sorted({other.partition("-")[0] for other in known}))
        close = ", ".join(get_close_matches(name, known, 8)) or f"names that begin with {families}"
        raise ValueError(f"no recipe {name!r}; there are {close} (kvq recipes lists all)")
    return known[name]
