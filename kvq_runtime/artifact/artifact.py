"""Save and load a fitted recipe: one safetensors file, whose sha256 is its identity. See artifacts/README.md.

The metadata key `kvq` holds canonical JSON of schema, recipe, fingerprint, provenance, fit, and `content`, a digest of
all of that and of the data. Loading makes these checks in this order, and an error names the one that failed:

    header → size → sha256 → schema → content → recipe → fingerprint → tensors → finite
"""

import io
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256 as hash_of
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from kvq_runtime.artifact import fingerprint, header
from kvq_runtime.artifact.fingerprint import Fingerprint
from kvq_runtime.artifact.header import SCHEMA, about_of
from kvq_runtime.codec import codec
from kvq_runtime.codec.shared import Fitted
from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError, check_type
from kvq_runtime.recipe import Recipe

LARGEST = 2.0**20  # of a fitted number; products of much larger ones overflow
UNASKED = 1 << 26  # bytes of a file from which on it is not read before its header lists what its recipe needs
MAX_WIDTH = 1 << 20  # KV heads × head size; a header that states more is refused before anything is computed from it
_RECIPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=,-]{0,127}")


@dataclass(frozen=True)
class Artifact:
    """A recipe fitted to a model. It is immutable: caches share its tensors, so do not write into them.

    recipe        the settings of every stage
    fingerprint   identity of the model
    tensors       {"layers.0.key.predict.mean": ...}: exactly those that the recipe has on this geometry
    provenance    JSON: model, revision, corpus, seed, environment, ...; no time, host or path, so equal fits are equal
    fit           JSON: the errors that the fit measured
    """

    recipe: Recipe
    fingerprint: Fingerprint
    tensors: Mapping[str, Tensor]
    provenance: Mapping[str, Any]
    fit: Mapping[str, Any]

    def __post_init__(self):
        if not isinstance(self.tensors, Fitted):
            object.__setattr__(self, "tensors", Fitted(self.tensors))

    def __deepcopy__(self, memo: Any) -> "Artifact":
        return self


_lock = threading.Lock()
_loaded: WeakValueDictionary[str, Artifact] = WeakValueDictionary()


def to_bytes(artifact: Artifact) -> bytes:
    """Serialize an artifact; equal artifacts give equal bytes. Raises ArtifactError if it could not be loaded again."""
    check_type("artifact", artifact, Artifact, "what load_artifact returns")
    about = {
        "schema": SCHEMA,
        "recipe": artifact.recipe.to_json(),
        "fingerprint": artifact.fingerprint.to_json(),
        "provenance": dict(artifact.provenance),
        "fit": dict(artifact.fit),
    }
    data = seal({**artifact.tensors, **artifact.fingerprint.probes}, about)
    from_bytes(data)
    return data


