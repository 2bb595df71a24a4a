"""`kvq bench`: bytes are those in memory, caches take turns, what was measured stays, what cannot be is a row; and its
picture: a row of panels a batch, a line a cache, what has no figures left out.
"""

import argparse
import json
from dataclasses import replace

import pytest
import tiny
import torch
from transformers import DynamicCache

from kvq_calib.bench import contenders, rounds
from kvq_calib.bench.contenders import Contender
from kvq_calib.bench.rounds import FULL, WARM, Turn
from kvq_calib.cli import commands
from kvq_calib.model import find as models
from kvq_calib.report import timings
from kvq_runtime.errors import NotFound
from kvq_runtime.recipe import preset
from kvq_runtime.store.estimate import Sizes

PLAN = rounds.Plan((200, 300), (2,), tokens=3, rounds=2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A llama of two layers, 2 KV heads of 16."""
    torch.set_num_threads(1)
    return models.resolve(tiny.save(tmp_path_factory.mktemp("tiny"), "llama", layers=2))


@pytest.fixture(scope="module")
def model(files):
    return rounds.load(files, "cpu", rounds.dtype_of(files))


@pytest.fixture
def taken(monkeypatch):
    """The turns that were asked for, (cache, context, batch, tokens), in place of measuring them."""
    asked = []

    def attempt(model, one, ids_BT, tokens):
        asked.append((one.name, ids_BT.shape[1], ids_BT.shape[0], tokens))
        return Turn(1.0, [0.5] * tokens, 0.4, 100) if one.name != "full" else Turn(error=FULL)

    monkeypatch.setattr(rounds, "attempt", attempt)
    return asked


def named(*names: str) -> list[Contender]:
    return [Contender(name, lambda model: DynamicCache(config=model.config)) for name in names]


def test_bytes_are_those_in_memory(files, model):
    ids_BT = rounds.prompts(model, 280, 2, seed=0)
    held = 280 + WARM + 3  # the newest token is not in the cache yet
    exact = rounds.take(model, contenders.plain(model.dtype), ids_BT, 3)
    assert exact.cache_bytes == 2 * held * 2 * files.geometry.layers * files.geometry.width * model.dtype.itemsize
    assert len(exact.steps_s) == 3 and exact.first_s > 0 and all(step > 0 for step in exact.steps_s)
    assert exact.processor_s > 0
    (ours,) = contenders.ours(["rtn-4bit"], files)
    found = rounds.take(model, ours, ids_BT, 3)
    computed = Sizes(preset("rtn-4bit"), files.geometry, model.dtype).at(held, batch=2)
    assert found.cache_bytes == pytest.approx(computed.total, rel=0.01)  # positions are not in the computation
    assert found.shared_bytes == computed.shared


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
    found = list(rounds._tensors({"codes": (made, {"scale": [torch.zeros(5)]}), "bits": 2}))
    assert [tensor.nbytes for tensor in found] == [3, 8, 20]


def test_every_cache_takes_its_turn_and_another_one_begins(model, taken):
    told: list[int] = []
    found: list[rounds.Round] = []
    rounds.measure(model, named("16 bit", "a", "b"), PLAN, found, told.append)
    first = [ask for ask in taken if ask[1] == 200]
    warm, *later = (first[i : i + 3] for i in range(0, len(first), 3))
    assert [ask[3] for ask in warm] == [1, 1, 1], "a round to warm up, which does not count"
    assert [[ask[0] for ask in one] for one in later] == [["16 bit", "a", "b"], ["a", "b", "16 bit"]]
    assert [(one.context, one.batch) for one in found] == [(200, 2), (200, 2), (300, 2), (300, 2)]
    assert sum(told) == rounds.work(3, PLAN)


@pytest.mark.parametrize(
    "error, said",
    [
        (torch.OutOfMemoryError("CUDA out of memory"), FULL),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 9 bytes"), FULL),
        (ValueError("group size\nmore"), "ValueError: group size"),
    ],
)
def test_an_error_of_one_cache_does_not_end_the_others(model, error, said):
    def fails(model):
        raise error

    found = rounds.attempt(model, Contender("bad", fails), rounds.prompts(model, 8, 1, 0), 2)
    assert found.error == said and not found.steps_s


def test_figures_are_medians_of_all_rounds_and_ratios_to_the_first():
    def one(number: int, base: list[float], other: list[float]) -> rounds.Round:
        turns = {"16 bit": Turn(2.0 + number, base, 1.5, 800), "a": Turn(1.0, other, 2.5 + number, 300, 100, 7000)}
        return rounds.Round(64, 4, turns | {"b": Turn(error=FULL)})

    some = [one(0, [1.0, 2.0], [4.0, 5.0]), one(1, [3.0, 9.0, 9.0], [6.0, 7.0, 80.0])]
    first, second, third = named("16 bit", "a", "b")
    entrants = [first, replace(second, recipe="rtn-4bit", note="fitted"), third]
    base, a, b = timings.figures(some, entrants, 500, 2600)
    assert (base["first_token_s"], base["step_s"], base["step_s_quartiles"]) == (2.5, 3.0, [2.0, 9.0])
    assert base["tokens_per_s"] == pytest.approx(4 / 3) and base["tokens_per_s_ratio"] == 1
    assert a["tokens_per_s_ratio"] == pytest.approx(3 / 6) and a["first_token_s_ratio"] == pytest.approx(0.4)
    assert a["cache_bytes_ratio"] == pytest.approx(3 / 8) and a["step_s_most"] == 80 and a["processor_s"] == 3.0
    assert (base["largest_batch"], a["largest_batch"]) == (2100 // 200, 2000 // 50)
    assert (b["measured"], b["note"], a["note"]) == (False, FULL, "fitted")
    lone = [rounds.Round(64, 4, {"16 bit": Turn(error=FULL), "a": some[0].turns["a"]})]
    a = timings.figures(lone, entrants, 0, 10**4)[1]
    assert a["measured"] and "tokens_per_s_ratio" not in a, "there is nothing to compare with"


def test_what_cannot_be_asked(files):
    with pytest.raises(
        ValueError, match=r"context 510 and 6 generated tokens; .* at most 512: use --context up to 506"
    ):
        rounds.Plan((510,), tokens=3).check(files)
    with pytest.raises(ValueError, match=r"--beside 'quanto-3bit'; use quanto-2bit, .*, or none"):
        contenders.quantized("quanto-3bit")
    with pytest.raises(NotFound, match="rtn-5"):
        contenders.ours(["rtn-5"], files)
    with pytest.raises(ValueError, match="two recipes are called mine"):
        contenders.ours(["rtn-4bit+name=mine", "rtn-2bit+name=mine"], files)


def test_the_command_prints_a_table_and_json(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVQ_HOME", str(tmp_path))
    top = argparse.ArgumentParser()
    commands.add_bench(top.add_subparsers())
    given = "--context 270 --tokens 2 --rounds 1 --beside none --device cpu --dtype bfloat16 --memory 1GB"
    words = ["bench", "aqua-2bit", "--model", str(files.path), *given.split()]
    args = top.parse_args(words)
    assert args.run(args) == 0
    header, base, aqua, *notes = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "context" and "rows in 954 MiB" in header
    assert "16 bit" in base and "1.00×" in base and aqua.endswith(contenders.RANDOM)
    assert "says nothing of a GPU" in notes[-1]
    args = top.parse_args([*words, "--json"])
    assert args.run(args) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["cache"] for row in found["rows"]] == ["16 bit", "aqua-2bit"]
    assert found["about"]["memory_bytes"] == 10**9 and found["about"]["environment"]["device"] == "cpu"


def test_a_recipe_that_fails_is_a_row_and_an_error(files, monkeypatch, capsys):
    monkeypatch.setattr(rounds, "attempt", lambda model, one, *_: Turn(error="ValueError: no" if one.recipe else FULL))
    top = argparse.ArgumentParser()
    commands.add_bench(top.add_subparsers())
    words = "--context 100 --rounds 1 --beside none --device cpu"
    args = top.parse_args(["bench", "rtn-4bit", "--model", str(files.path), *words.split()])
    with pytest.raises(RuntimeError, match=r"^not measured: rtn-4bit: ValueError: no$"):
        args.run(args)
    _, base, ours, *_ = capsys.readouterr().out.splitlines()
    assert base.endswith(FULL) and ours.endswith("ValueError: no")


def test_what_was_measured_is_printed_when_it_is_interrupted(files, taken, monkeypatch, capsys):
    attempt = rounds.attempt

    def stopped(model, one, ids_BT, tokens):
        if len(taken) == 4:
            raise KeyboardInterrupt
        return attempt(model, one, ids_BT, tokens)

    monkeypatch.setattr(rounds, "attempt", stopped)
    top = argparse.ArgumentParser()
    commands.add_bench(top.add_subparsers())
    words = "--context 100 --tokens 2 --rounds 2 --beside none --device cpu"
    args = top.parse_args(["bench", "rtn-4bit", "--model", str(files.path), *words.split()])
    with pytest.raises(KeyboardInterrupt, match="finished rounds are above"):
        args.run(args)
    assert capsys.readouterr().out.startswith("context")
