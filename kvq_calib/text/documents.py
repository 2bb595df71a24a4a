"""Read the documents of a corpus: the embedded text, a local file, or a dataset of the Hub handed in by corpus.py.

demo              the standard library's documentation
demo-code         its code, without docstrings
recall            the recall model's tasks, written out in its symbols
FILE.txt          documents separated by <|endoftext|>, else the whole file as one document
FILE.jsonl        one JSON object a line, key `text`; also .jsonl.gz and .jsonl.zst
FILE.parquet      column `text`
"""

import gzip
import hashlib
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from io import TextIOBase
from pathlib import Path
from typing import Any

from kvq_calib.tasks import symbols, synthetic
from kvq_calib.text import stdlib as stdlib_text
from kvq_runtime.errors import NotFound

SEPARATOR = "<|endoftext|>"
RECALL = 400, 1280, 1 << 31  # texts, tokens of each, first seed: evaluations count from 0, training from 1 << 32
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


@lru_cache(maxsize=1)
def recall() -> list[tuple[str, str]]:
    """The recall model's texts as (name, text): every task in turn, with its answers, at depths that are spread.

    An evaluation asks none of them.
    """
    words, tasks, (texts, length, first) = symbols.words(), list(synthetic.TASKS), RECALL
    found = []
    for number in range(texts):
        task = tasks[number % len(tasks)]
        made = synthetic.TASKS[task](first + number, length, (number + 0.5) / texts)
        # the tokenizer itself begins a text
        found.append((f"{task}/{number}", " ".join(words[token] for token in made.tokens[1:])))
    return found


EMBEDDED = {"demo": stdlib_text.documents, "demo-code": stdlib_text.code, "recall": recall}


@dataclass(frozen=True)
class Documents:
    """A corpus.

    name    what provenance calls it: no path
    texts   read by index, perhaps lazily
    ids     sha256 of each text; the order of ids is the order of texts
    """

    name: str
    texts: Sequence[str] | Any
    ids: Sequence[str]

    @property
    def digest(self) -> str:
        """A digest of the set of documents: the same for every file format and order."""
        return hashlib.sha256("".join(sorted(set(self.ids))).encode()).hexdigest()


def of(name: str, texts: Sequence[str]) -> Documents:
    """Identify the documents of a corpus by their content."""
    return Documents(name, texts, [hashlib.sha256((text or "").encode()).hexdigest() for text in texts])


def embedded(name: str) -> Documents:
    """An embedded corpus."""
    return of(name, [text for _, text in EMBEDDED[name]()])


def local(path: Path) -> Documents:
    """The documents of a local file. Raises NotFound, or ValueError, naming the line, for one that cannot be read."""
    name = path.name.lower()
    if not path.is_file():
        kind = ValueError if path.exists() else NotFound
        raise kind(f"corpus {path} is not a file; give one of {', '.join(SUFFIXES)}")
    if name.endswith(".txt"):
        texts = utf8(path).split(SEPARATOR)
    elif name.endswith(SUFFIXES[1:4]):
        texts = list(_lines(path))
    elif name.endswith(".parquet"):
        texts = parquet(path)
    else:
        raise ValueError(f"corpus {path.name} has no known suffix; use {', '.join(SUFFIXES)}")
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ValueError(f"corpus {path.name} holds no text")
    return of(path.name, texts)


def utf8(path: Path) -> str:
    """A text file. Raises ValueError for one in another encoding."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"corpus {path.name} is not UTF-8 at byte {error.start}; convert it") from error


def _lines(path: Path) -> Iterator[str]:
    with _sound(path), _unpacked(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"corpus {path.name}, line {number}: not JSON ({error.msg})") from error
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                keys = ", ".join(map(repr, row)) if isinstance(row, dict) else type(row).__name__
                raise ValueError(
                    f"corpus {path.name}, line {number}: found {keys}; a document is a string under 'text'"
                )
            yield row["text"].encode("utf-8", "replace").decode()  # JSON may hold half a surrogate pair


@contextmanager
def _sound(path: Path) -> Iterator[None]:
    """Name the file in what a reader of compressed files raises for a damaged one."""
    try:
        yield
    except (OSError, EOFError, zlib.error, *_zstd_errors()) as error:
        raise ValueError(f"corpus {path.name} cannot be unpacked ({error}); make or download it again") from error


def _zstd_errors() -> tuple[type[Exception], ...]:
    """Return the errors that the library of .zst raises, if it has been imported."""
    library = sys.modules.get("zstandard")
    return (library.ZstdError,) if library else ()


def _unpacked(path: Path) -> TextIOBase:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    if path.suffix == ".zst":
        try:
            import zstandard
        except ModuleNotFoundError as error:
            raise ValueError(f"{path.name} needs the package zstandard: pip install zstandard") from error
        return zstandard.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def parquet(path: Path) -> list[str]:
    """The column `text` of a file. Raises ValueError for one without."""
    from pyarrow import parquet

    columns = parquet.read_schema(path).names
    if "text" not in columns:
        raise ValueError(f"corpus {path.name} has columns {', '.join(columns)}; documents are in a column 'text'")
    return [text or "" for text in parquet.read_table(path, columns=["text"]).column("text").to_pylist()]
