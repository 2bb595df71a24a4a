"""Name the stages of a quantizer and their settings. Every method of the field is a Recipe; a recipe is plain JSON.

Scheme    predict → rotate → feedback, quantize → correct: how keys, or values, of a layer are stored
Window    which tokens stay exact, and how many are encoded together; one for keys, values and all layers
Recipe    a Scheme for keys, one for values, other Schemes for single layers, the Window, and policies: which tokens are
          held or read, if not all, and when
Family    the recipes of one method, by name
position  "pre": keys are encoded as they are before RoPE · "post": as the model caches them · "segment": less the angle
          of the middle of their segment, so that RoPE turns them by their place in it alone

What a stage is, and a Scheme, is in `stages/stage.py`; each says itself what it cannot be combined with.
"""

import dataclasses
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, cached_property
from importlib import import_module
from typing import Any, Literal, get_args

from kvq_runtime.errors import NotFound, check_type
from kvq_runtime.geometry import ROLES, Geometry, Role, Window
from kvq_runtime.policy_setting import PolicySetting, policy_kinds
from kvq_runtime.stages.kinds import check_keys, kinds, stage_from, stage_json
from kvq_runtime.stages.stage import SLOTS, Scheme, Site, Stage

Position = Literal["pre", "post", "segment"]
OURS = frozenset({"queries", "attention"})  # what a recipe may need that only our own attention hands out


