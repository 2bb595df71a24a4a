"""What a calibration says while it works and when it is done."""

import io
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvq_calib.cli import outcome, progress
from kvq_calib.cli.progress import Bar, Lines, Status, spoken
from kvq_calib.report.published import Place, Published
from kvq_calib.run import budget
from kvq_calib.run.run import Progress
from kvq_runtime.cli.table import percent
from kvq_runtime.registry.evaluation_records import TextRecord, parse
from kvq_runtime.registry.reference import registry_url


def record(name: str, relative: float, **more: float) -> TextRecord:
    figures = {"perplexity": 12 * (1 + relative), "reference_perplexity": 12.0, "relative": relative, "kl": 0.02} | more
    bits = {"asymptotic": 2.125}
    about = {"windows": 4, "length": 64, "text": {"source": "demo"}}
    result = {"recipe": name, "bits": bits, "protocols": {"full": figures}}
    return parse({"artifact": name, "corpus": "c", "protocol": about, "result": result})


MADE = Published("aqua-2bit", "m-aqua-2bit", "ab" * 32, 2.4583, 0.026, 0.0072, record("ab" * 32, -2e-6))


@pytest.fixture
def made(tmp_path) -> Published:
    """Published in the registry in use, where it was before, and in another."""
    folder = tmp_path / "run" / MADE.name
    folder.mkdir(parents=True)
    for name in ("README.md", "error-by-layer.png", "evaluation.json"):
        (folder / name).touch()
    here = Place(registry_url(), "m-aqua-2bit@1.2.0", "/blobs/ab", False)
    there = Place("file:///other", "m-aqua-2bit@1.0.0", "/other/blobs/ab", True)
    return replace(MADE, places=(here, there), folder=str(folder))


def test_the_end_says_where_all_of_it_is_and_what_to_do_next(made, capsys):
    outcome.show([made], [record("ab" * 32, -2e-6), record("higgs-2bit", 0.0312)])
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line for line in shown.splitlines() if line}
    assert "vs 16 bit" in lines["recipe"] and lines["16"].split()[:4] == ["16", "bit", "16", "12.000"]
    assert "(baseline)" in lines["higgs-2bit"] and "+3.12%" in lines["higgs-2bit"]
    assert " 0.00%" in lines["aqua-2bit"] and "-0.00%" not in shown
    assert f"was there            m-aqua-2bit@1.2.0 in {registry_url()}: published already, nothing changed" in shown
    assert "published            m-aqua-2bit@1.0.0 in file:///other\n" in shown
    assert "artifact             /blobs/ab\n" in shown and "artifact             /other/blobs/ab\n" in shown
    assert f"card, plots, record  {made.folder}\n" in shown
    assert 'KVQCache.from_pretrained("m-aqua-2bit@1.2.0", model=model)\n' in shown
    assert "kvq promote m-aqua-2bit@1.2.0   (" in shown


def test_bytes_of_a_withdrawn_version_are_called_so_and_not_promoted(made, capsys):
    outcome.show([replace(made, places=(replace(made.places[0], yanked="wrong tokenizer"),))], [])
    shown = capsys.readouterr().out
    assert "WITHDRAWN            wrong tokenizer; by its number alone it is loaded\n" in shown
    assert "kvq promote" not in shown


def test_another_registry_and_a_run_folder_are_named_where_one_loads_from(made, capsys):
    outcome.show([replace(made, places=made.places[1:])], [])
    shown = capsys.readouterr().out
    assert 'from_pretrained("m-aqua-2bit@1.0.0", model=model, registry="file:///other")' in shown
    assert "kvq promote m-aqua-2bit@1.0.0 --registry file:///other" in shown
    outcome.show([replace(made, places=())], [])
    shown = capsys.readouterr().out
    assert f'from_pretrained("{made.folder}/kvq.safetensors", model=model)' in shown and "kvq promote" not in shown
    outcome.show([replace(made, places=(), failed=["KL"])], [])
    shown = capsys.readouterr().out
    assert "not published        it exceeds the bounds" in shown and "from_pretrained" not in shown


