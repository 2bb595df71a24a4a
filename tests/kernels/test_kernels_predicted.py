"""What is predicted is composed as the host launches it, and the committed table is what the code predicts."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
from machine_code import step

from benchmarks import kernels_predicted as predicted
from benchmarks.cases import MODELS, Case
from benchmarks.kernels_aot import FAMILIES
from benchmarks.kernels_predicted import START, WINDOW, Loop, attend_cycles
from benchmarks.simulate import BANDWIDTH, CLOCK, MULTIPROCESSORS

ROOT = Path(__file__).parents[2]
QUICK = ("rtn-2bit", "higgs-head-2bit")
LOOKED_UP = ("lloyd-even-2bit", "lloyd-2bit", "lloyd-4bit", "higgs-head-2bit", "higgs-head-4bit")


def committed() -> dict[tuple[str, int, int], dict]:
    rows = [json.loads(line) for line in predicted.TABLE.read_text().splitlines()]
    return {(row["recipe"], row["batch"], row["tokens"]): row for row in rows}


def test_the_table_has_every_family_and_says_that_it_is_predicted():
    table = committed()
    assert set(table) == set(product(FAMILIES, predicted.BATCHES, predicted.LENGTHS))
    for (recipe, batch, tokens), row in table.items():
        assert row["what"] == "predicted" and row["error"] == "+-35%"
        assert row["binds"] in ("memory", "latency", "issue", "alu", "lsu", "tensor") and 0 < row["share"] <= 1
        assert row["share"] <= predicted.BINDS if row["binds"] == "latency" else row["share"] >= predicted.BINDS
        assert row["ratio"] == pytest.approx(row["bf16_microseconds"] / row["microseconds"], rel=0.02)
        bf16 = 2 * 2 * batch * tokens * 8 * 128 / (0.85 * 4.8e12) * 1e6 + 4
        assert row["bf16_microseconds"] == pytest.approx(bf16, abs=0.06)
        read = Case(MODELS[0], recipe, tokens, batch).packed() / BANDWIDTH * 1e6
        assert row["microseconds"] > read + 2 * predicted.LAUNCH  # no kernel reads faster than memory gives


def test_results_say_what_the_table_says():
    """benchmarks/records/kernels.md, the rows of its table of predictions."""
    text = (
        (ROOT / "benchmarks" / "records" / "kernels.md")
        .read_text()
        .partition("| predicted, bfloat16 = 1 |")[2]
        .partition("\n\n")[0]
    )
    said = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    table, columns = committed(), ((1, 4096), (1, 16384), (1, 131072), (8, 16384), (32, 131072))
    named = (
        "kivi-2bit-g128",
        "kivi-4bit-g128",
        "rtn-2bit",
        "rtn-4bit",
        "polar-3bit",
        *LOOKED_UP,
        "kivi-2bit",
        "kivi-3bit",
    )
    assert len(said) == len(named)
    for (_, *ratios), name in zip(said, named, strict=True):
        assert ratios == [f"{table[name, *column]['ratio']:.1f}" for column in columns], name


@pytest.mark.slow
def test_the_table_is_what_is_predicted(tmp_path):
    """Of two quick recipes; with another Triton than the table's, as far off as the model itself may be."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.kernels_predicted", "--recipes", ",".join(QUICK)]
    subprocess.run([*command, "--out", tmp_path / "found.jsonl"], env=environment, cwd=ROOT, check=True)
    found = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert len(found) == len(QUICK) * len(predicted.BATCHES) * len(predicted.LENGTHS)
    for row in found:
        kept = committed()[row["recipe"], row["batch"], row["tokens"]]
        if row["triton"] == kept["triton"]:
            assert row == kept
        else:
            assert row["ratio"] == pytest.approx(kept["ratio"], rel=0.35)


