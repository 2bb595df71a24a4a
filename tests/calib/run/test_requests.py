"""A stage may ask for any statistic, and for as many rows as it likes; what several ask for is collected once."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kvq_calib.fit.predict import InputRows, Inputs
from kvq_calib.fit.rotate import AttendedMoment, GradientMetric
from kvq_calib.model import find as models
from kvq_calib.model.streamed import Stream
from kvq_calib.run import calibrate as runs
from kvq_calib.run import passes
from kvq_calib.run import plan as plans
from kvq_calib.run.run import Run, serial
from kvq_calib.text import corpus
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.fit import separable
from kvq_runtime.fit.statistics import QueryMoment, ResidualMoment, Residuals, Statistic, Statistics, moment_of
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.stages.correct import Sparse
from kvq_runtime.stages.kinds import kinds
from kvq_runtime.stages.predict import Linear
from kvq_runtime.stages.separable import Separable

SAMPLES, HELD_OUT, SEQ_LEN, SINKS = 22, 2, 256, 4
TOKENS = (SAMPLES - HELD_OUT) * (SEQ_LEN - SINKS)  # that are fitted on: more than a fit sees unless it asks
ASKED = (Residuals(rows=65_536), QueryMoment("before"))


@dataclass(frozen=True)
class Curious(Separable):
    """Separable rounding that is fitted to more than it needs."""

    kind: ClassVar[str] = "curious"


def fitted(
    model: Path, folder: Path, patch: pytest.MonkeyPatch, asked: Sequence[Statistic[Any]]
) -> tuple[Artifact, list[tuple[str, dict[Statistic[Any], Any]]], Counter]:
    """A recipe with such a stage in a run; what every fit of it was given, by role; chunks that passes collected."""
    found: list[tuple[str, dict[Statistic[Any], Any]]] = []

    def solve(stage: Curious, statistics: Statistics, codec) -> tuple[Curious, dict[str, Tensor]]:
        found.append((codec.role, {one: statistics[one] for one in asked}))
        return separable.solve(stage, statistics, codec)

    module: Any = ModuleType(f"kvq_calib.fit.{Curious.__module__}")
    module.__spec__ = ModuleSpec(module.__name__, None)
    module.requests, module.solve = lambda stage: (*asked, Residuals()), solve
    patch.setitem(sys.modules, module.__name__, module)
    patch.setitem(kinds()["quantize"], Curious.kind, Curious)
    scheme, files = Scheme(Curious(4), predict=Linear()), models.resolve(str(model))
    recipe = Recipe("curious", scheme, replace(scheme, correct=Sparse(0.01)), "pre")
    made = plans.make(files, (recipe,), str(model / "corpus.txt"), SAMPLES, SEQ_LEN, held_out=HELD_OUT)
    done: Counter = Counter()

    def execute(task, shared, indices):
        done.update({tuple(type(one).__name__.strip("_") for one, _ in shared.asked): len(indices)}
                    if task is passes.collect else {})  # fmt: skip
        return serial(task, shared, indices)

    run = Run(replace(made, chunk=4), files, folder, executor=execute)
    return runs.calibrate(run)["curious"], found, done


def test_many_rows_and_queries_are_had_for_the_asking(model, tmp_path, monkeypatch):
    """The moment against queries captured once more; all tokens' residuals, which are fewer than asked for."""
    artifact, found, _ = fitted(model, tmp_path, monkeypatch, ASKED)
    assert "layers.2.value.quantize.scale" in artifact.tensors and [role for role, _ in found] == ["key", "value"] * 3
    files = models.resolve(str(model))
    stream, geometry = Stream(files), files.geometry
    tokens_BT = corpus.select(str(model / "corpus.txt"), files.path, SAMPLES, SEQ_LEN, 0).tokens_BT[:-HELD_OUT]
    q_NTC = stream.layer(0).forward(stream.embed(tokens_BT), queries=True).q_NTC
    assert q_NTC is not None
    expected = moment_of(q_NTC.flatten(0, 1), geometry)
    for _, given in found[:2]:
        rows_NC, queried = (given[one] for one in ASKED)
        assert torch.allclose(queried.moment_HDD, expected, rtol=1e-4, atol=1e-6)
        assert rows_NC.shape == (TOKENS, geometry.width) and TOKENS > 4096
        assert rows_NC.double().mean(0).abs().max() < 1e-5 < rows_NC.std()


@pytest.mark.slow
def test_whoever_asks_what_takes_the_same_pass_is_collected_in_one(model, tmp_path, monkeypatch):
    asked = (Inputs(), InputRows(100), ResidualMoment(), AttendedMoment(), GradientMetric(), *ASKED)
    _, found, done = fitted(model, tmp_path, monkeypatch, asked)
    layers, chunks = 3, 5
    # above the first layer, which has no inputs, the prediction has asked for their covariances already: those say what
    # moment it leaves
    ours = ("ResidualMoment", "AttendedMoment", "Residuals", "Residuals")
    assert (done.pop(ours), done.pop(ours[1:])) == (2 * chunks, 2 * (layers - 1) * chunks)
    assert done.pop(("InputRows",)) == done.pop(("Inputs",)) == 4 * chunks
    assert done == {("Inputs", "InputRows"): 2 * chunks}
    assert all(given[InputRows(100)].shape[0] == 100 for _, given in found[2:])
