"""A chat with caches that are kept over its turns: exact never leaves, and each turn is asked in the model's form."""

import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import AutoTokenizer
from transformers.cache_utils import DynamicCache

from kvq_calib.evaluate.record import load_model
from kvq_calib.model import find as models
from kvq_runtime.hf import KVQCache
from kvq_runtime.recipe import preset
from scripts import conversation

DEMO = models.resolve("demo")
TEMPLATE = (
    "start{% for one in messages %}[{{ one.role }}]{{ one.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PASSAGES = ("the value of a dictionary " * 40, "a list of all the names " * 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = shutil.copytree(DEMO.path, tmp_path_factory.mktemp("model") / "chat")
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return load_model(replace(DEMO))


def test_turns_are_the_template_taken_apart(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = [tokenizer.decode(tokens) for tokens in conversation.turns(folder, PASSAGES)]
    assert found[0].startswith("start[user]Read this text.") and found[0].endswith("two sentences.[end][assistant]")
    assert found[1] == f"[end][user]{conversation.TURNS[1]}[end][assistant]"
    assert PASSAGES[1] in found[2] and PASSAGES[0] not in found[2]
    with pytest.raises(ValueError, match="has no chat template: it is no chat model, and has no turns"):
        conversation.turns(DEMO.path, PASSAGES)


def test_exact_stays_and_two_bits_leave(model, folder):
    asked = conversation.turns(folder, PASSAGES)
    exact = preset("exact").with_exact(4, 0)
    caches = [KVQCache(exact, model), KVQCache(preset("rtn-2bit").with_exact(4, 0), model)]
    same, two = conversation.follow(model, asked, caches, 12)
    assert [one["first"] for one in same] == [None] * 4 and max(one["kl"] for one in same) < 1e-6
    assert max(one["kl"] for one in two[1:]) > 1e-3 and min(one["top1"] for one in two) < 1
    assert [one["answer"] for one in two] == [one["answer"] for one in same], "one text was followed"
    for before, after in pairwise(same):  # all but the last token of an answer has been read
        assert after["history"] == before["history"] + before["added"] + before["tokens"] - 1
    assert caches[0].get_seq_length() == same[-1]["history"] + same[-1]["added"] + same[-1]["tokens"] - 1


def test_the_model_ends_its_turn(model, folder, monkeypatch):
    """What ends it is scored like any token, and is read once: with the turn after it."""
    asked = conversation.turns(folder, PASSAGES)[:2]
    (long,) = conversation.follow(model, asked[:1], [DynamicCache(config=model.config)], 12)
    end = long[0]["answer"][3]
    monkeypatch.setattr(conversation, "ends_of", lambda _: [end])
    (found,) = conversation.follow(model, asked, [DynamicCache(config=model.config)], 12)
    place = long[0]["answer"].index(end) + 1
    assert found[0]["answer"] == long[0]["answer"][:place]
    assert found[1]["added"] == len(asked[1]) and found[1]["history"] == len(asked[0]) + place - 1
