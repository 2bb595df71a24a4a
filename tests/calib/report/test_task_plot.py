"""The picture of tasks: every cell has its number in its place, a reason stands where there are none."""

import math

import pytest

from kvq_calib.report import answered
from kvq_runtime.registry.measured import TasksRecord
from kvq_runtime.registry.sound import read

LENGTHS, DEPTHS, TASKS = (64, 256, 1024), (0.1, 0.9), ("needle", "chain")


def record(name: str, parts: dict) -> TasksRecord:
    about = {"name": "tasks", "tasks": [*TASKS], "lengths": [*LENGTHS], "depths": [*DEPTHS], "samples": 4}
    about["model"] = {"id": "tiny", "parameters": 1000}
    return read({
        "artifact": name, "corpus": "c", "protocol": about, "result": {"recipe": name, "protocols": parts}
    })  # fmt: skip


def part(scale: float) -> dict:
    """Accuracy tells task, length and depth."""
    cells = [
        {"task": task, "length": length, "depth": depth, "accuracy": scale * (a + 2 * b + 3 * c * 2) / 11}
        for a, depth in enumerate(DEPTHS)
        for b, length in enumerate(LENGTHS)
        for c, task in enumerate(TASKS)
    ]
    return {"cells": cells[::-1]}


@pytest.fixture(scope="module")
def figure():
    refused = {"reason": "rtn-2bit chooses its tokens"}
    records = [
        record("16 bit", {"full": part(1.0), "in-use": part(1.0)}),
        record("rtn-2bit", {"full": refused, "in-use": part(0.5)}),
    ]
    return answered.heat.__wrapped__(records)


def numbers(axis) -> dict[tuple[int, int], str]:
    return {tuple(math.floor(place) for place in text.get_position()): text.get_text() for text in axis.texts}


def test_a_row_a_recipe_and_protocol_and_a_column_a_task(figure):
    panels = figure.axes[:6]
    assert [panel.get_title() for panel in panels[:2]] == list(TASKS)
    titles = [panel.get_ylabel().removesuffix("\ndepth") for panel in panels[::2]]
    assert titles == ["16 bit", "rtn-2bit\nfull encode", "rtn-2bit\nin use"]


def test_every_cell_has_its_number_in_its_place(figure):
    for panel, scale, task in ((figure.axes[0], 1.0, 0), (figure.axes[1], 1.0, 1), (figure.axes[5], 0.5, 1)):
        expected = {(b, a): f"{100 * scale * (a + 2 * b + 6 * task) / 11:.0f}" for a in range(2) for b in range(3)}
        assert numbers(panel) == expected


def test_a_reason_stands_in_place_of_numbers(figure):
    assert [text.get_text() for text in figure.axes[2].texts] == ["rtn-2bit chooses its tokens"]
    assert not figure.axes[2].collections and not figure.axes[3].collections and figure.axes[4].collections
