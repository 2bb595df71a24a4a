"""The rows of the table in benchmarks/records/retrieval.md: what was measured, by task and by depth."""

from kvq_runtime.geometry import MODELS
from kvq_runtime.recipe import preset
from scripts import measure_retrieval as script


def record(name: str, shares: dict[str, tuple[float, ...]], bits: float | None = None) -> dict:
    cells = [
        {"task": task, "depth": depth, "length": 256, "accuracy": share}
        for task, some in shares.items()
        for depth, share in zip(script.DEPTHS, some, strict=True)
    ]
    tasks = {task: {"accuracy": sum(some) / len(some), "se": 0.04 if bits else 0.0} for task, some in shares.items()}
    held = {"bits": {"asymptotic": bits}} if bits else {}
    return {"result": {"recipe": name, "protocols": {"full": {"tasks": tasks, "cells": cells}}} | held}


def test_rows_are_means_by_task_and_of_what_has_a_place_by_depth():
    right = dict.fromkeys(script.TASKS, (1.0,) * 5)
    half = right | {"chain": (0.0, 0.5, 1.0, 0.5, 0.5), "count": (0.0,) * 5}
    found = script.lines([record("16 bit", right), record("rtn-2bit", half, 2.5)])
    assert found[2] == "| 16 bit | 16 | 100 | 100 | 100 | 100 | 100 | 100 | 100 | 100 | 100 |"
    assert found[3] == "| `rtn-2bit` | 2.50 | 100 ± 4 | 100 ± 4 | 50 ± 4 | 0 ± 4 | 67 | 83 | 100 | 83 | 83 |"
    assert len({line.count("|") for line in found}) == 1


def test_a_recipe_without_figures_has_its_reason():
    part = {"reason": "nothing was encoded"}
    held = {"recipe": "rtn-2bit", "bits": {"asymptotic": 2.5}, "protocols": {"full": part}}
    assert script.lines([{"result": held}])[2] == "| `rtn-2bit` | 2.50 | nothing was encoded |"


def test_its_recipes_are_presets_that_suit_the_model():
    assert len(set(script.RECIPES)) == len(script.RECIPES) > 20
    for name in script.RECIPES:
        preset(name).check(MODELS["recall"])
