"""A mixture has as many sequences of each of its corpora, in turns, and none that any of them fits on is held out."""

import json
from pathlib import Path

import pytest

from kvq_calib.model import catalog
from kvq_calib.text import corpus


def _file(path: Path, kind: str, count: int = 60) -> str:
    texts = [" ".join(f"{kind}{number * 131 + word * word}" for word in range(90)) for number in range(count)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return str(path)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    return _file(tmp_path / "a.jsonl", "a"), _file(tmp_path / "b.jsonl", "b")


@pytest.mark.parametrize("split", ["fit", "held-out"])
def test_its_sequences_are_those_of_its_corpora_in_turns(split, pair, demo_model):
    mixed = corpus.select(" + ".join(pair), demo_model, 5, 64, seed=3, split=split)
    alone = [corpus.select(one, demo_model, n, 64, 3, split) for one, n in zip(pair, (3, 2), strict=True)]
    assert mixed.tokens_BT[0::2].equal(alone[0].tokens_BT) and mixed.tokens_BT[1::2].equal(alone[1].tokens_BT)
    found = mixed.description
    assert found["source"] == "a.jsonl + b.jsonl" and found["samples"] == 5
    assert found["token_digest"] == mixed.digest and found["documents"] == sum(
        b.description["documents"] for b in alone
    )
    assert found["corpus_digest"] not in [one.description["corpus_digest"] for one in alone]


def test_held_out_text_repeats_no_part_that_is_fitted_on(tmp_path, pair, demo_model):
    fitted = [json.loads(line)["text"] for line in Path(pair[0]).read_text().splitlines()]
    held = set(corpus.part(corpus.load(pair[0]), "held-out").texts)
    copies = [f"see {text}" for text in fitted if text not in held]
    copied = tmp_path / "copied.jsonl"
    copied.write_text("\n".join(json.dumps({"text": text}) for text in copies))
    assert corpus.select(str(copied), demo_model, 1, 64, split="held-out").description["samples"] == 1
    with pytest.raises(corpus.TooLittle, match="repeat the fit part") as error:
        corpus.select(f"{copied} + {pair[0]}", demo_model, 2, 64, split="held-out")
    assert error.value.found == 0


def test_the_part_that_has_too_little_is_named_and_the_most_there_can_be(pair, tmp_path, demo_model):
    small = _file(tmp_path / "small.jsonl", "s", 4)
    with pytest.raises(corpus.TooLittle, match=r"small\.jsonl gives \d+ sequences") as error:
        corpus.select(f"{pair[0]} + {small}", demo_model, 40, 64)
    found = error.value.found
    assert (
        0 < found < 40 and corpus.select(f"{pair[0]} + {small}", demo_model, found, 64).description["samples"] == found
    )


@pytest.mark.parametrize("source", ["demo + demo", "demo + ", " + demo"])
def test_a_corpus_twice_or_none_is_refused(source):
    with pytest.raises(ValueError, match="names one twice, or nothing"):
        corpus.pin(source)


def test_what_is_measured_beside_it_is_not_in_it():
    known = catalog.entry("some-model")
    assert known.beside("demo + my.jsonl") == ("demo-code",)
    assert known.beside("demo + demo-code") == ()


def test_a_file_with_such_a_name_is_a_file(tmp_path, demo_model):
    path = _file(tmp_path / "a + b.jsonl", "a")
    assert corpus.select(path, demo_model, 2, 64).description["source"] == "a + b.jsonl"


def test_names_of_any_length_are_parted_and_the_way_of_each_is_told(pair, tmp_path, demo_model):
    names = [f"a-text-of-some-length-{number}.jsonl" for number in range(40)]
    assert corpus.sources_of(" + ".join(names)) == names
    packed = tmp_path / "short.jsonl"
    packed.write_text("\n".join(json.dumps({"text": f"only {number} words"}) for number in range(200)))
    found = corpus.select(f"{pair[0]} + {packed}", demo_model, 2, 64).description
    assert found["mode"] == "crop + pack" and found["boundary"].startswith("none + ")