def test_json_is_numbers_with_their_units_in_the_names(made, capsys):
    (found,) = outcome.as_records([made], [record("ab" * 32, -2e-6), record("higgs-2bit", 0.0312)])
    assert found["perplexity_over_16_bit"] == 1 - 2e-6 and found["kl_nats_per_token"] == 0.02
    assert found["perplexity"] == 12 * (1 - 2e-6) and found["bits_per_element"] == 2.4583 and found["exceeds"] == []
    assert [place["path"] for place in found["published"]] == ["/blobs/ab", "/other/blobs/ab"]
    (beside,) = found["baselines"]
    assert beside["recipe"] == "higgs-2bit" and beside["perplexity_over_16_bit"] == pytest.approx(1.0312)
    assert found["folder"] == made.folder


def test_blocks_beyond_calibrations_errors_are_told_where_they_were_counted(made, capsys):
    outcome.show([made], [record("ab" * 32, -2e-6)])
    assert "beyond:" not in capsys.readouterr().out
    one = record("ab" * 32, -2e-6, beyond=0.0125)
    outcome.show([replace(made, measured=one)], [one])
    shown = capsys.readouterr().out
    assert "1.25%" in shown and "\nbeyond: blocks of keys or values whose error" in shown


@pytest.mark.parametrize(
    "share, shown", [(0.0123, "+1.23%"), (-0.05, "-5.00%"), (-4e-5, "0.00%"), (4e-5, "0.00%"), (1e-4, "+0.01%")]
)
def test_what_rounds_to_nothing_has_no_sign(share, shown):
    assert percent(share) == shown


@pytest.mark.parametrize("before, says", [(0, "took 3.0 s, 3.00 times"), (6, "in an earlier run of this command, 3.00"),
                                          (2, "2 of 6 in an earlier run, 3.00")])  # fmt: skip
