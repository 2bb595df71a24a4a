"""The test set of WikiText-2: its windows by hand, from a text file, a parquet file and the Hub."""

import hashlib
import struct
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from kvq_calib.text import corpus

LINES = [" \n", " = A b = \n", " \n", " a b c . \n", " b b a . \n"]
# an empty line is row "", and others keep their line end: ids by the word list below, [BOS] first
ROWS = ["", " = A b = \n", "", " a b c . \n", " b b a . \n"]
IDS = [0, 9, 9, 6, 8, 3, 6, 9, 9, 9, 9, 9, 2, 3, 4, 7, 9, 9, 9, 3, 3, 2, 7, 9]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Words, and each line end for itself; BOS at the beginning of a text."""
    words = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4, "[UNK]": 5, "=": 6, ".": 7, "A": 8, "\n": 9}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


def _text(tmp_path: Path) -> str:
    (tmp_path / "wiki.test.raw").write_text("".join(LINES))
    return f"wikitext-2:{tmp_path / 'wiki.test.raw'}"


def test_windows_are_those_written_out_by_hand(tokenizer: Path, tmp_path: Path):
    batch = corpus.select(_text(tmp_path), tokenizer, None, 5, split="held-out")
    assert batch.tokens_BT.tolist() == [IDS[:5], IDS[5:10], IDS[10:15], IDS[15:20]]
    assert batch.digest == hashlib.sha256(struct.pack("<20i", *IDS[:20])).hexdigest()
    first = corpus.select(_text(tmp_path), tokenizer, 2, 5, 7, split="held-out")
    assert first.tokens_BT.tolist() == [IDS[:5], IDS[5:10]], "the first ones, whatever the seed"
    about = batch.description
    assert (about["source"], about["split"], about["mode"]) == ("wikitext-2:wiki.test.raw", "whole", "contiguous")
    assert about["samples"] == 4 and "overlap" not in about, "nothing was fitted on"
    with pytest.raises(corpus.TooLittle, match=r"wikitext-2:wiki\.test\.raw gives 4 sequences of 5 tokens"):
        corpus.select(_text(tmp_path), tokenizer, 5, 5, split="held-out")


def test_a_parquet_file_and_the_hub_say_the_same(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = corpus.select(_text(tmp_path), tokenizer, None, 5, split="held-out").digest
    pyarrow.parquet.write_table(pyarrow.table({"text": ROWS}), tmp_path / "test.parquet")
    made = corpus.select(f"wikitext-2:{tmp_path / 'test.parquet'}", tokenizer, None, 5, split="held-out")
    assert made.digest == expected
    asked = []

    def load(repo, config, revision, split):
        asked.append((repo, config, revision, split))
        return datasets.Dataset.from_dict({"text": ROWS})

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: SimpleNamespace(sha="ab" * 20))
    monkeypatch.setattr(datasets, "load_dataset", load)
    made = corpus.select("wikitext-2", tokenizer, None, 5, split="held-out")
    assert made.digest == expected and asked == [("Salesforce/wikitext", "wikitext-2-raw-v1", "ab" * 20, "test")]
    assert made.description["source"] == f"Salesforce/wikitext:wikitext-2-raw-v1@{'ab' * 20}"


def test_it_is_measured_on_beside_a_corpus_and_never_fitted_on(tokenizer: Path, tmp_path: Path):
    source, line = _text(tmp_path), "a b c . " * 20
    (tmp_path / "c.txt").write_text("<|endoftext|>".join(f"{line}{'a ' * n}" for n in range(12)))
    found = corpus.select_others([source], str(tmp_path / "c.txt"), tokenizer, 3, 5)
    assert found["wikitext-2"].tokens_BT.flatten().tolist() == IDS[:15]
    assert found["wikitext-2"].description["overlap"]["against"] == ["c.txt"]
    assert found["wikitext-2"].description["overlap"]["dropped_documents"] == 0
    with pytest.raises(ValueError, match="is a test set; fit on another corpus"):
        corpus.select(source, tokenizer, 1, 5)


def test_files_that_cannot_be_it_are_named(tokenizer: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r"wikitext-2:none\.txt is not a file; give a \.parquet"):
        corpus.select("wikitext-2:none.txt", tokenizer, 1, 5, split="held-out")
    (tmp_path / "c.csv").write_text("a")
    with pytest.raises(ValueError, match=r"wikitext-2:c\.csv has no known suffix"):
        corpus.select(f"wikitext-2:{tmp_path / 'c.csv'}", tokenizer, 1, 5, split="held-out")
