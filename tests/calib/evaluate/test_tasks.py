"""Tasks through the cache: exact is the 16-bit model, fewer bits are not, and nothing encoded is no figure."""

from dataclasses import replace
from functools import partial
from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer
from transformers.cache_utils import DynamicCache

from kvq_calib.cli import subcommands as commanded
from kvq_calib.evaluate import tasks
from kvq_calib.evaluate.caches import in_use
from kvq_calib.evaluate.candidate import Candidate
from kvq_calib.evaluate.needles import STEPS, Haystack
from kvq_calib.evaluate.record import load_model
from kvq_calib.evaluate.saved_results import SavedResults
from kvq_calib.evaluate.tasks import loglikelihoods
from kvq_calib.model import find as models
from kvq_runtime.artifact import recipe_text
from kvq_runtime.recipe import preset

SENTENCES = ("One sentence of it.", "Another one!")
HAYSTACK = Haystack("text", "digest", SENTENCES)
SHORT = "+window.recent=0"  # so that a block is encoded as soon as it is full


@pytest.fixture(scope="module")
def files():
    return models.resolve("demo")


@pytest.fixture(scope="module")
def model(files):
    return load_model(files)


def plan(**changes) -> tasks.Plan:
    return replace(tasks.Plan(("passkey", "needle"), HAYSTACK, (512,), (0.1, 0.9), 1), **changes)


def cache(model, name: str):
    return in_use(recipe_text.read(name), model)


def test_exact_answers_as_the_16_bit_model_and_two_bits_do_not(files, model):
    haystack = Haystack.of_texts("topics", "digest", [topics["comparisons"]])
    cases = [tasks.make(files, "needle", seed, 512, 0.5, haystack) for seed in range(2)]
    makes = [
        lambda: DynamicCache(config=model.config),
        *(partial(cache, model, name) for name in ("exact", "rtn-2bit")),
    ]
    with torch.inference_mode():
        exact, same, two = ([tasks.answer(model, make(), case) for case in cases] for make in makes)
    assert exact == same != two


def test_figures_are_means_of_cells_and_errors_are_over_texts(files, monkeypatch):
    scored = iter([1.0, 0.0, 1.0, 1.0] * 2)
    monkeypatch.setattr(
        tasks, "make", lambda *given, make=tasks.make: replace(make(*given), score=lambda _: next(scored))
    )
    asked = plan(samples=2, tasks=("needle",), lengths=(320,))
    for record in tasks.evaluate(files, [Candidate("rtn-2bit", preset("rtn-2bit"), {})], asked):
        part = record["result"]["protocols"]["in-use"]
        assert [cell["accuracy"] for cell in part["cells"]] == [0.5, 1.0]
        assert part["tasks"]["needle"] == {"accuracy": 0.75, "se": pytest.approx(0.25), "texts": 4}
    assert 0.2 < part["decoded"]["320"] <= 1 and part["reference"]["needle"]["accuracy"] == 0.75
    assert tasks.summary([1.0])["se"] is None


def test_a_stopped_evaluation_repeats_nothing(files, monkeypatch, tmp_path):
    asked, exact = plan(tasks=("passkey",), depths=(0.5,)), Candidate("exact", preset("exact").with_exact(recent=0), {})
    answer, seen, most = tasks.answer, [], 1

    def stopping(*given):
        if len(seen) == most:
            raise KeyboardInterrupt
        seen.append(type(given[1]))
        return answer(*given)

    monkeypatch.setattr(tasks, "answer", stopping)
    with pytest.raises(KeyboardInterrupt):
        tasks.evaluate(files, [exact], asked, saved=SavedResults(tmp_path))
    most = -1
    records = tasks.evaluate(files, [exact], asked, saved=SavedResults(tmp_path))
    assert [one["result"]["recipe"] for one in records] == ["16 bit", "exact"]
    assert len(seen) == len(set(seen)) == 2, "the 16-bit model, then the recipe"


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
        assert 640 < len(case.context) + len(case.question) + STEPS <= 700
        texts.append(tokenizer.decode([*case.context, *case.question]))
    first, last = (text.index("One of the special magic numbers") / text.index("What is the special") for text in texts)
    assert first < 0.2 and last > 0.9 and texts[0].count(SENTENCES[0]) > 5
    value = texts[0].split(" is: ")[1][:7]
    assert case.score(tokenizer.encode(f" {value}.").ids) == 1 > case.score([5])


def test_options_that_do_not_suit_tasks_are_refused(kvq, monkeypatch):
    words = ["eval", "exact", "--model", "demo", "--tasks"]
    for more in (["--by-layer"], ["--protocol", "full"]):
        code, _, err = kvq(*words, "passkey", *more)
        assert code == 2 and "are of text, which --tasks does not measure" in err
    monkeypatch.setattr(commanded, "find_spec", lambda name: None)
    code, _, err = kvq(*words, "gsm8k")
    assert code == 1 and err.endswith("brings it: pip install -e '.[lm-eval]' in a checkout\n")


# ---- continuations ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@torch.inference_mode()
def test_continuations_are_scored_through_the_cache(model):
    """Exact gives what one pass without a cache gives; of two bits a long row reads codes, a short one does not."""
    random = torch.Generator().manual_seed(0)
    for length, last in ((290, 200), (30, 1)):
        row = torch.randint(2, model.config.vocab_size, (length,), generator=random)
        logq_TV = model(row[None]).logits[0, -last:].double().log_softmax(-1)
        likeliest = int(logq_TV[-1].argmax())
        continuations = [(*row[length - last + 1 :].tolist(), token) for token in (likeliest, (likeliest + 1) % 100)]
        caches = [DynamicCache(config=model.config), cache(model, f"exact{SHORT}"), cache(model, f"rtn-2bit{SHORT}")]
        (reference, none), (exact, _), (two, share) = (
            loglikelihoods(model, one, row.tolist(), continuations, 32) for one in caches
        )
        assert exact == reference and none == 0
        for tokens, (total, greedy) in zip(continuations, reference, strict=True):
            target_T = torch.tensor(tokens)
            assert total == pytest.approx(float(logq_TV.gather(-1, target_T[:, None]).sum()), rel=1e-5)
            assert greedy == bool((logq_TV.argmax(-1) == target_T).all())
        if length == 290:
            assert abs(two[0][0] - exact[0][0]) > 0.01 and share > 0.2, "two bits were read"
        else:
            assert two == exact and share == 0, "30 tokens stay exact"