def test_seconds_of_an_earlier_run_are_called_so(before, says, capsys):
    outcome.cost(5.5, {"forward": 1.0, "aqua-2bit": 1.5, "capture": 0.5, "evaluation": 2.0}, (before, 6))
    shown = capsys.readouterr().out
    assert says in shown and shown.endswith("aqua-2bit 1.5 s, capture 0.5 s. The evaluation took 2.0 s.\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_terminal(monkeypatch) -> Terminal:
    """Standard error as a terminal; not a fixture, since pytest sets it anew after those."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_a_status_is_one_line_that_is_cleared(monkeypatch):
    terminal = a_terminal(monkeypatch)
    with Status("kvq-calibrate") as show:
        show("loading torch")
        show("looking for\x1b[2J")
    assert terminal.getvalue().split("\r\x1b[K") == [
        "", "kvq-calibrate: loading torch ...", "kvq-calibrate: looking for\\x1b[2J ...", "",
    ]  # fmt: skip
    with Status("kvq-calibrate", quiet=True) as show:
        show("nothing")
    assert "nothing" not in terminal.getvalue()


def test_a_bar_is_there_at_once_and_none_stands_at_its_end(monkeypatch):
    terminal = a_terminal(monkeypatch)
    monkeypatch.setattr(Bar, "_work", lambda self, round, layer: 192)
    plan = SimpleNamespace(chunks=[range(2)], seq_len=32, geometry=SimpleNamespace(layers=1))
    monkeypatch.setattr(budget, "most_rounds", lambda plan: 1)
    bar = Bar(plan)  # type: ignore[arg-type]
    assert "choosing the text:   0%" in terminal.getvalue()
    bar(Progress(0, 1, "capture", 1, 1, 64))
    assert "layer 1/1" in terminal.getvalue() and terminal.getvalue().count("\n") == 0  # the same bar
    bar(Progress(-1, 1, "evaluation", 5, 10, 5))
    assert "drawing" not in terminal.getvalue()
    bar(Progress(-1, 1, "evaluation", 10, 10, 5))
    assert terminal.getvalue().endswith("kvq-calibrate: drawing the plots, writing the cards ...")
    bar.close()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_the_command_says_something_before_it_imports_torch(monkeypatch):
    terminal = a_terminal(monkeypatch)
    from kvq_calib.cli import calibrate

    class Blocked:
        def find_spec(self, name, *_):
            if name == "kvq_calib.job":
                raise RuntimeError("reached")

    monkeypatch.delitem(sys.modules, "kvq_calib.job", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Blocked(), *sys.meta_path])
    monkeypatch.delattr("kvq_calib.job", raising=False)
    assert calibrate.main(["--model", "demo"]) == 1
    assert terminal.getvalue().startswith("\r\x1b[Kkvq-calibrate: loading torch and transformers ...")


class Clock:
    """A clock that is set by hand, in seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lines_come_where_there_is_no_terminal_and_say_what_is_left(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    clock = Clock()
    lines = Lines("kvq", clock=clock)
    assert lines("layer 1 of 2", 20, 100) == lines("layer 1 of 2", 21, 100) == "", "1% tells nothing of the rest"
    for seconds, done in ((0, 20), (29, 24), (31, 30), (40, 50), (62, 60)):  # of 100; 20 were done in an earlier run
        clock.now = seconds
        lines("layer 1 of 2", done, 100)
    assert sys.stderr.getvalue().splitlines() == [
        "kvq: layer 1 of 2, 20% done",
        "kvq: layer 1 of 2, 30% done, about 4 minutes left",
        "kvq: layer 1 of 2, 60% done, about 62 seconds left",
    ]
    quiet = Lines("kvq", quiet=True, clock=clock)
    terminal = a_terminal(monkeypatch)
    for speak in (quiet, Lines("kvq", clock=clock)):
        clock.now += 100
        speak("layer", 1, 2)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 seconds"), (89, "89 seconds"), (61 * 60, "61 minutes"), (7200, "2.0 hours")]
)
def test_lengths_of_time_in_words(seconds, said):
    assert spoken(seconds) == said


def test_a_bar_without_a_terminal_writes_where_the_run_is(monkeypatch):
    """Of two rounds of two layers: the second layer of the first begins at a quarter of all."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(Bar, "_work", lambda self, round, layer: 200)
    monkeypatch.setattr(budget, "most_rounds", lambda plan: 2)
    plan = SimpleNamespace(chunks=[range(2)], seq_len=50, geometry=SimpleNamespace(layers=2))
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    bar = Bar(plan)  # type: ignore[arg-type]
    for seconds, stage in ((0, "capture"), (40, "aqua-2bit keys")):
        clock.now = seconds
        bar(Progress(1, 2, stage, 1, 1, 100))
    bar.close()
    assert sys.stderr.getvalue().splitlines() == [
        "kvq-calibrate: choosing the text",
        "kvq-calibrate: layer 2 of 2, capture, 38% done",
        "kvq-calibrate: layer 2 of 2, aqua-2bit keys, 50% done, about 3 minutes left",
    ]


def test_the_time_that_an_evaluation_takes_is_told_from_its_own_begin(monkeypatch):
    """Not from the gradients', which are a pass over the whole model as well."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(Bar, "_work", lambda self, round, layer: 200)
    monkeypatch.setattr(budget, "most_rounds", lambda plan: 1)
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    bar = Bar(SimpleNamespace(chunks=[range(2)], seq_len=50, geometry=SimpleNamespace(layers=1)))  # type: ignore[arg-type]
    for seconds, layer, stage, done in (
        (0, -1, "gradients", 0), (5, -1, "gradients", 10), (1000, 0, "keys", 1), (1040, -1, "evaluation", 0),
        (1080, -1, "evaluation", 2),
    ):  # fmt: skip
        clock.now = seconds
        bar(Progress(layer, 1, stage, done, 10, 1))
    bar.close()
    assert sys.stderr.getvalue().endswith("kvq-calibrate: evaluation, 20% done, about 3 minutes left\n")


def test_a_bad_artifact_is_said_to_be_bad_and_not_to_be_promoted(made, capsys):
    outcome.show([made], [record("ab" * 32, 1.93)], caution="fitted on 1 sequence")
    shown = capsys.readouterr().out
    assert "VERDICT              TOO LOSSY: perplexity +193.0%" in shown and "kvq promote m-aqua" not in shown
    assert "CAUTION              fitted on 1 sequence" in shown
    assert outcome.as_records([made], [record("ab" * 32, 1.93)])[0]["verdict"]["word"] == "too lossy"
    outcome.show([made], [])
    assert "VERDICT              NOT MEASURED" in capsys.readouterr().out
