"""Records of tasks and of greedy text: in tables, on cards, on the Hub's model-index, in `kvq show`. In the picture of
tasks every cell has its number in its place, and a reason stands where there are none.
"""

import json
import math

import pytest

from kvq_calib.report import answered
from kvq_calib.report import greedy as followed
from kvq_runtime.cli import version
from kvq_runtime.registry import card, measured, sound
from kvq_runtime.registry.measured import Record, TasksRecord
from kvq_runtime.registry.sound import read

MODEL = {"id": "demo", "revision": None, "parameters": 4_070_000}
BITS = {"asymptotic": 2.125, "at_length": 3.0, "at_4096": 3.1}
LENGTHS, DEPTHS, TASKS = (64, 256, 1024), (0.1, 0.9), ("needle", "chain")


def record(name: str, about: dict, **protocols: dict) -> Record:
    given = {"name": name, "version": 1, "model": MODEL, **about}
    result = {"recipe": "higgs-2bit", "protocols": {key.replace("_", "-"): part for key, part in protocols.items()}}
    found = {"artifact": "0" * 64, "corpus": "1" * 64, "protocol": given, "environment": {}}
    return read(found | {"result": result | {"bits": BITS}})


OWN = record(
    "tasks", {"tasks": ["needle"]},
    in_use={"tasks": {"needle": {"accuracy": 0.5, "se": 0.1, "texts": 20}}, "decoded": {"1024": 0.75},
            "reference": {"needle": {"accuracy": 0.9, "se": 0.05, "texts": 20}}},
    full={"reason": "it chooses tokens"},
)  # fmt: skip
FIGURES = {"exact_match,strict-match": {"value": 0.25, "se": 0.05}, "ppl,none": {"value": 7.5, "se": None}}
HARNESS = record(
    "lm-eval", {"lm_eval": "0.4.13", "limit": 40, "num_fewshot": 5, "tasks": ["gsm8k", "short"]},
    in_use={
        "tasks": {"gsm8k": {"metrics": FIGURES, "texts": 40}, "short": {"reason": "nothing was encoded"}},
        "through_the_cache": {"gsm8k": {"requests": 40, "read_encoded": 30, "decoded": 0.6}},
        "reference": {"gsm8k": {"metrics": {"exact_match,strict-match": {"value": 0.5, "se": 0.08}}}},
    },
)  # fmt: skip
BIN = {"kl_se": 0.01, "kl_worst": 0.2, "kl_max": 1.0, "top1": 0.9, "decoded": 0.8}
PART = {
    "kl": 0.02, "kl_se": 0.004, "top1": 0.96, "entropy": 1.0, "trend": {"kl_per_1000": 0.005, "se": 0.001},
    "windows": [{"first": first, "kl": kl, "kl_max": 1.0, "kl_max_at": 7, "top1": 0.9}
                for first, kl in ((30, 0.01), (None, 0.0), (90, 0.05))],
    "bins": [BIN | {"from": 8 * n, "to": 8 * n + 8, "kl": 0.01 * n, "entropy": 2.0 - n / 8} for n in range(8)],
}  # fmt: skip
ABOUT = {"text": {"source": "demo", "split": "held-out"}, "windows": 3, "prompt": 256, "length": 320}
GREEDY = record("decode", ABOUT, decode=PART)


def test_rows_have_a_column_for_each_metric_and_say_what_was_read():
    first, full = answered.rows([OWN])
    assert first["needle"] == "50.0% ± 10.0%" and first["decoded"] == "75% of 1024"
    assert full["decoded"] == "it chooses tokens" and "needle" not in full
    (row,) = answered.rows([HARNESS])
    assert row["gsm8k exact_match,strict-match"] == "25.0% ± 5.0%" and row["gsm8k ppl"] == "7.5"
    assert row["decoded"] == "60% of gsm8k, 30 of 40 requests"
    assert answered.notes([HARNESS]) == ["higgs-2bit: nothing was encoded\n"]


def _sections(records: list[Record]) -> list[str]:
    return answered.sections(records) + followed.sections(records)


def test_a_card_sets_them_beside_the_16_bit_model():
    tasks, greedy = _sections([OWN, HARNESS, GREEDY])
    assert tasks.startswith(
        "## Tasks\n\n`demo`, **4.07M parameters**; kvq's own texts, through the cache of 2.12 bits."
    )
    assert "| needle | 90.0% | 50.0% ± 10.0% | 20 | in use |" in tasks
    assert "asked by lm-eval 0.4.13, the first 40 examples, 5 worked examples" in tasks
    assert "| gsm8k exact_match,strict-match | 50.0% | 25.0% ± 5.0% | 40 | in use |" in tasks
    assert "| short | nothing was encoded |" in tasks
    assert greedy.startswith("## Greedy text\n\n") and "from 2.00 nats of entropy to 1.12" in greedy
    assert _sections([]) == []


def test_greedy_text_is_told_by_its_quarters_and_its_worst_window():
    (row,) = followed.rows([GREEDY])
    assert row["first"] == "60, least 30; 1 of 3 never"
    assert [round(row[f"KL {n}/4"], 6) for n in (1, 2, 3, 4)] == [0.005, 0.025, 0.045, 0.065]
    assert row["worst window"] == 0.05 and row["KL per 1000 tokens"] == "+0.005 ± 0.001"
    (row,) = followed.rows([record("decode", ABOUT, decode={"reason": "nothing was encoded"})])
    assert row["first"] == "nothing was encoded"
    bins = [PART["bins"][0] | {"kl": None}, *PART["bins"][1:]]
    without = [record("decode", ABOUT, decode=PART | change) for change in ({"kl": None}, {"bins": bins})]
    assert len(followed.found([GREEDY, *without])) == 1, "what cannot be laid out is left out"


def test_the_hub_and_kvq_show_have_them():
    results = card.eval_results([OWN, HARNESS, GREEDY])
    found = [(one.dataset_name, one.metric_name, one.metric_value) for one in results]
    assert ("needle", "accuracy, in use", 0.5) in found
    assert ("gsm8k", "exact_match (strict-match), in use", 0.25) in found and len(found) == 3
    text = card.with_results(f"# x\n\n{card.UNMEASURED}\n", "x", [OWN])
    assert text.count("| needle | accuracy, in use | 0.5 |") == 1
    again = card.with_results("# x\n\nmeasured when it was fitted\n", "x", [OWN, HARNESS])
    assert again.endswith("| gsm8k | ppl, in use | 7.5 |\n") and again.count("## Tasks") == 1
    assert card.with_results(again, "x", [OWN]).count("## Tasks") == 1
    tables = version.evaluation_tables([OWN, HARNESS, GREEDY])
    assert tables["tasks"][0] == {"task": "needle", "protocol": "in-use", "figures": "accuracy 0.5", "texts": 20}
    assert tables["tasks"][2]["figures"] == "nothing was encoded" and len(tables["tasks"]) == 3


@pytest.mark.parametrize("one", [OWN, HARNESS, GREEDY], ids=["tasks", "lm-eval", "decode"])
def test_a_registry_takes_them(one):
    assert json.loads(sound.to_bytes(one.raw)) == one.raw
    assert not measured.of_text([one]) and bool(measured.of_tasks([one])) == (one is not GREEDY)


def tasks_record(name: str, parts: dict) -> TasksRecord:
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
        tasks_record("16 bit", {"full": part(1.0), "in-use": part(1.0)}),
        tasks_record("rtn-2bit", {"full": refused, "in-use": part(0.5)}),
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
