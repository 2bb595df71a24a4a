"""The same text gives the same sequences however it is stored, and held-out text is never fitted on. A mixture has as
many sequences of each of its corpora, in turns, and none that any of them fits on is held out.
"""

import gzip
import json
import random
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from kvq_calib.text import corpus
from kvq_calib.text import documents as sources
from kvq_calib.text.documents import SEPARATOR, of
from kvq_calib.text.split import part


def _texts(count: int = 80, words: int = 120) -> list[str]:
    """Documents of different lengths, of which no two share a line."""
    draw = random.Random(0)
    return [
        "\n".join(f"{number} says {draw.choice('abcdefgh')} {draw.random():.6f}" for _ in range(draw.randint(2, words)))
        for number in range(count)
    ]


def _jsonl(texts: list[str]) -> bytes:
    return "\n".join(json.dumps({"text": text, "more": 1}) for text in texts).encode()


def _zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, "zstd", asbytes=True)


def _write(path: Path, texts: list[str]) -> str:
    match path.suffix:
        case ".txt":
            path.write_text(SEPARATOR.join(texts))
        case ".gz":
            path.write_bytes(gzip.compress(_jsonl(texts)))
        case ".zst":
            path.write_bytes(_zstd(_jsonl(texts)))
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
        case _:
            path.write_bytes(_jsonl(texts))
    return str(path)


@pytest.mark.parametrize("mode, samples, length", [("crop", 12, 64), ("pack", 4, 4000)])
def test_format_and_order_do_not_matter(tmp_path: Path, demo_model: Path, mode, samples, length):
    texts = _texts()
    first = corpus.select(_write(tmp_path / "c.jsonl", texts), demo_model, samples, length)
    assert first.description["mode"] == mode
    for suffix in ("txt", "jsonl.gz", "jsonl.zst", "parquet"):
        shuffled = random.Random(suffix).sample(texts, len(texts)) + texts[:3]  # repetitions do not count
        other = corpus.select(_write(tmp_path / f"c.{suffix}", shuffled), demo_model, samples, length)
        assert other.digest == first.digest, suffix
        assert other.description | {"source": ""} == first.description | {"source": ""}


@pytest.mark.parametrize("source", ["many", "few", "one", pytest.param("demo", marks=pytest.mark.slow)])
def test_fit_and_held_out_share_nothing(source: str, tmp_path: Path):
    if source == "one":
        book = "\n".join(_texts(400))
        documents = corpus.load(_write(tmp_path / "book.txt", [book]))
    else:
        count = {"many": 300, "few": 2}.get(source, 0)
        documents = corpus.load("demo") if source == "demo" else of(source, _texts(count, 20))
    fit, held = list(part(documents, "fit").texts), list(part(documents, "held-out").texts)
    assert fit and held and not set(fit) & set(held)
    if source == "one":
        assert "".join(fit) + "".join(held) == book
    else:
        assert sorted(fit + held) == sorted(set(documents.texts))
    share = sum(map(len, held)) / sum(map(len, fit + held))
    assert 0 < share < (1 if source == "few" else 0.2), share


def test_lines_of_held_out_text_are_never_fitted_on_whatever_the_seed(tmp_path: Path, demo_model: Path):
    source = _write(tmp_path / "c.jsonl", _texts())
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))

    def lines(split, seed):
        batch = corpus.select(source, demo_model, 8, 64, seed, split)
        return {line for row in batch.tokens_BT.tolist() for line in tokenizer.decode(row).split("\n")[1:-1]}

    held = lines("held-out", 0)
    assert held and not any(held & lines("fit", seed) for seed in range(4))


