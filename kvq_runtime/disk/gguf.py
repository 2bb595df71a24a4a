"""Read the header of a GGUF file: a model's settings, and the places of its tensors. No tensor is read.

    magic, version, number of tensors, number of values | values: name, type, value | tensors: name, shape, type, offset

A header is what anyone may have written: every length is held against the bytes that are left in the file before
anything is taken for it, and arrays that are long, as those of a vocabulary, are walked over and not kept.

Source: ggml-org/ggml, docs/gguf.md, versions 2 and 3.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError

MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY = 8, 9
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))  # {type: as struct has it}
NAMES, TEXT, KEPT, LONGEST = 1 << 16, 1 << 24, 1 << 12, 1 << 26  # bytes, bytes, elements, elements
COUNT = 1 << 20  # values, and tensors
DIMENSIONS = 4
PATTERNS = {"gemma3": 6}  # one layer in so many attends to all tokens, the others slide: llama.cpp knows that by name


@dataclass(frozen=True)
class Long:
    """An array that was skipped, with its number of elements."""

    count: int


@dataclass(frozen=True)
class Held:
    """A tensor's place: its shape in torch's order, ggml's number of its type, and its first byte in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True)
class Header:
    """The header of a file; `values` are numbers, texts, short lists and `Long`."""

    values: Mapping[str, Any]
    tensors: Mapping[str, Held]

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture"))

    def of_model(self, name: str, default: Any = None) -> Any:
        """A value of the architecture: `block_count` for `llama.block_count`."""
        return self.values.get(f"{self.architecture}.{name}", default)


def is_gguf(path: Path) -> bool:
    """True if the path's name is that of a GGUF file."""
    return path.suffix.lower() == ".gguf"


def read(path: Path) -> Header:
    """The header of a file, kept as long as the file has not changed. Raises ArtifactError for what is no whole header,
    with its name."""
    try:
        found = path.lstat()
    except OSError:
        return _read.__wrapped__(path)
    return _read(path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=4)