def seal(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> bytes:
    """Serialize tensors and metadata, with the digest `content` added; nothing is checked."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    draft = safetensors.torch.save(plain, {"kvq": ""})
    start = 8 + int.from_bytes(draft[:8], "little")
    entries = strict_json.loads(draft[8:start], "header")
    entries.pop("__metadata__")
    sealed = {**about, "content": _content(about, entries, memoryview(draft)[start:])}
    return safetensors.torch.save(plain, {"kvq": strict_json.dumps(sealed)})


def _content(about: Mapping[str, Any], entries: Mapping[str, Any], data: memoryview) -> str:
    described = strict_json.dumps({"kvq": about, "tensors": entries})
    digest = hash_of(described.encode())
    digest.update(data)
    return digest.hexdigest()


def save(artifact: Artifact, path: Path | str) -> str:
    """Write the artifact's file, whole or not at all; returns its sha256."""
    data, path = to_bytes(artifact), Path(path)
    files.save(path, data)
    return hash_of(data).hexdigest()


def load(path: Path | str, sha256: str | None = None, size: int | None = None) -> Artifact:
    """Load an artifact's file; every check of `header.CHECKS` is made before a tensor is returned.

    path           of a regular file; it is opened once, and symbolic links are refused
    sha256, size   that the file must have, according to a registry or a lock; None is not checked
    Raises NotFound, or ArtifactError whose message names the file and the check.
    """
    return _opened(path, sha256, size)[0]


def load_once(path: Path, sha256: str, size: int) -> Artifact:
    """Load an artifact, or return the one of this digest that is in use; threads load one after the other."""
    with _lock:
        artifact = _loaded.get(sha256)
        if artifact is None:
            artifact = _loaded[sha256] = load(path, sha256, size)
        return artifact


def read(path: Path | str, sha256: str, size: int) -> bytes:
    """Return the bytes of an artifact's file, after the checks of `load`."""
    return _opened(path, sha256, size)[1]


def _opened(path: Path | str, sha256: str | None, size: int | None) -> tuple[Artifact, bytes]:
    with files.opened(Path(path)) as (file, length):
        try:
            return _load(file, length, sha256, size)
        except ArtifactError as error:
            raise type(error)(f"{path}: {error}") from None


def from_bytes(data: bytes, sha256: str | None = None) -> Artifact:
    """Load an artifact from the bytes of its file."""
    return _load(io.BytesIO(data), len(data), sha256, None)[0]


def _load(file: BinaryIO, length: int, sha256: str | None, size: int | None) -> tuple[Artifact, bytes]:
    head = header.read(file, length)
    if size is not None and length != size:
        raise ArtifactError(f"size: the file has {length} bytes, expected {size}; fetch it again")
    if length > UNASKED:
        _without_tensors(about_of(head), head)
    file.seek(0)
    try:
        data = file.read(length)
    except MemoryError:
        raise ArtifactError(f"size: the file has {length} bytes, more than fit into memory") from None
    digest = hash_of(data).hexdigest()
    if sha256 is not None and digest != sha256:
        raise ArtifactError(f"sha256: the file has {digest}, expected {sha256}; it was changed, fetch it again")
    if len(data) != length or not data.startswith(head.raw):
        raise ArtifactError("header: the file changed while it was read; try again")
    about = about_of(head)
    stated = about.pop("content")
    content = _content(about, head.entries, memoryview(data)[len(head.raw) :])
    if content != stated:
        raise ArtifactError(
            f"content: the digest is {content}, stated is {stated!r:.80}; the file was changed, fetch it again"
        )
    artifact, fitted = _without_tensors(about, head)
    try:
        tensors = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise ArtifactError(f"header: safetensors refuses it: {error}") from None
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            most = min(LARGEST, torch.finfo(tensor.dtype).max)  # as a float16, LARGEST would be infinity
            if not bool((tensor.abs() <= most).all()):
                raise ArtifactError(f"finite: {name} has NaN, infinity, or more than {most:g}; fit the recipe again")
    probes = {name: tensors[name] for name in fingerprint.specs(artifact.fingerprint.geometry)}
    model = replace(artifact.fingerprint, probes=probes)
    return replace(artifact, tensors={name: tensors[name] for name in fitted}, fingerprint=model), data


def _without_tensors(about: dict[str, Any], head: header.Header) -> tuple[Artifact, list[str]]:
    """Return the artifact without its tensors, and the names of the fitted ones, all of which the header must list."""
    model = fingerprint.from_json(about["fingerprint"], {})
    geometry, listed = model.geometry, head.specs()
    if 2 * geometry.layers > len(listed) or geometry.width > MAX_WIDTH:
        raise ArtifactError(f"fingerprint: {geometry} in a file of {len(listed)} tensors; every layer needs 2 probes")
    try:
        recipe = Recipe.from_json(about["recipe"]).check(geometry)
        if not _RECIPE.fullmatch(recipe.name):
            raise ValueError(f"name {recipe.name!r:.80}; use 1 to 128 of A-Z a-z 0-9 . _ + = , -")
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"recipe: {error}") from None
    fitted = codec.all_specs(recipe, geometry)
    expected = fitted | fingerprint.specs(geometry)
    foreign, missing = sorted(set(listed) - set(expected)), sorted(set(expected) - set(listed))
    if foreign or missing:
        raise ArtifactError(f"tensors: foreign {foreign[:3]}, missing {missing[:3]}, for recipe {recipe.name}")
    for name, (shape, dtype) in expected.items():
        if listed[name] != (tuple(shape), dtype):
            raise ArtifactError(f"tensors: {name} is {spec(*listed[name])}, expected {spec(shape, dtype)}")
    return Artifact(recipe, model, {}, about["provenance"], about["fit"]), list(fitted)


def spec(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Write a tensor's type and shape, as in `float16 [4, 128]`."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
