"""kvq-calibrate as a user meets it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

from kvq_calib.cli import calibrate as cli
from kvq_calib.job import prepare, run
from kvq_calib.job.job import Job
from kvq_runtime.artifact import recipe_text
from kvq_runtime.registry import resolve as registry


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.with_text(tmp_path_factory.mktemp("model"))


@pytest.fixture
def prepared(monkeypatch) -> list[Job]:
    """The jobs that were prepared: each is looked up, pinned and planned once a command."""
    jobs, once = [], prepare.prepare

    def counted(job, *given, **named):
        jobs.append(job)
        return once(job, *given, **named)

    monkeypatch.setattr(prepare, "prepare", counted)
    return jobs


def arguments(model: Path, *more: str) -> list[str]:
    corpus = str(model / "corpus.txt")
    text = ["--corpus", corpus, "--samples", "4", "--seq-len", "128"]
    return ["--model", str(model), *text, *more]


@pytest.mark.slow
def test_it_publishes_what_it_says_and_the_same_again_is_the_same_version(model, prepared, capsys):
    assert cli.main(arguments(model, "--recipe", "aqua-2bit", "--recipe", "aqua-3bit", "--json")) == 0
    assert len(prepared) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["artifact"] for row in rows] == ["tiny-model-aqua-2bit@1.0.0", "tiny-model-aqua-3bit@1.0.0"]
    for row in rows:
        assert registry.resolve(row["artifact"]).sha256 == row["sha256"]
        assert registry.load_artifact(row["artifact"]).recipe.name == row["recipe"]
    assert all(place["new"] for row in rows for place in row["published"])
    assert cli.main(arguments(model, "--recipe", "aqua-2bit", "--recipe", "aqua-3bit", "--json")) == 0
    again = json.loads(capsys.readouterr().out)
    assert not any(place.pop("new") for row in again for place in row["published"])
    assert again == [
        row | {"published": [{n: v for n, v in row["published"][0].items() if n != "new"}]} for row in rows
    ]


def test_a_recipe_with_other_settings_is_published_under_a_name_of_its_own(model, tmp_path, capsys):
    """In one command: a preset, the same with a setting, and a file; each artifact holds what was asked for."""
    stated = recipe_text.read("aqua-2bit+key.predict.ridge=0.1").to_json() | {"name": "mine"}
    (tmp_path / "my.json").write_text(json.dumps(stated))
    texts = ["aqua-2bit", "aqua-2bit+key.predict.ridge=0.1", str(tmp_path / "my.json")]
    recipes = [f"{text}+window.recent=64" for text in texts]
    words = [word for text in recipes for word in ("--recipe", text)]
    assert cli.main(arguments(model, *words, "--no-eval", "--json")) == 0
    found = {row["recipe"]: row["artifact"] for row in json.loads(capsys.readouterr().out)}
    changed = "aqua-2bit-window.recent-64-key.predict.ridge-0.1"
    assert list(found) == ["aqua-2bit-window.recent-64", changed, "mine-window.recent-64"]
    loaded = {name: registry.load_artifact(artifact) for name, artifact in found.items()}
    assert all(one.recipe.name == name and one.recipe.window.recent == 64 for name, one in loaded.items())
    assert [one.recipe.key.predict.ridge for one in loaded.values()] == [1e-3, 0.1, 0.1]
    weights = [one.tensors["layers.1.key.predict.weight"] for one in loaded.values()]
    assert torch.equal(weights[1], weights[2]) and not torch.equal(weights[0], weights[1])
    (tmp_path / "your.json").write_text(json.dumps(stated | {"position": "post"}))
    words = ["--recipe", str(tmp_path / "my.json"), "--recipe", str(tmp_path / "your.json")]
    assert cli.main(arguments(model, *words)) == 2
    assert "recipes ['mine', 'mine']; name at least one, and each once" in capsys.readouterr().err


def test_code_of_a_repository_whose_model_transformers_knows_is_left_alone(model, tmp_path, capsys):
    """With a file that would end this process."""
    folder = Path(shutil.copytree(model, tmp_path / "own"))
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": names}))
    (folder / "own.py").write_text("raise SystemExit(9)")
    assert cli.main(arguments(folder, "--recipe", "aqua-2bit", "--json")) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert registry.load_artifact(row["artifact"]).recipe.name == row["recipe"] == "aqua-2bit"


def test_one_recipe_alone_is_measured_beside_plain_higgs(model, monkeypatch):
    asked = []

    def complete(given, work):
        asked.append(given.baselines)
        work.folder.mkdir(parents=True, exist_ok=True)
        (work.folder / "evaluation.json").write_text("[]")
        return [], {}

    monkeypatch.setattr(run, "complete", complete)
    for words in ([], ["--baseline", "kivi-2bit"], ["--recipe", "aqua-2bit", "--recipe", "aqua-3bit"], ["--no-eval"]):
        assert cli.main(arguments(model, *words)) == 0
    assert asked == [("higgs-2bit",), ("kivi-2bit",), (), ()]


def test_a_dry_run_prints_the_plan_and_writes_nothing(model, capsys, tmp_path):
    given = arguments(model, "--dry-run", "--baseline", "higgs-2bit", "--run", str(tmp_path / "run"))
    assert cli.main([*given, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["tokens"] == 512 and record["layers"] == 2 and record["artifacts"] == ["tiny-model-aqua-2bit"]
    assert record["evaluation"]["baselines"] == ["higgs-2bit"] and record["registries"][0].startswith("file:///")
    work = prepare.prepare(Job(str(model), corpus=str(model / "corpus.txt"), samples=4, seq_len=128))
    assert record["disk_bytes"] == work.plan.needs(work.files)["disk"] and record["download_bytes"] == 0
    evaluation = record["evaluation"]
    assert evaluation["bytes"] > work.plan.needs(work.files)["chunk"], "the model, and the pass through it"
    assert record["fit_processor_s_at_least"] > 0 and evaluation["processor_s_at_least"] > 0
    times = evaluation["processor_s_at_most"] / evaluation["processor_s_at_least"]
    assert times == pytest.approx(evaluation["windows_at_most"] / evaluation["windows_at_least"])
    assert cli.main([*given, "--eval-windows", "1"]) == 0
    shown = capsys.readouterr().out
    assert "evaluation.baselines " in shown and "evaluation.processor_s_at_least " in shown
    assert not (tmp_path / "run").exists() and not (tmp_path / "kvq-home").exists()


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--recipe", "higgs-2bit"], "from_recipe"),
        (["--recipe", "aqua-2bit", "--recipe", "aqua-2bit"], "once"),
        (["--seq-len", "64"], "block"),
        (["--samples", "100000"], "sequences"),
        (["--name", "../up"], "../up"),
        (["--device", "gpu"], "device 'gpu'; use cpu, cuda, cuda:1, ..., mps or xpu"),
        (["--push", "my-org"], "registry my-org; use hf://my-org"),
    ],
)
def test_what_cannot_be_is_refused_before_the_work(model, capsys, arguments, says):
    given = ["--model", str(model), "--corpus", str(model / "corpus.txt"), "--samples", "4", "--seq-len", "128"]
    for more in ([], ["--dry-run"]):  # what a run refuses, its rehearsal does
        assert cli.main([*given, *arguments, *more]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and not captured.out
    assert "Traceback" not in captured.err


def test_an_interrupt_exits_with_130_and_the_same_command_goes_on(model, capsys, monkeypatch, tmp_path):
    from kvq_calib.run import calibrate as runs

    fit, stopped = runs.fit_layer, []

    def interrupted(run, stream, layer):
        if layer == 1 and not stopped:
            stopped.append(layer)
            raise KeyboardInterrupt
        fit(run, stream, layer)

    monkeypatch.setattr(runs, "fit_layer", interrupted)
    given = arguments(model, "--run", str(tmp_path / "run"), "--json")
    assert cli.main(given) == 130
    assert (tmp_path / "run" / "layer-0000").is_dir()
    assert cli.main(given) == 0
    assert not (tmp_path / "run" / "layer-0001.partial").exists()


@pytest.mark.slow
def test_the_flow_makes_and_measures_the_same_as_the_process(model, prepared, monkeypatch, tmp_path):
    settings = {"corpus": str(model / "corpus.txt"), "samples": 4, "seq_len": 384, "run": str(tmp_path / "here")}
    asked = Job(str(model), **settings, baselines=("exact",), max_kl=1e-12)
    here, _ = run.run(asked)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    from kvq_calib.flow import flow

    prepared.clear()
    there, spent = flow.run(replace(asked, run=str(tmp_path / "there")))
    assert len(prepared) == 1
    assert [made.row() for made in there] == [made.row() for made in here]
    assert [made.sha256 for made in there] == [made.sha256 for made in here]
    assert here[0].record()["kl_nats_per_token"] > 0
    assert list(there[0].failed) == here[0].failed != [] and not here[0].places
    written = ((tmp_path / name / "evaluation.json").read_bytes() for name in ("here", "there"))
    assert next(written) == next(written)
    assert spent["forward"] > 0
