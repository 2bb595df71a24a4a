"""Needle tasks through the cache: exact is the 16-bit model, fewer bits are not, and nothing encoded is no figure."""

import json
import os
import shutil
from dataclasses import replace
from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer
from transformers.cache_utils import DynamicCache

from kvq_calib.cli import subcommands as commanded
from kvq_calib.evaluate import tasks
from kvq_calib.evaluate.caches import CountedCache
from kvq_calib.evaluate.record import load_model
from kvq_calib.evaluate.subject import Subject
from kvq_calib.model import find as models
from kvq_calib.tasks.needles import STEPS, Haystack
from kvq_runtime.recipe import preset

SENTENCES = ("One sentence of it.", "Another one!")
HAYSTACK = Haystack("text", "digest", SENTENCES)


@pytest.fixture(scope="module")
def files():
    return models.resolve("demo")


@pytest.fixture(scope="module")
def model(files):
    return load_model(files)


def subject(name: str) -> Subject:
    return Subject(name, preset(name), {})


def plan(**changes) -> tasks.Plan:
    return replace(tasks.Plan(("passkey", "needle"), HAYSTACK, (512,), (0.1, 0.9), 1), **changes)


def test_exact_answers_as_the_16_bit_model_and_two_bits_do_not(files, model):
    haystack = Haystack.of_texts("topics", "digest", [topics["comparisons"]])
    cases = [tasks.make(files, "needle", seed, 512, 0.5, haystack) for seed in range(2)]
    with torch.inference_mode():
        found = {
            name: [tasks.stepped(model, make(), [case])[0] for case in cases]
            for name, make in (
                ("16 bit", lambda: DynamicCache(config=model.config)),
                *((name, lambda name=name: CountedCache(preset(name), model)) for name in ("exact", "rtn-2bit")),
            )
        }
    assert found["exact"] == found["16 bit"] != found["rtn-2bit"]


def test_rows_side_by_side_answer_as_alone(files, model):
    cases = [tasks.make(files, "passkey", seed, 384, 0.5, HAYSTACK) for seed in range(3)]
    assert len({(len(case.context), len(case.asked)) for case in cases}) == 1
    with torch.inference_mode():
        together = tasks.stepped(model, CountedCache(preset("rtn-4bit"), model), cases)
        alone = [tasks.stepped(model, CountedCache(preset("rtn-4bit"), model), [case])[0] for case in cases]
    assert together == alone


def test_figures_are_means_of_cells_and_errors_are_over_texts(files, monkeypatch):
    made = plan(samples=2)
    scored = iter([1.0, 0.0, 1.0, 1.0] * 4)
    monkeypatch.setattr(
        tasks, "make", lambda *given, make=tasks.make: replace(make(*given), score=lambda _: next(scored))
    )
    for record in tasks.evaluate(files, [subject("rtn-2bit")], made):
        part = record["result"]["protocols"]["in-use"]
        assert [cell["accuracy"] for cell in part["cells"]] == [0.5, 1.0] * 2
        assert part["tasks"]["needle"] == {"accuracy": 0.75, "se": pytest.approx(0.25), "texts": 4}
    assert 0.2 < part["decoded"]["512"] <= 1 and part["reference"]["needle"]["accuracy"] == 0.75
    assert tasks.summary([1.0])["se"] is None


def test_a_text_that_stays_exact_gives_a_reason_and_no_figures(files):
    _, found = tasks.evaluate(files, [subject("rtn-2bit")], plan(lengths=(160,), tasks=("needle",), samples=1))
    part = found["result"]["protocols"]["in-use"]
    assert "nothing was encoded" in part["reason"] and "tasks" not in part


def test_an_interrupted_command_says_how_it_goes_on_and_repeats_nothing(kvq, monkeypatch):
    words = ["eval", "exact", "--model", "demo", "--tasks", "passkey", "--lengths", 512, "--depths", 0.5]
    words += ["--samples", 1, "--recent", 0, "--device", "cpu"]
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
    assert code == 0 and out.splitlines()[0].split()[:4] == ["recipe", "bits", "protocol", "passkey"]
    assert len(seen) == len(set(seen)) == 2, "the 16-bit model, then the recipe"
    code, out, _ = kvq(*words, "--json")
    assert [one["result"]["recipe"] for one in json.loads(out)] == ["16 bit", "exact"] and len(seen) == 2


def test_what_is_kept_in_a_folder_that_cannot_be_written_is_read(kvq, monkeypatch, tmp_path):
    monkeypatch.setenv("KVQ_HOME", str(tmp_path))
    words = ["eval", "rtn-2bit", "--model", "demo", "--tasks", "passkey", "--lengths", "512", "--samples", "1"]
    words += ["--depths", "0.5"]
    code, out, _ = kvq(*words)
    assert code == 0
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    monkeypatch.setattr(tasks, "stepped", lambda *_: pytest.fail("a text is asked"))
    assert kvq(*words)[:2] == (0, out)
    code, out, err = kvq(*words, "--seed", "1")
    assert (code, out) == (1, "") and err.startswith(f"kvq: {tmp_path / 'evaluated'} may not be written by this user")


