"""Along the model's own greedy text: exact never leaves it, two bits leave it where their own text does."""

import json
from dataclasses import replace

import pytest
import torch

from kvq_calib.evaluate import decode
from kvq_calib.evaluate.caches import WitnessCache, attending
from kvq_calib.evaluate.ledger import Ledger
from kvq_calib.evaluate.record import load_model
from kvq_calib.evaluate.subject import Subject
from kvq_calib.model import find as models
from kvq_calib.text.corpus import Batch
from kvq_runtime.artifact import recipe_text
from kvq_runtime.hf import KVQCache

FILES = models.resolve("demo")
PROMPT, COUNT, NAMES = 140, 40, ("exact+window.recent=0", "rtn-2bit+window.recent=0")


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return load_model(FILES)


def subject(text: str) -> Subject:
    recipe = recipe_text.read(text)
    return Subject(recipe.name, recipe, {})


def batch(rows: int = 2) -> Batch:
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, FILES.vocabulary, (rows, PROMPT), generator=random, dtype=torch.int32)
    return Batch(tokens, "0" * 64, {"source": "drawn", "split": "held-out", "corpus_digest": "1" * 64})


@pytest.fixture(scope="module")
def traces(model):
    caches = [WitnessCache(subject(name).recipe, model) for name in NAMES]
    return decode.traces(model, batch().tokens_BT, caches, COUNT, lambda: None)


def test_exact_never_leaves_and_two_bits_do(traces):
    exact, two = (decode.figures(subject(name), [one], 4, PROMPT) for name, one in zip(NAMES, traces, strict=True))
    assert [window["first"] for window in exact["windows"]] == [None, None]
    assert abs(exact["kl"]) < 1e-9 and exact["top1"] == 1 and exact["bins"][0]["decoded"] > 0.75
    assert two["kl"] > 0.01 and two["top1"] < 1
    assert exact["entropy"] == two["entropy"] > 0, "one text was followed"


@pytest.mark.slow
@torch.inference_mode()
def test_the_first_token_chosen_otherwise_is_where_the_caches_own_text_leaves(model, traces):
    two = traces[1]
    for row, window in enumerate(decode.figures(subject(NAMES[1]), [two], 4, PROMPT)["windows"]):
        held = KVQCache(subject(NAMES[1]).recipe, model)
        ends = decode.ends_of(model)
        with attending(model, held):
            made = model.generate(
                batch().tokens_BT[row : row + 1].long(), past_key_values=held, max_new_tokens=COUNT, do_sample=False,
                suppress_tokens=ends, eos_token_id=-1, pad_token_id=0,
            )  # fmt: skip
        own, first = made[0, PROMPT:].tolist(), window["first"]
        assert first is not None, "a window that two bits never leave tests nothing: draw another"
        assert own[:first] == two["tokens"][row][:first] and own[first] != two["tokens"][row][first]


def trace(kl: list[list[float]], agreed: list[list[int]]) -> dict:
    count = len(kl[0])
    decoded = [[0.0] * 3 + [0.5] * (count - 4)] * len(kl)  # of every pass but the first
    return {"kl": kl, "agreed": agreed, "entropy": [[1.0] * count] * len(kl), "decoded": decoded}


def test_figures_say_what_the_windows_say():
    rising = [[0.0] * 4 + [0.002 * place for place in range(4, 24)], [0.0] * 4 + [0.004 * p for p in range(4, 24)]]
    agreed = [[1] * 24, [1] * 10 + [0] + [1] * 13]
    found = decode.figures(subject(NAMES[1]), [trace(rising, agreed)], 4, PROMPT)
    assert found["encoded_from"] == 4
    assert found["trend"]["kl_per_1000"] == pytest.approx(3.0) and found["trend"]["se"] == pytest.approx(1.0)
    assert [window["first"] for window in found["windows"]] == [None, 10]
    assert found["windows"][1]["kl_max_at"] == 23 and found["windows"][1]["kl_max"] == pytest.approx(0.092)
    assert [(one["from"], one["to"]) for one in found["bins"]] == [(0, 6), (6, 12), (12, 18), (18, 24)]
    last = found["bins"][-1]
    assert last["kl_worst"] == pytest.approx(0.004 * 20.5) and last["kl"] == pytest.approx(0.003 * 20.5)
    # 8 of 8 at tokens 0, 9 of the first; 8, then 1 (the 10th is another), then 8 at 11 of the second
    assert found["accepted"] == pytest.approx((8 + 8 + 8 + 1 + 8) / 5)
    assert found["top1"] == pytest.approx(47 / 48) and found["bins"][0]["decoded"] == pytest.approx(0.5 / 3)


def test_what_was_followed_is_not_followed_again(tmp_path, monkeypatch):
    given = (FILES, batch(1), [subject(name) for name in NAMES], decode.Plan(PROMPT + 8, 2))
    first = decode.evaluate(*given, ledger=Ledger(tmp_path))
    done = []
    monkeypatch.setattr(decode, "traces", lambda *_: pytest.fail("followed again"))
    assert decode.evaluate(*given, progress=done.append, ledger=Ledger(tmp_path)) == first
    assert sum(done) == decode.work(given[1], 2, given[3]) == 16
    assert len(json.dumps(first[0])) < 1 << 14 and first[1]["result"]["protocols"]["decode"]["trend"]["se"] is None
    with pytest.raises(pytest.fail.Exception, match="followed again"):
        decode.evaluate(FILES, batch(1), given[2], decode.Plan(PROMPT + 9, 2), ledger=Ledger(tmp_path))


def test_a_text_that_stays_exact_gives_a_reason_and_a_length_must_leave_room(traces):
    still = {**traces[1], "decoded": [[0.0] * (COUNT - 1)] * 2}
    found = decode.figures(subject(NAMES[1]), [still], 4, PROMPT)
    assert found == {"reason": "nothing was encoded: texts of 180 tokens are shorter than 0 recent tokens and a block "
                               "of 128, or all sinks; use longer ones"}  # fmt: skip
    with pytest.raises(ValueError, match=r"prompts of 140 tokens, followed to 145; use at least 148, and at most 8192"):
        decode.evaluate(FILES, batch(1), [], replace(decode.Plan(), length=145))