def test_a_crop_is_a_run_of_tokens_from_the_middle_of_one_document(tmp_path: Path, demo_model: Path):
    texts = _texts()
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    documents = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    batch = corpus.select(_write(tmp_path / "c.jsonl", texts), demo_model, 20, 100)
    starts, used = [], []
    for row in batch.tokens_BT.tolist():
        found = [(n, i) for n, ids in enumerate(documents) for i in range(len(ids) - 99) if ids[i : i + 100] == row]
        assert len(found) == 1
        used.append(found[0][0])
        starts.append(found[0][1] / (len(documents[found[0][0]]) - 99))
    assert len(set(used)) == 20  # one from each
    assert min(starts) < 0.3 and max(starts) > 0.7 and batch.description["boundary"] == "none"


def test_packing_parts_documents_and_loses_nothing(tmp_path: Path, demo_model: Path):
    source = _write(tmp_path / "c.jsonl", _texts(30, 10))
    texts = list(part(corpus.load(source), "fit").texts)
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    eos = tokenizer.token_to_id("<|endoftext|>")
    total = sum(len(tokenizer.encode(text).ids) + 1 for text in texts)
    batch = corpus.select(source, demo_model, total // 16, 16)
    stream = batch.tokens_BT.flatten().tolist()
    assert batch.description["mode"] == "pack" and batch.description["boundary"] == "eos"
    whole = "".join(tokenizer.decode(stream, skip_special_tokens=False)).split(SEPARATOR)
    assert set(whole[:-1]) <= set(texts) and len(whole) >= len(texts) - 2 and stream.count(eos) == len(whole) - 1


def test_a_tokenizer_that_begins_texts_parts_them_so(tmp_path: Path):
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "[UNK]": 2, "a": 3, "b": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = _write(tmp_path / "c.jsonl", ["a a a", "b b b"])
    batch = corpus.select(source, tmp_path, 1, 4)
    assert batch.tokens_BT.tolist() in ([[0, 3, 3, 3]], [[0, 4, 4, 4]])
    assert batch.description["boundary"] == "bos"
    assert corpus.select(source, tmp_path, 1, 3).tokens_BT[0].equal(batch.tokens_BT[0, 1:])
    with pytest.raises(ValueError, match="not 9"):
        corpus.select(source, tmp_path, 9, 4)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("c.jsonl", b'{"text": "a"}\n{"question": "b", "answer": "c"}', r"line 2: found 'question', 'answer'"),
        ("c.jsonl", b'{"text": "a"}\n\n{"text": ', "line 3: not JSON"),
        ("c.jsonl", b"[1]", "line 1: found list"),
        ("c.jsonl", b'{"text": "\xff"}', r"c\.jsonl is not UTF-8 \(invalid start byte\) after line 0; convert it"),
        ("c.parquet", b"PAR1 and no more", r"c\.parquet is no whole file of parquet \(.*\); download it again"),
        ("c.txt", b"fine \xff", "not UTF-8 at byte 5"),
        ("c.txt", b" \n", "holds no text"),
        ("c.csv", b"text", r"no known suffix; use \.txt"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        corpus.load(str(tmp_path / name))


@pytest.mark.parametrize("pack", [gzip.compress, _zstd])
def test_a_cut_compressed_file_is_never_read_as_whole(tmp_path: Path, pack):
    """A file of two frames, whole and with its last one cut anywhere, of which nothing is said at its beginning."""
    first, last = pack(_jsonl(_texts(20)) + b"\n"), pack(_jsonl(_texts(40)))
    path = tmp_path / f"c.jsonl.{'gz' if pack is gzip.compress else 'zst'}"
    path.write_bytes(first + last)
    assert len(sources.local(path).texts) == 60
    for left in (1, 5, len(last) // 2, len(last) - 1):
        path.write_bytes(first + last[:left])
        with pytest.raises(ValueError, match=r"cannot be unpacked \(.*\); make or download it again"):
            sources.local(path)


def test_a_line_that_is_too_long_or_too_deep_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sources, "LONGEST", 1 << 17)
    bad = {b" " * (1 << 17): "of 131072 characters or more; divide it", b"[" * 100_000: "not JSON .maximum recursion",
           b"1" * 5000: "not JSON .Exceeds the limit"}  # fmt: skip
    for line, message in bad.items():
        (tmp_path / "c.jsonl").write_bytes(b'{"text": "a"}\n' + line)
        with pytest.raises(ValueError, match=rf"c\.jsonl, line 2: {message}"):
            corpus.load(str(tmp_path / "c.jsonl"))


def test_files_that_are_missing_or_without_text_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match="is not a file"):
        corpus.load(str(tmp_path / "none.jsonl"))
    pyarrow.parquet.write_table(pyarrow.table({"content": ["a"]}), tmp_path / "c.parquet")
    with pytest.raises(ValueError, match="has columns content"):
        corpus.load(str(tmp_path / "c.parquet"))
    for rows, kind in (([1, 2], "int"), ([b"\xff"], "bytes")):
        pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "c.parquet")
        with pytest.raises(ValueError, match=rf"c\.parquet has {kind} in its column 'text'; documents are strings"):
            corpus.load(str(tmp_path / "c.parquet"))


