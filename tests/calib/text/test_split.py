"""Held-out text that repeats the fit part is passed over: runs counted with Python sets, documents planted."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvq_calib.text import corpus, split
from kvq_calib.text.documents import of
from kvq_calib.text.split import LIMIT, RUN, part


def _words(draw: random.Random, count: int) -> str:
    return " ".join("".join(draw.choices("abcdefghijklmnopqrstuvwxyzäß", k=draw.randint(2, 9))) for _ in range(count))


def _by_hand(text: str, others: list[str]) -> float:
    """The share of a text's runs that others have, from the definition."""

    def grams(one: str) -> list[bytes]:
        data = " ".join(one.split()).encode()
        return [data[start : start + RUN] for start in range(len(data) - RUN + 1)]

    seen, own = {gram for one in others for gram in grams(one)}, grams(text)
    return sum(gram in seen for gram in own) / len(own) if own else 0.0


@pytest.mark.parametrize("piece", [1 << 20, 50, 1])
def test_shares_are_those_of_sets(piece: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(split, "PIECE", piece)
    draw = random.Random(1)
    others = [_words(draw, count) for count in (0, 3, 60, 90)]
    own = _words(draw, 50)
    texts = [own, others[2], own[:100] + others[3][30:200] + own[100:], others[2].replace(" ", "\n\t "), "short", "",
             others[3][:RUN], others[3][: RUN - 20], own + " " + others[2] + own]  # fmt: skip
    found = split.shares(texts, iter(others))
    assert found == pytest.approx([_by_hand(text, others) for text in texts], abs=0)
    assert found[:2] == [0, 1] and 0.1 < found[2] < 0.9 and found[3] == 1 and found[4:8] == [0, 0, 1, 0]


def _corpus(tmp_path: Path, planted: float) -> tuple[str, list[str], str, str]:
    """A file in which one held-out document has a share of its text from the fit part; also all of that part."""
    draw = random.Random(2)
    texts = [_words(draw, 120) for _ in range(60)]
    held, fit = (list(part(of("c", texts), split).texts) for split in ("held-out", "fit"))  # type: ignore[arg-type]
    while True:  # a document that its hash holds out
        source, own = draw.choice(fit), _words(draw, 120)
        cut = int(len(source) * planted)
        made = source[:cut].replace(" ", "\n") + own[cut:]
        if made in list(part(of("c", [*texts, made]), "held-out").texts):
            break
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in [*texts, made]))
    assert len(held) >= 3
    return str(path), held, made, source


@pytest.mark.parametrize("planted, dropped", [(0.3, True), (0.0, False)])
def test_a_planted_document_is_passed_over(tmp_path: Path, demo_model: Path, planted: float, dropped: bool):
    source, held, made, _ = _corpus(tmp_path, planted)
    encoder = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    fit = list(part(corpus.load(source), "fit").texts)
    assert (_by_hand(made, fit) > LIMIT) == dropped
    batch = corpus.select(source, demo_model, None, 64, 0, "held-out")
    found = batch.description["overlap"]
    assert found["dropped_documents"] == int(dropped) and found["against"] == ["c.jsonl"]
    assert found["dropped_tokens"] == (len(encoder.encode(made, add_special_tokens=False).ids) if dropped else 0)
    read = encoder.decode(batch.tokens_BT.flatten().tolist())
    assert all(any(part in read for part in (one[:40], one[-40:])) for one in held)
    assert batch.description["mode"] == "pack" and batch.description["samples"] == len(batch.tokens_BT)
    rows = [encoder.decode(row) for row in batch.tokens_BT.tolist()]
    sizes = [max(0, len(" ".join(row.split()).encode()) - RUN + 1) for row in rows]
    by_hand = sum(_by_hand(row, fit) * size for row, size in zip(rows, sizes, strict=True)) / sum(sizes)
    assert found["left"] == pytest.approx(by_hand)


def test_the_fit_part_is_as_it_was_and_groups_do_not_matter(
    tmp_path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch
):
    source, *_ = _corpus(tmp_path, 1.0)
    fit = corpus.select(source, demo_model, 8, 64)
    held = corpus.select(source, demo_model, None, 64, split="held-out")
    assert "overlap" not in fit.description
    monkeypatch.setattr(split, "GROUP", 1)
    assert corpus.select(source, demo_model, None, 64, split="held-out").description == held.description
    monkeypatch.setattr(split, "LIMIT", 1.0)
    assert corpus.select(source, demo_model, 8, 64).digest == fit.digest
    everything = corpus.select(source, demo_model, None, 64, split="held-out")
    assert everything.description["overlap"]["dropped_documents"] == 0 and len(everything.tokens_BT) > len(
        held.tokens_BT
    )


def test_what_is_left_when_all_repeats_says_so(tmp_path: Path, demo_model: Path):
    draw = random.Random(4)
    base = _words(draw, 200)
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps({"text": f"{base} {n}"}) for n in range(40)))
    with pytest.raises(corpus.TooLittle, match=r"\d+ documents that repeat the fit part left out, gives 0 sequences"):
        corpus.select(str(tmp_path / "c.jsonl"), demo_model, 2, 64, split="held-out")
