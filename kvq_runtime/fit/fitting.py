"""Fit the stages of one scheme, in the order of the pipeline, each to what the stages before it leave.

A stage is fitted by the module of a package of fits that is named as its kind, or as its file; the module offers

    requests(stage)                      the statistics that a fit needs
    solve(stage, statistics, codec)      the stage with the settings that were found, and its tensors by name; `codec`
                                         is the scheme's, as far as it is fitted

A cache that fits to its prompt uses those of `kvq_runtime.fit`; a calibration those of `kvq_calib.fit`, and where there
is none, those of the runtime.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.statistics import Row, Statistic, Statistics
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import ROLES, Recipe, Role, Scheme
from kvq_runtime.stages.stage import SLOTS, Predictor, Queries, Stage

Collect = Callable[[Sequence[Statistic[Any]]], Mapping[Statistic[Any], Any]]


def fit_module(stage: Stage, packages: Sequence[str]) -> ModuleType:
    """The module that fits a stage: named as its kind or its file, from the first of these packages that has one."""
    named = dict.fromkeys((stage.kind, type(stage).__module__.rpartition(".")[2]))
    names = [f"{package}.{name}" for package in packages for name in named]
    for name in names:
        if find_spec(name) is not None:
            return import_module(name)
    absent = " and no ".join(names)
    raise ValueError(f"{stage.kind} cannot be fitted here: there is no {absent}; add it, or fit the stage elsewhere")


def has_to_be_solved(stage: Stage) -> bool:
    """True if a stage has tensors to find; the mean, all that a prediction from nothing has, is held from the start."""
    return stage.fitted and (not isinstance(stage, Predictor) or stage.cross_layer)


def requested(scheme: Scheme, packages: Sequence[str]) -> set[Statistic[Any]]:
    """Every statistic that a fit of the scheme asks for in some layer."""
    modules = [(stage, fit_module(stage, packages)) for _, stage in scheme.stages if has_to_be_solved(stage)]
    return {statistic for stage, module in modules for statistic in module.requests(stage)}


class Fitting:
    """One scheme of one layer at work: the scheme with the settings found so far, its tensors, and their codec.

    The mean of a prediction is held from the start: what follows is fitted about it.
    """

    packages: Sequence[str] = ("kvq_runtime.fit",)

    def __init__(self, recipe: Recipe, layer: int, role: Role, geometry: Geometry, statistics: Statistics):
        self._place = (recipe, layer, role, geometry)
        self.statistics, self.window = statistics, recipe.window
        self.scheme = recipe.scheme(layer, role)
        self.tensors: dict[str, Tensor] = {}
        self.hold({"predict.mean": statistics.mean_C} if self.predictor is not None else {})

    @property
    def predictor(self) -> Predictor | None:
        """The predictor of this layer: with nothing underneath to predict from, the mean."""
        _, layer, role, _ = self._place
        return self.scheme.predictor(layer, role)

    def hold(self, tensors: dict[str, Tensor]) -> None:
        """Take tensors, named by stage, and make the codec of all that is fitted so far."""
        recipe, layer, role, geometry = self._place
        pair = dict(zip(ROLES, recipe.at(layer), strict=True)) | {role: self.scheme}
        self.tensors |= tensors
        codec = Codec(recipe.with_schemes(layer, **pair), layer, role, geometry, self.tensors)
        self.codec = codec.to(self.statistics.mean_C.device)

    def solve(self, collect: Collect, slots: Sequence[str] = SLOTS) -> None:
        """Fit the stages of these slots that have anything to fit: the prediction, then what its residuals are for.

        collect   gives the values of statistics that nobody has asked for yet, all that can be collected by then
        """
        for part in ([slot for slot in slots if slot == "predict"], [slot for slot in slots if slot != "predict"]):
            work = [(slot, stage, fit_module(stage, self.packages)) for slot, stage in self._fitted(part)]
            requested = dict.fromkeys(statistic for _, stage, module in work for statistic in module.requests(stage))
            missing = [statistic for statistic in requested if statistic not in self.statistics.values]
            self.statistics.values |= collect(missing) if missing else {}
            for slot, stage, module in work:
                fitted, tensors = module.solve(stage, self.statistics, self.codec)
                if fitted != stage:
                    self.scheme = replace(self.scheme, **{slot: fitted})
                self.hold({f"{slot}.{field}": tensor for field, tensor in tensors.items()})

    def _fitted(self, slots: Sequence[str]) -> Iterator[tuple[str, Stage]]:
        """Return the stages of these slots that have anything to fit."""
        for slot in slots:
            stage = self.predictor if slot == "predict" else getattr(self.scheme, slot)
            if stage is not None and has_to_be_solved(stage):
                yield slot, stage


def fit_row(
    recipe: Recipe,
    layer: int,
    role: Role,
    geometry: Geometry,
    x_NC: Tensor,
    queries: Callable[[Queries], Tensor] | None = None,
) -> Codec:
    """Return the codec of one scheme of one layer, fitted to these tokens of one row.

    x_NC      keys in the recipe's position, or values, float32; at least one
    queries   as of a `Row`
    """
    fitting = Fitting(recipe, layer, role, geometry, Statistics(x_NC.mean(0, dtype=torch.float64).float()))

    def collect(asked: Sequence[Statistic[Any]]) -> dict[Statistic[Any], Any]:
        row = Row(fitting.codec, x_NC, queries)
        return {statistic: statistic.of_row(row) for statistic in asked}

    fitting.solve(collect)
    return fitting.codec