def test_kernels_of_a_step_are_counted_as_the_host_launches_them(monkeypatch):
    """Attention and merge; a rotated query is cast and multiplied first, views and allocations are no kernels."""
    import torch

    from kvq_runtime.kernels.attend import launch

    class One:
        __name__ = "attend"

        def __getitem__(self, grid):
            return lambda *args, **options: None

    monkeypatch.setattr(launch, "attend_kernel", One())
    monkeypatch.setattr(launch, "merge_parts", lambda *given: None)
    seen = {name: predicted.launches(Case(MODELS[0], name, 4096, 1), 8)[1] for name in ("rtn-2bit", "higgs-head-2bit")}
    assert seen == {"rtn-2bit": 0, "higgs-head-2bit": 0}  # the query is rotated in the kernel
    with predicted.Operations() as kernels:
        x = torch.ones(2, 3)
        torch.empty_like(x)
        torch.empty_strided((2, 3), (1, 2))
        x.new_empty_strided((2, 3), (1, 2))
        y = x.view(3, 2).mT
        assert kernels.counts["launches"] == 1
        (y @ y.mT).add_(1)
        assert kernels.counts["launches"] == 3
        assert torch.equal(x, x) and x.nonzero().shape == (6, 2)
    assert (kernels.counts["launches"], kernels.counts["waits"]) == (3, 2)


def test_splits_are_those_of_an_h200():
    """Enough for its multiprocessors, whatever the batch; the host here, which has no GPU, would say fewer."""
    for batch in predicted.BATCHES:
        case = Case(MODELS[0], "rtn-2bit", 131072, batch)
        cut = predicted.splits(case, 12)
        assert cut * batch * 8 >= MULTIPROCESSORS and cut <= case.blocks


def test_waves_of_programs():
    """A block is two passes of 50 cycles; a multiprocessor has room for two programs."""
    loop = Loop([step(stall=10)] * 5, 2, 1, 2)
    assert [loop.each(count) for count in (1, 2)] == [100, 100]
    assert attend_cycles(loop, 132, 10, 2, 0) == START + 5 * 100
    assert attend_cycles(loop, 132, 10, 3, 0) == 2 * START + 4 * 100 + 2 * 100  # 4, 4 and 2
    assert attend_cycles(loop, 132, 10, 1, 1) == START + WINDOW  # beside the blocks', and longer
    assert attend_cycles(loop, 132, 10, 2, 1) == START + 5 * 100 + START + WINDOW  # no room beside them
    assert attend_cycles(loop, 1, 5, 4, 0) == START + 2 * 100  # 2, 2, 1 and no block
    assert attend_cycles(loop, 264, 3, 2, 0) == 2 * START + 2 * 100 + 100  # those of two blocks run first
    assert attend_cycles(loop, 132, 5, 4, 0) == 2 * START + 2 * 100 + 100  # three programs for two places
    assert attend_cycles(loop, 1, 2, 4, 0) == START + 100  # two splits have none


def test_programs_share_a_multiprocessor():
    """Half-rate instructions of 1 to 4 warps a scheduler: between simulated counts, a line."""
    loop = Loop([step("alu", 2)] * 50, 1, 4, 8)
    assert loop.each(1) == pytest.approx(100, rel=0.02)
    assert loop.each(4) == pytest.approx(400, rel=0.02)
    assert loop.each(5) == pytest.approx((loop.each(4) + loop.each(6)) / 2)
    assert loop.each(8) == pytest.approx(800, rel=0.02)
    assert loop.taken()["alu"] == pytest.approx(100, rel=0.02)  # of a multiprocessor: four schedulers, a warp each
    assert loop.taken()["issue"] == pytest.approx(50, rel=0.02)


def test_a_share_is_of_the_whole_call(monkeypatch):
    """A loop that the ALU binds: nearly all of a long call, little of a short one."""
    attend = SimpleNamespace(function=SimpleNamespace(__name__="attend"))
    monkeypatch.setattr(predicted, "launches", lambda case, cut: ([attend], 2))
    monkeypatch.setattr(predicted, "splits", lambda case, room: 4)
    loop = Loop([step("alu", 2)] * 2_000, 1, 4, 2)
    long, short = (predicted.predicted(Case(MODELS[0], "rtn-2bit", tokens, 8), loop) for tokens in (131264, 320))
    assert long["binds"] == "alu" and long["share"] > 0.9
    took = 256 * 2 * 4_000 + START + START + WINDOW  # two programs on each of 128 multiprocessors; then the window's
    assert long["microseconds"] == pytest.approx(took / CLOCK * 1e6 + 3 * predicted.LAUNCH, rel=0.001)
    assert short["binds"] == "latency" and short["share"] < 0.6
