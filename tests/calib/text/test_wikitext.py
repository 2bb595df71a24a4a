"""The test set of WikiText-2: its windows by hand."""

import hashlib
import struct
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from kvq_calib.text import corpus

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


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Have the Hub return ROWS; list what is requested."""
    made = []

    def load(repo, config, revision, split):
        made.append((repo, config, revision, split))
        return datasets.Dataset.from_dict({"text": ROWS})

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: SimpleNamespace(sha="ab" * 20))
    monkeypatch.setattr(datasets, "load_dataset", load)
    return made


def test_windows_are_those_written_out_by_hand(tokenizer: Path, requests):
    batch = corpus.select("wikitext-2", tokenizer, None, 5, split="held-out")
    assert requests == [("Salesforce/wikitext", "wikitext-2-raw-v1", "ab" * 20, "test")]
    assert batch.tokens_BT.tolist() == [IDS[:5], IDS[5:10], IDS[10:15], IDS[15:20]]
    assert batch.digest == hashlib.sha256(struct.pack("<20i", *IDS[:20])).hexdigest()
    first = corpus.select("wikitext-2", tokenizer, 2, 5, 7, split="held-out")
    assert first.tokens_BT.tolist() == [IDS[:5], IDS[5:10]], "the first ones, whatever the seed"
    about = batch.description
    assert about["source"] == f"Salesforce/wikitext:wikitext-2-raw-v1@{'ab' * 20}"
    assert (about["split"], about["mode"], about["samples"]) == ("whole", "contiguous", 4)
    assert "overlap" not in about, "nothing was fitted on"
    with pytest.raises(corpus.TooLittle, match="gives 4 sequences of 5 tokens"):
        corpus.select("wikitext-2", tokenizer, 5, 5, split="held-out")
    with pytest.raises(ValueError, match="is a test set; fit on another corpus"):
        corpus.select("wikitext-2", tokenizer, 1, 5)
