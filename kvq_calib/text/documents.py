"""Read the documents of a corpus: embedded text, or a local file.

demo              the standard library's documentation: a document is one topic of the reference (`pydoc_data.topics`),
                  or all docstrings of one module in source order
demo-code         its code: a document is the source of one module without docstrings
FILE.txt          documents separated by <|endoftext|>, else the whole file as one document
FILE.jsonl        one JSON object a line, key `text`; also .jsonl.gz and .jsonl.zst
FILE.parquet      column `text`

The first two are parsed from sources, no module is imported. They depend on the Python version; a batch's digest
records what they were.
"""

import ast
import hashlib
import io
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvq_runtime.errors import NotFound

SEPARATOR = "<|endoftext|>"
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip",
           "encodings", "pydoc_data", "__pycache__"}  # fmt: skip
UTF8 = "utf-8-sig"  # with or without the mark that some editors put in front
SHORTEST = 200  # characters; less is a header line, not a text
LONGEST = 1 << 28  # characters of a line
_Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Documents:
    """A corpus.

    name    in provenance: no path
    texts   read by index, perhaps lazily
    ids     sha256 of each text, in the order of texts
    """

    name: str
    texts: Sequence[str] | Any
    ids: Sequence[str]

    @property
    def digest(self) -> str:
        """Return a digest of the set of documents, equal for every file format and order."""
        return hashlib.sha256("".join(sorted(set(self.ids))).encode()).hexdigest()


def of(name: str, texts: Sequence[str]) -> Documents:
    """Identify the documents of a corpus by their content."""
    return Documents(name, texts, [hashlib.sha256((text or "").encode()).hexdigest() for text in texts])


@lru_cache(maxsize=1)
def documentation() -> list[str]:
    """Read the standard library's documentation, in a fixed order. Raises RuntimeError without its source files."""
    from pydoc_data.topics import topics

    texts = [text for _, text in sorted(topics.items())] + list(map(_docstrings, _modules()))
    return [text for text in texts if len(text) >= SHORTEST]


@lru_cache(maxsize=1)
def code() -> list[str]:
    """Read the sources of the library's modules without docstrings, in a fixed order; comments stay."""
    return [text for text in map(_without_docstrings, _modules()) if len(text) >= SHORTEST]


EMBEDDED = {"demo": documentation, "demo-code": code}


def embedded(name: str) -> Documents:
    """Read an embedded corpus."""
    return of(name, EMBEDDED[name]())


def _modules() -> list[Path]:
    """List the standard library's sources by their relative paths, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    modules: dict[str, Path] = {}
    for folder, inner, files in os.walk(root):
        inner[:] = set(inner) - SKIPPED
        paths = (Path(folder, file) for file in files if file.endswith(".py"))
        modules |= {path.relative_to(root).as_posix(): path for path in paths}
    if "argparse.py" not in modules:
        raise RuntimeError(f"the standard library at {root} has no source files (zipped or stripped), and its "
                           "docstrings are the demo's corpus; pass --corpus FILE")  # fmt: skip
    return [path for _, path in sorted(modules.items())]


def _docstrings(path: Path) -> str:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # templates and deliberately broken files
        return ""
    texts = [(node, ast.get_docstring(node)) for node in _documented(tree)]
    return "\n\n".join(text if isinstance(node, ast.Module) else f"{node.name}\n{text}" for node, text in texts if text)


def _without_docstrings(path: Path) -> str:
    """Return a module's source without its docstrings' lines; "" for a file that is no Python in UTF-8."""
    try:
        source = path.read_bytes().decode("utf-8")
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    lines = source.splitlines(keepends=True)
    for node in _documented(tree):
        if ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            assert first.end_lineno is not None, "parsed nodes have line numbers"
            lines[first.lineno - 1 : first.end_lineno] = [""] * (first.end_lineno - first.lineno + 1)
    return "".join(lines)


def _documented(node: ast.AST) -> Iterator[Any]:
    """Yield the nodes that may have a docstring, in source order. Skips expressions, most of a tree."""
    if isinstance(node, _Documented):
        yield node
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        inner = getattr(node, field, ())
        for child in inner if isinstance(inner, list) else ():
            yield from _documented(child)


def local(path: Path) -> Documents:
    """Read a local file. Raises NotFound, or ValueError with the line for a file that cannot be read."""
    if not path.is_file():
        kind = ValueError if path.exists() else NotFound
        raise kind(f"corpus {path} is not a file; give one of {', '.join(SUFFIXES)}")
    name = path.name.lower()
    if name.endswith(".txt"):
        texts = _utf8(path).split(SEPARATOR)
    elif name.endswith(".parquet"):
        texts = _parquet(path)
    elif name.endswith(SUFFIXES):
        texts = list(_json_lines(path))
    else:
        raise ValueError(f"corpus {path.name} has no known suffix; use {', '.join(SUFFIXES)}")
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ValueError(f"corpus {path.name} holds no text")
    return of(path.name, texts)


def _utf8(path: Path) -> str:
    try:
        return path.read_text(encoding=UTF8)
    except UnicodeDecodeError as error:
        raise ValueError(f"corpus {path.name} is not UTF-8 at byte {error.start}; convert it") from error


def _json_lines(path: Path) -> Iterator[str]:
    """Yield the texts of JSON lines, decompressed by suffix. Raises ValueError for a truncated compressed file."""
    from pyarrow import input_stream

    number = 0
    try:
        with io.TextIOWrapper(input_stream(path, compression="detect"), encoding=UTF8) as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST), ""), 1):
                if len(line) == LONGEST:
                    raise ValueError(f"corpus {path.name}, line {number}: of {LONGEST} characters or more; divide it")
                if line.strip():
                    yield _text_of(line, f"corpus {path.name}, line {number}")
    except UnicodeDecodeError as error:
        raise ValueError(f"corpus {path.name} is not UTF-8 ({error.reason}) after line {number}; convert it") from error
    except OSError as error:
        raise ValueError(f"corpus {path.name} cannot be unpacked ({error}); make or download it again") from error


def _text_of(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also of a number of too many digits, and of too many brackets
        raise ValueError(f"{where}: not JSON ({getattr(error, 'msg', error)})") from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        keys = ", ".join(map(repr, row)) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where}: found {keys}; a document is a string under 'text'")
    return row["text"].encode("utf-8", "replace").decode()  # JSON may hold half a surrogate pair


def _parquet(path: Path) -> list[str]:
    """Read the column `text`. Raises ValueError for a file without one."""
    from pyarrow import ArrowException, parquet

    try:
        columns = parquet.read_schema(path).names
        if "text" not in columns:
            raise ValueError(f"corpus {path.name} has columns {', '.join(columns)}; documents are in a column 'text'")
        texts = parquet.read_table(path, columns=["text"]).column("text").to_pylist()
    except (ArrowException, OSError) as error:
        raise ValueError(f"corpus {path.name} is no whole file of parquet ({error}); download it again") from error
    if other := next((text for text in texts if not isinstance(text, str | None)), None):
        raise ValueError(f"corpus {path.name} has {type(other).__name__} in its column 'text'; documents are strings")
    return [text or "" for text in texts]
