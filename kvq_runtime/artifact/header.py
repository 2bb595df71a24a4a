"""Check the header of an artifact's file before safetensors parses it, and read its metadata, without torch.

    8 bytes n, little endian | n bytes of JSON, padded with spaces | data

n is at most 1 MB; the JSON has no duplicate keys and bounded depth; tensors are named
layers.{i}.{key|value}.{stage}.{field}; their byte ranges follow each other without gap or overlap, have the size that
shape and dtype ask for, and end with the file.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError

if TYPE_CHECKING:  # kvq list reads headers, and should not wait for torch
    import torch

ARTIFACT_FILE = "kvq.safetensors"  # in a folder, and in a repository of a Hub
SCHEMA = 1
CHECKS = ("header", "size", "sha256", "schema", "content", "recipe", "fingerprint", "tensors", "finite")
LIMIT = 1 << 20
TOLD, LONGEST = 200, 1 << 14  # characters of a field that a summary has, and that a header may have
DTYPES = {  # {dtype: (its bytes, its name in torch)}
    **{"BF16": (2, "bfloat16"), "F16": (2, "float16"), "F32": (4, "float32")},
    **{"U8": (1, "uint8"), "I16": (2, "int16"), "I32": (4, "int32")},
}
_SIZES = range(1 << 48)
_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.(key|value)\.[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Header:
    """A checked header.

    raw       the bytes before the data
    kvq       the text of the metadata key `kvq`
    entries   the JSON of the tensors: {name: {"dtype", "shape", "data_offsets"}}
    """

    raw: bytes
    kvq: str
    entries: dict[str, Any]

    def specs(self) -> "dict[str, tuple[tuple[int, ...], torch.dtype]]":
        """{name: (shape, dtype)} of every tensor."""
        import torch

        kinds = {name: getattr(torch, kind) for name, (_, kind) in DTYPES.items()}
        return {name: (tuple(entry["shape"]), kinds[entry["dtype"]]) for name, entry in self.entries.items()}


def read(file: BinaryIO, size: int, names: re.Pattern[str] = _NAME) -> Header:
    """Read and check the header of a file of `size` bytes; no tensor data is read. Raises ArtifactError.

    names   of tensors that are allowed; those of an artifact
    """
    prefix = file.read(8)
    if len(prefix) < 8:
        raise ArtifactError(
            f"header: {size} bytes are too few for a safetensors file; it is truncated, or another kind of file"
        )
    length = int.from_bytes(prefix, "little")
    if length > LIMIT:
        what = "it is damaged, or another kind of file"
        raise ArtifactError(f"header: {length} bytes long by its first 8, and at most {LIMIT} are allowed; {what}")
    if 8 + length > size:
        raise ArtifactError(f"header: {length} bytes long in a file of {size}; it is truncated, fetch it again")
    text = file.read(length)
    if len(text) < length:
        raise ArtifactError("header: the file became shorter while it was read")
    if not text.startswith(b"{") or not text.rstrip(b" ").endswith(b"}"):
        raise ArtifactError("header: not a JSON object padded with spaces; this is no safetensors file")
    entries = strict_json.loads(text, "header", depth=4)
    metadata = entries.pop("__metadata__", None)
    if isinstance(metadata, dict) and "format" in metadata and "kvq" not in metadata:
        raise ArtifactError(
            "header: these are a model's weights, and no artifact of kvq; an artifact is fitted to them"
        )
    metadata = strict_json.keys(metadata, {"kvq"}, "header: __metadata__")
    if not isinstance(metadata["kvq"], str):
        raise ArtifactError("header: __metadata__.kvq must be text")
    _check_entries(entries, size - 8 - length, names)
    return Header(prefix + text, metadata["kvq"], entries)


def _check_entries(entries: dict[str, Any], data: int, names: re.Pattern[str]) -> None:
    ranges = []
    for name, entry in entries.items():
        if not names.fullmatch(name):
            known = "layers.N.key|value.stage.field" if names is _NAME else names.pattern
            raise ArtifactError(f"header: tensor name {name!r:.80}; expected {known}")
        ranges.append((*_range(name, entry), name))
    end = 0
    for begin, stop, name in sorted(ranges):
        if begin != end:
            raise ArtifactError(f"header: {name} begins at {begin}, but the data before it ends at {end}")
        end = stop
    if end != data:
        what = "it is truncated, fetch it again" if end > data else "bytes follow that belong to no tensor"
        raise ArtifactError(f"header: the tensors end at {end}, the data at {data}; {what}")


def _range(name: str, entry: Any) -> tuple[int, int]:
    strict_json.keys(entry, {"dtype", "shape", "data_offsets"}, f"header: {name}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ArtifactError(f"header: {name} has dtype {dtype!r:.40}; use one of {sorted(DTYPES)}")
    if not _sizes(shape) or len(shape) > 4 or not _sizes(offsets) or len(offsets) != 2:
        raise ArtifactError(f"header: {name} has shape {shape!r:.80}, offsets {offsets!r:.80}; expected whole numbers")
    begin, end = offsets
    needed = math.prod(shape) * DTYPES[dtype][0]
    if end - begin != needed:
        raise ArtifactError(f"header: {name} is {dtype} {shape}, {needed} bytes, but its offsets hold {end - begin}")
    return begin, end


def _sizes(value: Any) -> bool:
    """Return True for a list of whole numbers that can be sizes in bytes."""
    return isinstance(value, list) and set(map(type, value)) <= {int} and all(map(_SIZES.__contains__, value))


def about_of(head: Header) -> dict[str, Any]:
    """Return the metadata under the key `kvq`: schema, recipe, fingerprint, provenance, fit and content."""
    about = strict_json.loads(head.kvq, "header: kvq")
    schema = about.get("schema") if isinstance(about, dict) else None
    if type(schema) is not int or schema != SCHEMA:
        raise ArtifactError(
            f"schema: the file has {schema!r:.40}, this version reads {SCHEMA}; install another version of kvq-runtime"
        )
    names = {"schema", "recipe", "fingerprint", "provenance", "fit", "content"}
    strict_json.keys(about, names, "schema: kvq")
    if not isinstance(about["provenance"], dict) or not isinstance(about["fit"], dict):
        raise ArtifactError("schema: provenance and fit must be objects")
    return about


def summary(recipe: str, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return recipe, model and corpus of an artifact, as `kvq list` shows them: 200 characters of each.

    Raises ArtifactError for a field that is not text, or longer than LONGEST.
    """
    text = provenance.get("corpus")
    text = text if isinstance(text, Mapping) else {"source": text}
    fields = {"recipe": recipe, "model": provenance.get("model"), "revision": provenance.get("revision")}
    fields |= {"corpus": text.get("source"), "corpus_digest": text.get("corpus_digest")}
    check_summary(fields, LONGEST)
    return {name: value and value[:TOLD] for name, value in fields.items()}


def check_summary(fields: Mapping[str, Any], longest: int = TOLD) -> None:
    """Raise ArtifactError unless every field is null, or text of at most `longest` characters."""
    for name, value in fields.items():
        if value is not None and (not isinstance(value, str) or len(value) > longest):
            raise ArtifactError(f"provenance: {name} {value!r:.80}; expected text of at most {longest} characters")