@dataclass(frozen=True)
class Recipe:
    """A quantizer for the whole cache of a model, named in lower case (`aqua-2bit`).

    key        the stages that keys of every layer go through
    value      the same of values
    position   "pre": keys are encoded as they are before RoPE · "post": as the model caches them · "segment": turned
               back by the position τ of the middle of their segment, k' = R_{-τ} k
    layers     layer → other stages of its keys and values
    window     which tokens stay exact, and how many are encoded together
    policies   choices about tokens: which are held, read, or kept exact for longer, and what is fitted to the prompt;
               none: all tokens are held and read, and `window` alone says which are exact
    key_bias   "removed": keys without a prediction are encoded less the bias of the model's k_proj, if it has one ·
               "kept": as they are (`kvq_runtime/codec/key_bias.py`)
    segment    tokens of a segment, which divide a block
    """

    name: str
    key: Scheme
    value: Scheme
    position: Position = "post"
    layers: Mapping[int, tuple[Scheme, Scheme]] = field(default_factory=dict)
    summary: str = field(default="", compare=False)
    window: Window = field(default_factory=Window)
    policies: tuple[PolicySetting, ...] = ()
    key_bias: Literal["removed", "kept"] = "removed"
    segment: int = 32

    def __repr__(self) -> str:
        about = self.summary or f"{self.key.quantize.kind} keys, {self.value.quantize.kind} values"
        window, fit = self.window, "to be fitted" if self.fitted else "fitted to the prompt" if self.fits_prompt else ""
        exact = f"exact: first {window.sinks}, newest {window.recent}"
        return f"Recipe({'; '.join(filter(None, [self.name, about, fit, exact]))})"

    def at(self, layer: int) -> tuple[Scheme, Scheme]:
        """Return the Schemes of keys and values in this layer."""
        return self.layers.get(layer, (self.key, self.value))

    def scheme(self, layer: int, role: Role) -> Scheme:
        """One of the two Schemes of this layer."""
        return self.at(layer)[ROLES.index(role)]

    def sites(self, geometry: Geometry, layers: Iterable[int] | None = None) -> Iterator[Site]:
        """Return the sites of its Schemes: keys, then values, of each of these layers; None: of all."""
        for layer in range(geometry.layers) if layers is None else layers:
            for role, scheme in zip(ROLES, self.at(layer), strict=True):
                yield Site(scheme, role, layer, self.position, self.window, geometry)

    def policy(self, slot: str) -> PolicySetting | None:
        """Return the policy of this slot, "window", "select" or "online"; None if the recipe has none."""
        return next((policy for policy in self.policies if policy.slot == slot), None)

    def with_schemes(self, layer: int, key: Scheme, value: Scheme) -> "Recipe":
        """Return the same recipe with these Schemes in one layer."""
        return replace(self, layers={**self.layers, layer: (key, value)})

    @property
    def pairs(self) -> list[tuple[Scheme, Scheme]]:
        """The Schemes of keys and values that the recipe names: everywhere, and in single layers."""
        return [(self.key, self.value), *self.layers.values()]

    @property
    def schemes(self) -> list[Scheme]:
        """Every Scheme the recipe names."""
        return [scheme for pair in self.pairs for scheme in pair]

    @property
    def fits_prompt(self) -> bool:
        """True if a cache fits the recipe's stages to each row's own tokens."""
        return any(policy.fits_prompt for policy in self.policies)

    @property
    def fitted(self) -> bool:
        """True if the recipe has stages that need calibration."""
        return not self.fits_prompt and any(scheme.fitted for scheme in self.schemes)

    def fits(self, scheme: Scheme) -> bool:
        """Return True if a cache fits this scheme itself."""
        return self.fits_prompt and scheme.fitted

    @cached_property
    def cross_layer(self) -> bool:
        """True if a layer is predicted from decoded layers, so that layers are encoded and read in order."""
        return any(scheme.cross_layer for scheme in self.schemes)

    @cached_property
    def needs(self) -> frozenset[str]:
        """The inputs of the cache beside keys and values: "positions" (with cos and sin), "queries", "attention".

        Queries that choose chunks are not among it: where nobody tells them, all tokens are read.
        """
        turned = self.position != "post" or any(key.predict is not None for key, _ in self.pairs)
        return frozenset({"positions"} if turned else ()).union(*(policy.needs(self) for policy in self.policies))

    @property
    def arrival_dependent(self) -> bool:
        """True if blocks depend on how tokens arrive: same calls, same blocks; False: same tokens, same blocks."""
        return any(policy.arrival_dependent for policy in self.policies)

    @property
    def widest(self) -> "Recipe":
        """The same recipe with a window that is always as long as its own may become."""
        recent, block = self.window.recent, self.window.block
        most = max((policy.most(recent, block) for policy in self.policies), default=recent)
        kept = tuple(policy for policy in self.policies if policy.most(recent, block) == recent)
        return self if most == recent else replace(self.with_exact(recent=most), policies=kept)

    def with_exact(self, sinks: int | None = None, recent: int | None = None) -> "Recipe":
        """The recipe with so many exact tokens at the start of every row (`sinks`), and at its end; None: unchanged."""
        changes = {name: value for name, value in (("sinks", sinks), ("recent", recent)) if value is not None}
        return replace(self, window=replace(self.window, **changes))

    def check(self, geometry: Geometry | None = None) -> "Recipe":
        """Return the recipe, or raise a ValueError that says what is impossible, and what to do.

        Every stage and policy says so itself; with a geometry they are asked about its heads and layers, too.
        """
        if self.position not in get_args(Position):
            raise ValueError(f"{self.name}: position={self.position!r}; use one of {get_args(Position)}")
        if self.position == "segment" and (self.segment < 2 or self.window.block % self.segment):
            raise ValueError(
                f"{self.name}: segment={self.segment}; use a divisor of the {self.window.block} tokens of a block, at "
                "least 2"
            )
        if self.position == "segment" and self.policies:
            kinds_here = ", ".join(policy.kind for policy in self.policies)
            raise ValueError(
                f'{self.name}: position="segment" needs every token in its place, without {kinds_here}; drop it'
            )
        if self.key_bias not in ("removed", "kept"):
            raise ValueError(f'{self.name}: key_bias={self.key_bias!r}; use "removed" or "kept"')
        for pair in self.pairs:
            for role, scheme in zip(ROLES, pair, strict=True):
                self._check_site(Site(scheme, role, 0, self.position, self.window))
        self._check_policies()
        if geometry is None:
            return self
        beyond = [layer for layer in self.layers if not 0 <= layer < geometry.layers]
        if beyond:
            raise ValueError(f"{self.name}: settings for layers {beyond}, but the model has {geometry.layers}")
        for site in self.sites(geometry):
            self._check_site(site)
        for policy in self.policies:
            _asked(self.name, policy.check, self, geometry)
        return self

    def _check_site(self, site: Site) -> None:
        scheme = site.scheme
        where = self.name if site.geometry is None else f"{self.name}, layer {site.layer} {site.role}"
        if scheme.axis not in ("token", "channel"):
            raise ValueError(f'{where}: axis={scheme.axis!r}; use "token" or "channel"')
        for slot in SLOTS:
            stage = getattr(scheme, slot)
            fits = stage.slot == slot if isinstance(stage, Stage) else stage is None and slot != "quantize"
            if not fits:
                raise ValueError(f"{where}: {slot}={stage!r}; use one of {sorted(kinds()[slot])}")
        for _, stage in scheme.stages:
            _asked(where, stage.check, site)

    def _check_policies(self) -> None:
        if not all(isinstance(policy, PolicySetting) for policy in self.policies):
            raise ValueError(f"{self.name}: policies={self.policies!r}; use some of {sorted(policy_kinds())}")
        slots = [policy.slot for policy in self.policies]
        if len({*slots}) < len(slots):
            both = " and ".join(policy.kind for policy in self.policies)
            raise ValueError(f"{self.name}: two policies for one choice, {both}; set one of them to none")
        for policy in self.policies:
            _asked(self.name, policy.check, self, None)

    def to_json(self) -> dict:
        """Return the recipe as JSON; `from_json` gives back an equal one."""
        kept = {"key_bias": self.key_bias} if self.key_bias == "kept" else {}
        return {
            "name": self.name,
            "summary": self.summary,
            "position": self.position,
            **kept,
            **({"segment": self.segment} if self.position == "segment" else {}),
            "window": dataclasses.asdict(self.window),
            **_pair_json(self.key, self.value),
            "layers": {str(layer): _pair_json(*pair) for layer, pair in sorted(self.layers.items())},
            "policies": [stage_json(policy) for policy in self.policies],
        }

    @staticmethod
    def from_json(stated: Any) -> "Recipe":
        """Read a recipe. ValueError: a key, kind or type that is unknown, or what cannot be."""
        optional = {"summary", "position", "key_bias", "segment", "window", "layers", "policies"}
        check_keys(stated, {"name", *ROLES} | optional, "recipe", optional)
        for name in ("name", "position", "key_bias", "summary"):
            if not isinstance(stated.get(name, ""), str):
                raise ValueError(f"recipe: {name} must be text, not {stated[name]!r}")
        segment = stated.get("segment", 32)
        if type(segment) is not int:
            raise ValueError(f"recipe: segment must be a whole number, not {segment!r:.200}")
        layers, window, policies = stated.get("layers", {}), stated.get("window", {}), stated.get("policies", [])
        if not isinstance(layers, dict) or any(layer not in map(str, range(1 << 12)) for layer in layers):
            raise ValueError("recipe: layers must be an object whose names are layer numbers")
        for layer in layers.values():
            check_keys(layer, {*ROLES}, "recipe layer")
        check_keys(window, {*WINDOW}, "recipe window", {*WINDOW})
        if not isinstance(policies, list):
            raise ValueError(f"recipe: policies must be a list, not {policies!r:.200}")
        return Recipe(
            name=stated["name"],
            position=stated.get("position", "post"),
            key_bias=stated.get("key_bias", "removed"),
            segment=segment,
            key=_scheme_from(stated["key"]),
            value=_scheme_from(stated["value"]),
            layers={int(n): (_scheme_from(pair["key"]), _scheme_from(pair["value"])) for n, pair in layers.items()},
            summary=stated.get("summary", ""),
            window=Window(**window),
            policies=tuple(stage_from("policies", policy, policy_kinds()) for policy in policies),
        ).check()