def _read(path: Path, *state: int) -> Header:
    with files.opened(path) as (file, size):
        if size < 24:
            raise ArtifactError(f"{path}: {size} bytes; no whole GGUF file: download it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Cursor(data).header()
            except (_Damaged, struct.error, UnicodeDecodeError) as error:
                raise ArtifactError(f"{path}: no whole GGUF file ({error}); download it again") from None


def config(header: Header, path: Path) -> dict[str, Any]:
    """The sizes of a model by their names in a config.json. Raises ValueError for a shape that a cache cannot have."""
    if header.values.get("split.count", 1) not in (0, 1):
        raise ValueError(
            f"{path} is one of {header.values['split.count']} parts; join them first: llama-gguf-split --merge"
        )
    if header.of_model("attention.kv_lora_rank"):
        raise ValueError(f"{path} has one latent for all heads ({header.architecture}); caches of heads are supported")
    names = {
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "max_position_embeddings": "context_length",
    }
    found = {name: _same(header.of_model(given), given, path) for name, given in names.items()}
    table = header.tensors.get("token_embd.weight")
    found["vocab_size"] = table.shape[0] if table and len(table.shape) == 2 else None
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        if type(found[name]) is not int or found[name] < 1:
            raise ValueError(f"{path}: {names[name]} of {header.architecture} is {found[name]!r:.60}; a whole number "
                             "of at least 1 is needed")  # fmt: skip
    size = found["head_dim"] or found["hidden_size"] // found["num_attention_heads"]
    if header.of_model("attention.value_length", size) != size:
        raise ValueError(f"{path} has keys of {size} and values of another size; heads of one size are supported")
    found |= {"head_dim": size}
    window = header.of_model("attention.sliding_window")
    if header.architecture in PATTERNS:
        return found | {"sliding_window": window, "sliding_window_pattern": PATTERNS[header.architecture]}
    if window:
        raise ValueError(
            f"{path} has {header.architecture}.attention.sliding_window={window!r:.60}, and does not say which layers "
            "slide; use a model in Hugging Face format, whose config.json does"
        )
    return found


def _same(value: Any, name: str, path: Path) -> Any:
    """A number that is the same in all layers, which some files list."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise ValueError(f"{path} has layers with different {name}; layers of one shape are supported")
    return value[0]


class _Damaged(Exception):
    """A header holds something impossible."""


class _Cursor:
    """A place in the bytes of a header."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 4

    def header(self) -> Header:
        version, tensors, values = self.take("IQQ")
        if self.data[:4] != MAGIC:
            raise _Damaged("it does not begin with GGUF")
        if version not in VERSIONS:
            raise _Damaged(f"version {version:#x}; {' and '.join(map(str, VERSIONS))}, little-endian, are read")
        for count, what in ((tensors, "tensors"), (values, "values")):
            if count > COUNT:
                raise _Damaged(f"{count} {what}; at most {COUNT} are read")
        found: dict[str, Any] = {}
        for _ in range(values):
            name = self.text(NAMES)
            if name in found:
                raise _Damaged(f"{name!r:.80} is there twice")
            found[name] = self.value(*self.take("I"))
        held = [self.tensor() for _ in range(tensors)]
        step = found.get("general.alignment", 32)
        if type(step) is not int or not 1 <= step <= 1 << 20 or step & (step - 1):
            raise _Damaged(f"general.alignment={step!r:.60}; a power of two is needed")
        begin = -(-self.at // step) * step
        named = {name: Held(shape, kind, begin + offset) for name, shape, kind, offset in held}
        if len(named) < len(held):
            raise _Damaged("a tensor is there twice")
        return Header(found, named)

    def take(self, kinds: str) -> tuple:
        """The next numbers; struct.error where the file ends before them."""
        found = struct.unpack_from(f"<{kinds}", self.data, self.at)
        self.at += struct.calcsize(f"<{kinds}")
        return found

    def skip(self, count: int) -> int:
        """Pass over bytes that must be there; returns where they begin."""
        start, self.at = self.at, self.at + count
        if self.at > len(self.data):
            raise _Damaged(f"it ends before {count} bytes at {start}")
        return start

    def skip_texts(self, count: int) -> None:
        """Pass over texts: a vocabulary has hundreds of thousands, so that a call for each is too slow."""
        length, data, at, end = struct.Struct("<Q").unpack_from, self.data, self.at, len(self.data)
        for _ in range(count):
            at += 8 + length(data, at)[0]
            if at > end:
                raise _Damaged(f"it ends before byte {at}, the end of a text")
        self.at = at

    def text(self, limit: int) -> str:
        (length,) = self.take("Q")
        if length > limit:
            raise _Damaged(f"a text of {length} bytes; at most {limit} are read")
        start = self.skip(length)
        return self.data[start : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text(TEXT)
        if kind != ARRAY:
            return self.take(_scalar(kind))[0]
        kind, count = self.take("IQ")
        if count > LONGEST:
            raise _Damaged(f"an array of {count} elements; at most {LONGEST} are read")
        if kind == STRING:
            self.skip_texts(count)
            return Long(count)
        letter = _scalar(kind)
        if count <= KEPT:
            return list(self.take(f"{count}{letter}"))
        self.skip(count * struct.calcsize(f"<{letter}"))
        return Long(count)

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.text(NAMES)
        (dimensions,) = self.take("I")
        if not 1 <= dimensions <= DIMENSIONS:
            raise _Damaged(f"{name!r:.80} has {dimensions} dimensions; 1 to {DIMENSIONS} are read")
        shape = self.take(f"{dimensions}Q")
        kind, offset = self.take("IQ")
        return name, shape[::-1], kind, offset


def _scalar(kind: int) -> str:
    if kind not in SCALARS:
        raise _Damaged(f"a value of type {kind}, which is not known")
    return SCALARS[kind]