def test_what_cannot_be_asked_is_refused_before_any_work(files, monkeypatch):
    monkeypatch.setattr(tasks, "load_model", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(ValueError, match=r"texts of 9000 tokens; .* at most \d+"):
        tasks.evaluate(files, [], plan(lengths=(9000,)))
    with pytest.raises(ValueError, match="needle in length=64 tokens; use at least"):
        tasks.evaluate(files, [], plan(tasks=("needle",), lengths=(64,)))
    with pytest.raises(ValueError, match="use 0 to 1"):
        plan(depths=(2.0,))
    with pytest.raises(ValueError, match=r"lengths=.*; name each once"):
        plan(lengths=(512, 512))


def test_a_needle_lies_at_its_depth_and_the_prompt_is_as_long_as_it_may_be(files):
    tokenizer = Tokenizer.from_file(str(files.path / "tokenizer.json"))
    texts = []
    for depth in (0.0, 1.0):
        case = tasks.make(files, "needle", 0, 700, depth, HAYSTACK)
        assert 640 < len(case.context) + len(case.asked) + STEPS <= 700
        texts.append(tokenizer.decode([*case.context, *case.asked]))
    first, last = (text.index("One of the special magic numbers") / text.index("What is the special") for text in texts)
    assert first < 0.2 and last > 0.9 and texts[0].count(SENTENCES[0]) > 5
    value = texts[0].split(" is: ")[1][:7]
    assert case.score(tokenizer.encode(f" {value}.").ids) == 1 > case.score([5])


TEMPLATE = (
    "{% for one in messages %}[{{ one.role }}]{{ one.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_a_chat_model_is_asked_in_its_own_form(files, tmp_path):
    """Text and question are a turn of the user's, the answer begins in the model's. A tokenizer's own limits on length
    and padding do not apply."""
    folder = shutil.copytree(files.path, tmp_path / "chat")
    cut = Tokenizer.from_file(str(folder / "tokenizer.json"))
    cut.enable_truncation(100)
    cut.enable_padding(length=100)
    cut.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="chat has no chat template: it is no chat model; leave --chat out"):
        tasks.make(replace(files, path=folder), "passkey", 0, 700, 0.5, HAYSTACK, chat=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    made = tasks.make(replace(files, path=folder), "passkey", 0, 700, 0.5, HAYSTACK, chat=True)
    tokenizer = Tokenizer.from_file(str(files.path / "tokenizer.json"))
    said = tokenizer.decode([*made.context, *made.asked])
    assert said.startswith("[user]There is an important info") and 640 < len(made.context) + len(made.asked) <= 684
    assert tokenizer.decode(list(made.asked)).strip() == "What is the pass key?[end][assistant]The pass key is"


def test_the_16_bit_model_can_be_asked_alone_with_needles_in_a_text(tmp_path, monkeypatch, kvq):
    """Records name the text and its digest, and no path."""
    monkeypatch.setenv("KVQ_HOME", str(tmp_path))
    (tmp_path / "essays.txt").write_text(" ".join(SENTENCES))
    words = ["eval", "--model", "demo", "--tasks", "needle", "--lengths", "512", "--depths", "0.5", "--samples", "1"]
    words += ["--quiet", "--device", "cpu", "--corpus", tmp_path / "essays.txt"]
    code, out, _ = kvq(*words, "--json")
    (record,) = json.loads(out)
    assert code == 0 and record["result"]["recipe"] == "16 bit"
    assert record["protocol"]["haystack"] == {
        "name": "essays.txt", "digest": tasks.haystack(str(tmp_path / "essays.txt")).digest
    }  # fmt: skip
    code, _, err = kvq("eval", "--model", "demo")
    assert code == 2 and "nothing is named to be measured; give a recipe or an artifact, or --tasks" in err


@pytest.mark.parametrize("words", [["--plots", "drawn"], ["--layers"], ["--by-layer"], ["--rows", "2"]])
def test_an_option_of_text_is_refused_where_no_text_is_predicted(kvq, words):
    code, _, err = kvq("eval", "exact", "--model", "demo", "--tasks", "passkey", *words)
    assert code == 2 and err.startswith(f"kvq: {words[0]}: of text, of which --tasks measures none;")


@pytest.mark.parametrize("words", ["eval exact --tasks passkey", "compare"])
def test_a_place_that_keeps_nothing_is_told_before_the_work(words, kvq, monkeypatch, tmp_path):
    (tmp_path / "evaluated").touch()
    monkeypatch.setenv("KVQ_HOME", str(tmp_path))
    monkeypatch.setattr(commanded, "progress_bar", lambda *_: pytest.fail("the work has begun"))
    code, _, err = kvq(*words.split(), "--model", "demo")
    place = tmp_path / "evaluated"
    assert (code, err) == (2, f"kvq: $KVQ_HOME {place}: {place} is a file; name a folder, which may be new\n")


def test_tasks_of_others_need_lm_eval(kvq, monkeypatch):
    words = ["eval", "exact", "--model", "demo", "--tasks", "gsm8k"]
    monkeypatch.setattr(commanded, "find_spec", lambda name: None)
    code, _, err = kvq(*words)
    assert code == 1 and err.endswith("brings it: pip install -e '.[lm-eval]' in a checkout\n")
    monkeypatch.setattr(commanded, "find_spec", lambda name: name)
    code, _, err = kvq(*words, "--protocol", "full")
    assert code == 2 and "gsm8k are answered in use" in err
