"""`kvq bench`: bytes are those in memory, caches take turns, a cache that fails is a row."""

import json
import time

import pytest
import tiny
import torch

from kvq_calib import bench
from kvq_calib.bench import WARM, Turn
from kvq_calib.model import find as models

PLAN = bench.Plan((200, 300), (2,), tokens=3, rounds=2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A llama of two layers, 2 KV heads of 16."""
    return models.resolve(tiny.save(tmp_path_factory.mktemp("tiny"), "llama", layers=2))


@pytest.fixture(scope="module")
def model(files):
    return bench.load(files, "cpu", torch.float32)


def test_bytes_are_those_in_memory(files, model):
    ids_BT = bench.prompts(model, 280, 2, seed=0)
    tokens = 280 + WARM + 3  # the newest token is not in the cache yet
    (make,) = bench.uncompressed(model.dtype).values()
    exact = bench.take(model, make, ids_BT, 3)
    assert exact.cache_bytes == 2 * tokens * 2 * files.geometry.layers * files.geometry.width * 4
    assert len(exact.steps_s) == len(exact.steps_cpu_s) == 3 and exact.first_s > 0 and min(exact.steps_s) > 0
    assert exact.first_cpu_s > 0 and exact.busy >= 0
    (make,) = bench.compressed("rtn-4bit+window.recent=0", files).values()
    assert bench.take(model, make, ids_BT, 3).cache_bytes < 0.8 * exact.cache_bytes


def test_tensors_made_of_others_are_counted_by_their_parts():
    class Halves(torch.Tensor):
        """Says that it has the shape of both parts; holds them."""

        @staticmethod
        def __new__(cls, a, b):
            return torch.Tensor._make_wrapper_subclass(cls, (1000, 1000))

        def __init__(self, a, b):
            self.a, self.b = a, b

        def __tensor_flatten__(self):
            return ["a", "b"], None

        @staticmethod
        def __tensor_unflatten__(inner, about, size, stride):
            return Halves(inner["a"], inner["b"])

        __torch_dispatch__ = classmethod(lambda *_: pytest.fail("nothing is computed to count bytes"))

    made = Halves(torch.zeros(3, dtype=torch.uint8), torch.zeros(2))
    parts = list(bench._tensors({"codes": (made, {"scale": [torch.zeros(5)]}), "bits": 2}))
    assert [tensor.nbytes for tensor in parts] == [3, 8, 20]


def test_what_other_processes_take_is_told_from_what_this_one_does(files, kvq, monkeypatch):
    """Of one processor that worked all the time, this process had a fourth."""
    now = {"wall": 0.0, "cpu": 0.0}
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(bench.time, "process_time", lambda: now["cpu"])
    monkeypatch.setattr(bench, "busy_seconds", lambda: now["wall"])
    watch = bench.Stopwatch()
    now |= {"wall": 8.0, "cpu": 2.0}
    watch.end()
    assert watch.others == 6.0
    monkeypatch.undo()
    before, began = bench.busy_seconds(), time.process_time()
    while time.process_time() < began + 0.1:
        pass
    assert bench.busy_seconds() >= before + 0.05, "it counts this process too, in hundredths of a second"
    monkeypatch.setattr(bench, "measure", lambda *_: [{"cache": "16 bit", "busy": 0.75}])
    _, _, err = kvq(*f"bench rtn-4bit --model {files.path} --device cpu --context 270 --quiet".split())
    assert "other processes took 75% of the processors" in err and "step_cpu_s" in err


def test_every_cache_takes_its_turn_and_another_one_begins(model, monkeypatch):
    asked, told = [], []

    def attempt(model, name, ids_BT, tokens):
        asked.append((name, ids_BT.shape[1], tokens))
        return Turn(1.0, [0.5] * tokens, 100, steps_cpu_s=[1.0]) if name != "bad" else Turn(error="ValueError: no")

    monkeypatch.setattr(bench, "attempt", attempt)
    rows = bench.measure(model, {name: name for name in ("16 bit", "bad", "a")}, PLAN, told.append)
    first = [(name, tokens) for name, context, tokens in asked if context == 200]
    assert first == [("16 bit", 1), ("bad", 1), ("a", 1), ("a", 3), ("16 bit", 3), ("a", 3), ("16 bit", 3)]
    assert sum(told) == bench.work(3, PLAN)
    assert [(row["context"], row["cache"], row.get("error")) for row in rows[:3]] == [
        (200, "16 bit", None), (200, "bad", "ValueError: no"), (200, "a", None),
    ]  # fmt: skip


def test_figures_are_medians_of_the_rounds_and_ratios_to_the_first():
    warm = Turn(90.0, [90.0], 0)
    cpu: dict = {"first_cpu_s": 3.0, "steps_cpu_s": [0.5, 0.7, 0.6]}
    turns = {"16 bit": [warm, Turn(2.0, [1.0, 2.0], 800, **cpu), Turn(3.0, [3.0, 9.0, 9.0], 800, **cpu, busy=0.5)],
             "a": [warm, Turn(1.0, [4.0, 5.0], 300, 7000, **cpu),
                   Turn(1.0, [6.0, 7.0, 80.0], 300, 7000, steps_cpu_s=[1.8] * 3)],
             "b": [Turn(error="full")]}  # fmt: skip
    base, a, b = bench.figures(64, 4, turns)
    assert (base["first_token_s"], base["quartiles"]) == (2.5, [4 / 9, 4 / 2])
    assert (base["first_cpu_s"], base["step_cpu_s"], base["busy"]) == (3.0, 0.6, 0.25)
    assert a["first_cpu_s"] == 1.5 and a["step_cpu_s_ratio"] == pytest.approx(1.25 / 0.6)
    assert base["tokens_per_s"] == pytest.approx(4 / 3) and base["tokens_per_s_ratio"] == 1
    assert a["tokens_per_s_ratio"] == pytest.approx(3 / 6) and a["cache_bytes_ratio"] == pytest.approx(3 / 8)
    assert a["peak_bytes"] == 7000 and b["error"] == "full" and "tokens_per_s" not in b
    alone = bench.figures(64, 4, {"b": turns["b"], "a": turns["a"]})[1]
    assert "tokens_per_s" in alone and "tokens_per_s_ratio" not in alone, "there is nothing to compare with"


def test_what_cannot_be_asked(files):
    with pytest.raises(ValueError, match=r"context 510; .* takes 512 tokens in all: use at most 506"):
        bench.Plan((510,), tokens=3).check(files)
    with pytest.raises(ValueError, match=r"--beside 'quanto-3bit'; use quanto-2bit, .*, or none"):
        bench.quantized("quanto-3bit")


def test_the_command_prints_a_table_or_json(files, kvq, monkeypatch):
    words = f"bench rtn-4bit --model {files.path} --context 270 --tokens 2 --rounds 1 --device cpu --quiet".split()
    code, out, _ = kvq(*words)
    assert code == 0 and out.splitlines()[0].startswith("context") and "rtn-4bit" in out
    monkeypatch.setattr(bench, "take", lambda *_: 1 / 0)
    code, out, err = kvq(*words, "--json")
    assert code == 1 and "not measured: rtn-4bit: ZeroDivisionError: division by zero" in err
    assert [row["cache"] for row in json.loads(out)["rows"]][1:] == ["rtn-4bit"]
