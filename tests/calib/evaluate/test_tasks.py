"""Tasks through the cache: exact is the 16-bit model, fewer bits are not, and nothing encoded is no figure."""

import argparse
import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer
from transformers.cache_utils import DynamicCache

from kvq_calib.cli import commands
from kvq_calib.cli import subcommands as commanded
from kvq_calib.evaluate import tasks
from kvq_calib.evaluate.caches import CountedCache
from kvq_calib.evaluate.ledger import Ledger
from kvq_calib.evaluate.record import load_model
from kvq_calib.evaluate.subject import Subject
from kvq_calib.model import find as models
from kvq_calib.tasks import ruler, synthetic
from kvq_runtime.errors import NotFound
from kvq_runtime.recipe import preset
from scripts.train_recall_model import make_model, make_tokenizer

NAMES = ("exact", "rtn-2bit")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The recall model before it is trained: its drawn heads find much, and not all."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("drawn")
    make_model(0).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return models.resolve(folder)


@pytest.fixture(scope="module")
def model(files):
    return load_model(files)


def subject(name: str) -> Subject:
    return Subject(name, preset(name), {})


def plan(**changes) -> tasks.Plan:
    return replace(tasks.Plan(("multikey", "recall"), (384,), (0.1, 0.9), 2), **changes)


@pytest.fixture(scope="module")
def records(files):
    return tasks.evaluate(files, [subject(name) for name in NAMES], plan())


def test_exact_is_the_16_bit_model_and_two_bits_are_not(records):
    first, exact, two = (one["result"]["protocols"] for one in records)
    assert first["in-use"] == first["full"]
    assert first["in-use"]["tasks"]["recall"]["accuracy"] > 0.2, "a model that finds nothing loses nothing"
    for name in ("in-use", "full"):
        assert exact[name]["tasks"] == first[name]["tasks"] and exact[name]["cells"] == first[name]["cells"]
        assert 0.2 < exact[name]["decoded"]["384"] <= 1
    assert two["full"]["tasks"]["recall"]["accuracy"] < first["full"]["tasks"]["recall"]["accuracy"]
    assert [one["artifact"] for one in records] == ["16 bit", *NAMES]


def test_figures_are_means_of_cells_and_errors_are_over_texts(records):
    for one in records:
        for part in one["result"]["protocols"].values():
            assert len(part["cells"]) == 2 * 2
            for name, found in part["tasks"].items():
                cells = [cell for cell in part["cells"] if cell["task"] == name]
                assert found["accuracy"] == pytest.approx(sum(cell["accuracy"] for cell in cells) / len(cells))
                assert found["texts"] == 4 == sum(cell["texts"] for cell in cells)
    assert tasks.summary([1.0, 0.0, 1.0, 1.0])["se"] == pytest.approx(0.25)
    assert tasks.summary([1.0])["se"] is None


def test_likeliest_tokens_in_one_pass_are_those_of_greedy_steps(files, model):
    """A full encode with exact codes grades as steps do, whatever the model's answers are."""
    made = [tasks.make(files, "needle", seed, 256, 0.5) for seed in range(3)]
    with torch.inference_mode():
        stepped = tasks.stepped(model, DynamicCache(config=model.config), made)
        whole = [replace(case, right=tuple(tuple(one) for one in own)) for case, own in zip(made, stepped, strict=True)]
        again, share = tasks.encoded(model, subject("exact"), whole)
    assert again == stepped and share == pytest.approx((256 - preset("exact").window.sinks) / 256)


def test_rows_side_by_side_answer_as_alone(files, model):
    made = [tasks.make(files, "recall", seed, 384, 0.5) for seed in range(3)]
    with torch.inference_mode():
        together = tasks.stepped(model, CountedCache(preset("rtn-4bit"), model), made)
        alone = [tasks.stepped(model, CountedCache(preset("rtn-4bit"), model), [one])[0] for one in made]
    assert together == alone
    assert len({case.shape for case in made}) == 1


def test_a_text_that_stays_exact_gives_a_reason_and_no_figures(files):
    _, found = tasks.evaluate(files, [subject("rtn-2bit")], plan(lengths=(128,), tasks=("needle",)))
    parts = found["result"]["protocols"]
    assert "nothing was encoded" in parts["in-use"]["reason"] and "tasks" not in parts["in-use"]
    assert "tasks" in parts["full"], "a block of 128 is encoded where nothing recent stays exact"