def with_each(recipe: Recipe, change: Callable[[Scheme], Scheme]) -> Recipe:
    """Return the recipe with every Scheme changed."""
    layers = {layer: (change(key), change(value)) for layer, (key, value) in recipe.layers.items()}
    return replace(recipe, key=change(recipe.key), value=change(recipe.value), layers=layers)


def attends(recipe: Recipe) -> bool:
    """Return True if a recipe needs our own attention: its queries, its weights, or a reading that they choose."""
    return bool(recipe.needs & OURS) or weighs(recipe)


def weighs(recipe: Recipe) -> bool:
    """Return True if a policy of it holds, keeps exact or reads tokens by the weight that attention gives them."""
    return "attention" in recipe.needs or any(policy.chooses_by_query for policy in recipe.policies)


def _asked(where: str, check: Callable[..., None], *arguments: Any) -> None:
    """Call a check; what it refuses is said with the recipe's name."""
    try:
        check(*arguments)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


WINDOW = tuple(setting.name for setting in dataclasses.fields(Window))


def _pair_json(key: Scheme, value: Scheme) -> dict:
    return {role: _scheme_json(scheme) for role, scheme in zip(ROLES, (key, value), strict=True)}


def _scheme_json(scheme: Scheme) -> dict:
    stages = {slot: getattr(scheme, slot) for slot in SLOTS}
    return {"axis": scheme.axis} | {slot: None if s is None else stage_json(s) for slot, s in stages.items()}