COMMIT = "0123456789" * 4


def test_a_hub_dataset_is_pinned_to_a_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, demo_model: Path):
    asked = []

    def info(_, repo, revision=None, timeout=None):
        assert timeout is not None and timeout <= 60, "a Hub that says nothing is given up"
        asked.append((repo, revision))
        return SimpleNamespace(sha=COMMIT)

    def load(repo, config, revision, split):
        asked.append((repo, config, revision, split))
        return datasets.Dataset.from_dict({"text": _texts()})

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert corpus.pin("org/name:en@refs/convert/parquet") == f"org/name:en@{COMMIT}"
    batch = corpus.select("org/name:en", demo_model, 4, 64)
    assert asked == [("org/name", "refs/convert/parquet"), ("org/name", None), ("org/name", "en", COMMIT, "train")]
    assert batch.description["source"] == f"org/name:en@{COMMIT}"
    assert batch.digest == corpus.select(_write(tmp_path / "c.jsonl", _texts()), demo_model, 4, 64).digest
    asked.clear()
    assert corpus.pin(f"org/name@{COMMIT}") == f"org/name@{COMMIT}" and not asked
    assert corpus.pin("demo") == "demo" and corpus.pin("folder/file.txt") == "folder/file.txt"


@pytest.mark.parametrize("column", [[1, 2], [["a"], ["b"]], [{"a": "b"}] * 2])
def test_a_hub_dataset_of_other_things_is_refused(column, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_dict({"text": column}))
    with pytest.raises(ValueError, match=r"in its column 'text'; documents are strings"):
        corpus.load(f"org/name@{COMMIT}")


def test_without_a_network_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    def offline(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", offline)
    with pytest.raises(RuntimeError, match=r"could not ask the Hub for org/name: no route.* or a local file"):
        corpus.load("org/name")


@pytest.mark.slow
def test_docstrings_are_those_that_python_has():
    import difflib
    import inspect

    text = sources._docstrings(Path(difflib.__file__))
    for thing in (difflib, difflib.SequenceMatcher, difflib.SequenceMatcher.ratio, difflib.ndiff):
        assert inspect.cleandoc(thing.__doc__) in text, thing


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
    assert error.value.available == 0


def test_the_part_that_has_too_little_is_named_and_the_most_there_can_be(pair, tmp_path, demo_model):
    small = _file(tmp_path / "small.jsonl", "s", 4)
    with pytest.raises(corpus.TooLittle, match=r"small\.jsonl gives \d+ sequences") as error:
        corpus.select(f"{pair[0]} + {small}", demo_model, 40, 64)
    found = error.value.available
    assert (
        0 < found < 40 and corpus.select(f"{pair[0]} + {small}", demo_model, found, 64).description["samples"] == found
    )


def test_a_corpus_twice_or_none_is_refused():
    for source in ("demo + demo", "demo + ", " + demo"):
        with pytest.raises(ValueError, match="names one twice, or nothing"):
            corpus.pin(source)