def test_a_recipe_that_chooses_tokens_has_no_full_encode(files):
    _, found = tasks.evaluate(files, [subject("subkv-2bit")], plan(tasks=("multikey",), samples=1))
    assert "chooses" in found["result"]["protocols"]["full"]["reason"]
    assert found["result"]["protocols"]["in-use"]["decoded"]["384"] > 0


def test_what_was_measured_is_not_measured_again(files, tmp_path, monkeypatch):
    ledger, short = Ledger(tmp_path), plan(tasks=("multikey",), samples=1)
    first = tasks.evaluate(files, [subject("exact")], short, ledger=ledger)
    monkeypatch.setattr(tasks, "stepped", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(tasks, "encoded", lambda *_: pytest.fail("measured again"))
    assert tasks.evaluate(files, [subject("exact")], short, ledger=ledger) == first
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        tasks.evaluate(files, [subject("rtn-2bit")], short, ledger=ledger)


def test_an_interrupted_command_says_how_it_goes_on_and_repeats_nothing(files, kvq, monkeypatch):
    words = ["eval", "exact", "--model", files.path, "--tasks", "multikey", "--lengths", 384, "--depths", 0.5]
    words += ["--samples", 1, "--protocol", "in-use", "--recent", 0, "--device", "cpu"]
    stepped, seen, most = tasks.stepped, [], 1

    def stopping(*given):
        if len(seen) == most:
            raise KeyboardInterrupt
        seen.append(type(given[1]))
        return stepped(*given)

    monkeypatch.setattr(tasks, "stepped", stopping)
    code, out, err = kvq(*words)
    assert (code, out) == (130, "") and err.endswith("kvq: interrupted; the same command goes on where it stopped\n")
    most = -1
    code, out, _ = kvq(*words)
    assert code == 0 and "multikey" in out
    assert len(seen) == len(set(seen)) == 2, "the 16-bit model, then the recipe"


def test_what_is_kept_in_a_folder_that_cannot_be_written_is_read(files, kvq, monkeypatch, tmp_path):
    monkeypatch.setenv("KVQ_HOME", str(tmp_path))
    words = ["eval", "rtn-2bit", "--model", files.path, "--tasks", "multikey", "--lengths", "384", "--samples", "1"]
    code, out, _ = kvq(*words)
    assert code == 0
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    monkeypatch.setattr(tasks, "stepped", lambda *_: pytest.fail("a text is asked"))
    assert kvq(*words)[:2] == (0, out)
    code, out, err = kvq(*words, "--seed", "1")
    assert (code, out) == (1, "") and err.startswith(f"kvq: {tmp_path / 'evaluated'} may not be written by this user")


def test_what_cannot_be_asked(files):
    with pytest.raises(ValueError, match=r"tasks vt; .* can be asked needle, passkey, multikey"):
        tasks.evaluate(files, [], plan(tasks=("vt",)))
    with pytest.raises(ValueError, match=r"texts of 9000 tokens; .* at most 8192"):
        tasks.evaluate(files, [], plan(lengths=(9000,)))
    with pytest.raises(ValueError, match="use 0 to 1"):
        plan(depths=(2.0,))


def test_other_models_are_asked_in_words():
    demo = models.resolve("demo")
    assert list(tasks.known(demo)) == list(ruler.TASKS)
    made = tasks.make(demo, "niah_multikey_2", 0, 700, 0.5)
    prompt = ruler.fitted(
        "niah_multikey_2", 0, 700, 0.5, lambda text: len(tasks._tokenizer(demo.path).encode(text).ids)
    )
    tokenizer = tasks._tokenizer(demo.path)
    assert tokenizer.decode([*made.context, *made.asked[0]]) == prompt.context + prompt.asked
    assert tokenizer.decode(list(made.asked[0])).lstrip().startswith("What is the special magic number")
    assert made.steps == (128,) and made.right is None
    assert made.score([tokenizer.encode(f" {prompt.references[0]}.").ids]) == 1 > made.score([[5]])


TEMPLATE = (
    "{% for one in messages %}[{{ one.role }}]{{ one.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_a_chat_model_is_asked_in_its_own_form(tmp_path):
    """The text and the question are a turn of the user's, the answer begins in the model's; else all is one text."""
    demo = models.resolve("demo")
    folder = shutil.copytree(demo.path, tmp_path / "chat")
    with pytest.raises(ValueError, match="chat has no chat template: it is no chat model; leave --chat out"):
        tasks.make(replace(demo, path=folder), "passkey", 0, 700, 0.5, chat=True)
    tasks.turn.cache_clear()
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    made = tasks.make(replace(demo, path=folder), "passkey", 0, 700, 0.5, chat=True)
    plain = tasks.make(demo, "passkey", 0, 700, 0.5)
    tokenizer = tasks._tokenizer(demo.path)
    said = tokenizer.decode([*made.context, *made.asked[0]])
    assert said.startswith("[user]There is an important info") and len(made.context) + len(made.asked[0]) <= 700 - 16
    assert tokenizer.decode(list(made.asked[0])).strip() == "What is the pass key?[end][assistant]The pass key is"
    assert tokenizer.decode(list(plain.asked[0])).strip() == "What is the pass key? The pass key is"


def test_what_a_training_left_in_a_tokenizer_cuts_and_pads_no_text(tmp_path):
    """A text that is as long as one likes, and never longer than the tokenizer makes it, has no end."""
    demo = models.resolve("demo")
    folder = shutil.copytree(demo.path, tmp_path / "cut")
    cut = Tokenizer.from_file(str(folder / "tokenizer.json"))
    cut.enable_truncation(100)
    cut.enable_padding(length=100)
    cut.save(str(folder / "tokenizer.json"))
    assert len(tasks._tokenizer(folder).encode("word " * 500).ids) > 100, "before a text is made, which would not end"
    made, plain = (tasks.make(replace(demo, path=path), "passkey", 0, 700, 0.5) for path in (folder, demo.path))
    assert (made.context, made.asked) == (plain.context, plain.asked)


@pytest.mark.parametrize("name, given", [("tasks", ("recall",) * 2), ("lengths", (384, 384)), ("depths", (0.5, 0.5))])
def test_what_is_named_twice_is_not_counted_twice(name, given):
    with pytest.raises(ValueError, match=rf"{name}=.*; name each once"):
        plan(**{name: given})


def test_the_16_bit_model_can_be_asked_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVQ_HOME", str(tmp_path))
    top = argparse.ArgumentParser()
    commands.add_eval(top.add_subparsers())
    words = ["eval", "--model", "demo", "--tasks", "passkey", "--lengths", "256", "--depths", "0.5", "--samples", "1"]
    words += ["--answer", "4", "--json", "--quiet", "--device", "cpu", "--protocol", "in-use"]
    args = top.parse_args(words)
    args.run(args)
    (record,) = json.loads(capsys.readouterr().out)
    assert record["result"]["recipe"] == "16 bit" and record["protocol"]["steps"] == 4
    assert "chat" not in record["protocol"], "records of before say the same"
    args = top.parse_args(["eval", "--model", "demo"])
    with pytest.raises(ValueError, match="nothing is named to be measured; give a recipe or an artifact, or --tasks"):
        args.run(args)


def test_needles_lie_in_the_text_that_is_given(tmp_path, monkeypatch, capsys):
    """Records name it and its digest, and no path."""
    demo = models.resolve("demo")
    essays = tmp_path / "essays.txt"
    essays.write_text("One sentence of it. Another one!")
    hidden = tasks.haystack(str(essays))
    made = tasks.make(demo, "niah_multivalue", 0, 600, 0.5, hidden)
    text = tasks._tokenizer(demo.path).decode(list(made.context))
    assert text.count("One of the special magic numbers") == 4 and text.count("One sentence of it. Another one!") > 1
    monkeypatch.setenv("KVQ_HOME", str(tmp_path))
    top = argparse.ArgumentParser()
    commands.add_eval(top.add_subparsers())
    words = ["eval", "exact", "--model", "demo", "--tasks", "niah_multivalue", "--lengths", "600", "--depths", "0.5"]
    words += ["--samples", "1", "--json", "--quiet", "--device", "cpu", "--dtype", "float32", "--protocol", "in-use"]
    found = {}
    for name in (str(essays), "demo-code"):
        args = top.parse_args([*words, "--haystack", name])
        args.run(args)
        found[name] = json.loads(capsys.readouterr().out)[0]
    assert found[str(essays)]["protocol"]["haystack"] == {"name": "essays.txt", "digest": hidden.digest}
    assert len({record["corpus"] for record in found.values()}) == 2
    args = top.parse_args([*words, "--haystack", str(tmp_path / "none.txt")])
    with pytest.raises(NotFound, match="none.txt is not a file"):
        args.run(args)


def test_texts_too_short_for_a_task_are_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(tasks, "load_model", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(ValueError, match="cwe in length=600 tokens; use at least"):
        tasks.evaluate(models.resolve("demo"), [], tasks.Plan(("niah_single_1", "cwe"), (600,)))


def test_the_command_prints_records_and_a_table(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVQ_HOME", str(tmp_path))
    top = argparse.ArgumentParser()
    commands.add_eval(top.add_subparsers())
    words = ["eval", *NAMES, "--model", str(files.path), "--tasks", "multikey", "--lengths", "384", "--depths", "0.5"]
    args = top.parse_args([*words, "--samples", "1", "--device", "cpu", "--json", "--recent", "0"])
    assert args.run(args) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["result"]["recipe"] for one in found] == ["16 bit", *NAMES]
    assert found[2]["result"]["window"]["recent"] == 0 and found[0]["protocol"]["tasks"] == ["multikey"]
    picture = tmp_path / "tasks.png"
    args = top.parse_args([*words, "--samples", "1", "--device", "cpu", "--recent", "0", "--plot", str(picture)])
    assert args.run(args) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["recipe", "bits", "protocol", "multikey"] and len(lines) == 1 + 3 * 2


def test_a_picture_of_tasks_needs_tasks(files):
    top = argparse.ArgumentParser()
    commands.add_eval(top.add_subparsers())
    args = top.parse_args(["eval", "exact", "--model", str(files.path), "--plot", "tasks.png"])
    with pytest.raises(ValueError, match="--plot draws tasks, and --tasks names none; --plots DIR"):
        args.run(args)


@pytest.mark.parametrize(("other", "what"), [("--tasks passkey", "--tasks"), ("--protocol decode",) * 2])
@pytest.mark.parametrize("words", [["--plots", "drawn"], ["--layers"], ["--by-layer"], ["--rows", "2"]])
def test_an_option_of_text_is_refused_where_no_text_is_predicted(files, kvq, words, other, what):
    code, _, err = kvq("eval", "exact", "--model", files.path, *other.split(), *words)
    assert code == 2 and err.startswith(f"kvq: {words[0]}: of text that is predicted, of which {what} measures none;")


@pytest.mark.parametrize("words", ["eval exact --tasks passkey", "eval exact --protocol decode", "compare"])
def test_a_place_that_keeps_nothing_is_told_before_the_work(words, files, kvq, monkeypatch, tmp_path):
    (tmp_path / "evaluated").touch()
    monkeypatch.setenv("KVQ_HOME", str(tmp_path))
    monkeypatch.setattr(commanded, "progress_bar", lambda *_: pytest.fail("the work has begun"))
    code, _, err = kvq(*words.split(), "--model", files.path)
    assert (
        code == 2
        and err
        == f"kvq: $KVQ_HOME {tmp_path / 'evaluated'}: {tmp_path / 'evaluated'} is a file; name a "
        "folder, which may be new\n"
    )


def test_tasks_of_others_need_lm_eval_and_have_no_picture(files, kvq, monkeypatch):
    words = ["eval", "exact", "--model", files.path, "--tasks", "gsm8k"]
    monkeypatch.setattr(commanded, "find_spec", lambda name: None)
    code, _, err = kvq(*words)
    assert code == 1 and err.endswith("brings it: pip install -e '.[lm-eval]' in a checkout\n")
    monkeypatch.setattr(commanded, "find_spec", lambda name: name)
    code, _, err = kvq(*words, "--plot", "tasks.png")
    assert code == 2 and "--plot draws kvq's own tasks (needle, " in err
    code, _, err = kvq(*words, "--protocol", "full")
    assert code == 2 and "gsm8k are answered in use" in err


def test_symbols_are_told_by_the_tokenizer(files):
    assert tasks.of_symbols(files) and not tasks.of_symbols(models.resolve("demo"))
    assert synthetic.words()[synthetic.ASK] == "<ask>"