def _scheme_from(stated: Any) -> Scheme:
    """Read a scheme. ValueError: a key, kind or type that is unknown."""
    names = {"axis", *SLOTS}
    check_keys(stated, names, "scheme", optional=names - {"quantize"})
    stages = {slot: stage_from(slot, stated.get(slot), known) for slot, known in kinds().items()}
    return Scheme(**stages, axis=stated.get("axis", "token"))


@dataclass(frozen=True)
class Family:
    """The recipes of one method: `FAMILY` of every file of `kvq_runtime/recipes`, where nothing else names the method.

    presets     name → a function of the name that makes the recipe
    compared    presets that are compared where none are asked for
    """

    presets: Mapping[str, Callable[[str], Recipe]]
    compared: tuple[str, ...] = ()

    def recipes(self) -> list[Recipe]:
        """Make every preset."""
        return [make(name) for name, make in self.presets.items()]


@cache
def families() -> dict[str, Family]:
    """Every method that comes with kvq, by the file of `kvq_runtime/recipes` that it is in."""
    return {name: _family(name) for name in _files()}


@cache
def _files() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(import_module("kvq_runtime.recipes").__path__))


@cache
def _family(file: str) -> Family:
    return import_module(f"kvq_runtime.recipes.{file}").FAMILY


def presets() -> dict[str, Recipe]:
    """Every recipe that comes with kvq, by name."""
    return {recipe.name: recipe for family in families().values() for recipe in family.recipes()}


def is_preset(name: str) -> bool:
    """Return True if a recipe of this name comes with kvq."""
    return _maker(name) is not None


def preset(name: str) -> Recipe:
    """Return the recipe of this name; `kvq recipes` lists them. NotFound, a ValueError, lists similar names."""
    check_type("name", name, str, 'that of a recipe, as in preset("kivi-4bit")')
    make = _maker(name)
    if make is not None:
        return make(name)
    if name.split("-")[0] == "auto":
        asked = "kvq-calibrate --recipe auto --bits B"
        raise NotFound(
            f"no recipe {name!r}: its bits are chosen on a model; {asked} does, and publishes what is to be loaded"
        )
    names = [preset for family in families().values() for preset in family.presets]
    close = get_close_matches(name, names, 8)
    there = ", ".join(close) or f"names that begin with {', '.join(sorted({each.partition('-')[0] for each in names}))}"
    near = f"; kvq recipes {close[0]} prints settings: {close[0]}+PATH=VALUE is another recipe" if close else ""
    raise NotFound(f"no recipe {name!r}; there are {there} (kvq recipes lists all{near})")


def _maker(name: str) -> Callable[[str], Recipe] | None:
    """Return the function that makes a preset; a file that the name begins with is read before the others."""
    for file in sorted(_files(), key=lambda file: not name.startswith(file.replace("_", "-"))):
        if name in (presets_of_file := _family(file).presets):
            return presets_of_file[name]
    return None
