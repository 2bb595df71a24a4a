"""`kvq-calibrate --models`: several models, one after the other, or one a job; what all take together."""

import errno
import json
import shlex
from pathlib import Path

import pytest
import tiny

from kvq_calib.cli import calibrate as cli
from kvq_runtime.errors import NotFound
from kvq_runtime.registry import resolve as registry

LIST = """
- {model}
- model: {model}
  recipe: [aqua-2bit, mean-higgs-2bit]
  seq-len: 192
  held-out: 1
- model: {model}
  recipe: aqua-3bit
  no-publish: true
  prefect: false
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.with_text(tmp_path_factory.mktemp("model"))


@pytest.fixture
def given(model: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "list.yaml").write_text(LIST.format(model=model))
    text = ["--corpus", str(model / "corpus.txt"), "--samples", "4", "--seq-len", "128", "--no-eval"]
    return [*text, "--recipe", "higgs-2bit", "--models", str(tmp_path / "list.yaml")]


def test_commands_are_the_entries_after_what_holds_for_all(model: Path, given: list[str], capsys):
    assert cli.main([*given, "--commands"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    text = ["kvq-calibrate", *given[:4]]
    assert lines == [
        [*text, "--seq-len", "128", "--no-eval", "--recipe", "higgs-2bit", "--model", str(model)],
        [*text, "--no-eval", "--model", str(model), "--recipe", "aqua-2bit", "--recipe", "mean-higgs-2bit",
         "--seq-len", "192", "--held-out", "1"],
        [*text, "--seq-len", "128", "--no-eval", "--model", str(model), "--recipe", "aqua-3bit", "--no-publish"],
    ], "what an entry says stands in the place of what holds for all"  # fmt: skip
    assert cli.main([*given[:4], "--seq", "128", *given[6:], "--comm", "--onl", "2"]) == 0, "also where shortened"
    assert shlex.split(capsys.readouterr().out) == lines[1]


def test_what_all_take_together(given: list[str], capsys):
    words = [*given[:-4], "--recipe", "mean-higgs-2bit", *given[-2:]]
    assert cli.main([*words, "--dry-run", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["seq_len"] for row in rows] == [128, 192, 128]
    assert cli.main([*words, "--dry-run", "--price", "3600000"]) == 0
    table = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    table = [[cell.strip() for cell in line if cell.strip()] for line in table]
    head, *body = table
    assert head == ["model", "recipes", "hours, at least", "memory, GB", "disk, GB", "download, GB", "cost"]
    assert len(body) == 4 and body[-1][0] == "all 3"
    costs = [float(line[-1]) for line in body]
    assert costs[-1] == pytest.approx(sum(costs[:-1]), rel=0.02) and min(costs) > 0


@pytest.mark.slow
def test_each_is_calibrated_and_one_that_fails_stops_no_other(
    model: Path, given: list[str], tmp_path: Path, capsys, monkeypatch
):
    words, path = given, tmp_path / "list.yaml"
    path.write_text(f"- model: {model}\n  recipe: nonsense\n- model: {model}\n  recipe: aqua-2bit\n")
    code = cli.main(words)
    said = capsys.readouterr().err
    assert code == 3 and "entry 1, 1 of 2" in said and "not done: entries 1 (exit code 3)" in said
    assert registry.resolve("tiny-model-aqua-2bit").version == "1.0.0"
    assert cli.main([*words, "--only", "2"]) == 0
    capsys.readouterr()
    path.write_text(
        "".join(f"- model: {model}\n  recipe: {one}\n" for one in ("mean-higgs-2bit", "nonsense", "aqua-2bit"))
    )
    assert cli.main([*words, "--json"]) == 3
    assert [one["recipe"] for one in json.loads(capsys.readouterr().out)] == ["mean-higgs-2bit", "aqua-2bit"]

    def full(_records: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "standard output")

    monkeypatch.setattr(cli, "_print_records", full)
    assert cli.main([*words, "--json"]) == 3, "a disk that is full does not hide an entry that failed"
    assert registry.resolve("tiny-model-aqua-2bit").version == "1.0.0", "nothing is done twice"
    with pytest.raises(NotFound):
        registry.resolve("tiny-model-nonsense")


@pytest.mark.parametrize(("text", "message"), [
    ("", "a list of models"), ("model: x", "a list of models"), ("- [", "no YAML"), ("- 3", "entry 1 names no model"),
    ("- recipe: x", "entry 1 names no model"), ("- model: x\n  dry-run: true", "--dry-run is for the whole list"),
    ("- model: x\n  samplse: 1", "entry 1: there is no option --samplse; did you mean samples"),
    ("- x\n- model: x\n  publish: false", "entry 2: there is no option --publish; did you mean no-publish"),
    ("- model: x\n  eval: false", "entry 1: there is no option --eval; did you mean no-eval"),
    ("- x\n- model: x\n  seq-len: long", "entry 2 of"),
])  # fmt: skip
def test_a_list_that_is_none_is_refused(text: str, message: str, given: list[str], tmp_path: Path, capsys):
    (tmp_path / "list.yaml").write_text(text)
    try:
        code = cli.main(given)
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(("words", "message"), [
    (["--only", "4"], "has 3 entries"), (["--model", "demo"], "leave out --model"),
])  # fmt: skip
def test_what_does_not_go_together(words: list[str], message: str, given: list[str], capsys):
    assert cli.main([*given, *words, "--commands"]) == 2 and message in capsys.readouterr().err
    assert cli.main(["--model", "demo", "--only", "1"]) == 2 and "are of --models" in capsys.readouterr().err
    assert cli.main([*given, "--price", "2.5"]) == 2, "and nothing is calibrated"
    assert "--price P is told by --dry-run" in capsys.readouterr().err
    assert cli.main(["--model", "demo", "--no-eval", "--baseline", "higgs-2bit"]) == 2
    assert "leave out --no-eval, or them" in capsys.readouterr().err


def test_a_plan_that_cannot_be_made_names_its_entry(model: Path, given: list[str], tmp_path: Path, capsys):
    text = f"- {model}\n- model: {model}\n  name: one\n  recipe: [aqua-2bit, aqua-3bit]\n"
    (tmp_path / "list.yaml").write_text(text)
    assert cli.main([*given[:-4], "--recipe", "aqua-2bit", *given[-2:], "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "--name names one artifact" in said and "entry 2 of" in said


def test_a_dry_run_tells_of_every_entry_that_is_refused_and_plans_the_others(
    model: Path, given: list[str], tmp_path: Path, capsys
):
    entries = [
        "nosuch",
        "{m}",
        "model: {m}\n  recipe: aqua-99bit",
        "model: {m}\n  seed: 1",
        "model: {m}\n  corpus: /no.txt",
    ]
    (tmp_path / "list.yaml").write_text("".join(f"- {entry.format(m=model)}\n" for entry in entries))
    words = [*given[:-4], "--recipe", "mean-higgs-2bit", *given[-2:], "--dry-run"]
    assert cli.main(words) == 3, "that of the first"
    out, said = capsys.readouterr()
    assert [number for number in range(1, 6) if f"entry {number} of" in said] == [1, 3, 5]
    assert "model 'nosuch' is" in said and "aqua-99bit" in said and "/no.txt" in said
    assert len(out.splitlines()) == 4 and out.splitlines()[-1].startswith("all 2 of 5 ")
    assert cli.main([*words, "--json"]) == 3
    assert [row["model"] for row in json.loads(capsys.readouterr().out)] == [model.name] * 2


def test_all_entries_with_options_that_are_none_are_told(model: Path, given: list[str], tmp_path: Path, capsys):
    (tmp_path / "list.yaml").write_text("- model: x\n  seq-len: long\n- x\n- model: x\n  samples: many\n")
    assert cli.main(given) == 2
    said = capsys.readouterr().err
    assert "entry 1 of" in said and "entry 3 of" in said and "entry 2" not in said
