"""A tiny valid artifact, and files that are invalid in one respect only."""

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvq_runtime.artifact import artifact, fingerprint, header
from kvq_runtime.artifact.artifact import Artifact, seal, to_bytes
from kvq_runtime.artifact.fingerprint import Fingerprint
from kvq_runtime.codec import codec
from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe, Scheme, Window
from kvq_runtime.stages.predict import Linear, Mean
from kvq_runtime.stages.rtn import Rtn

GEOMETRY = Geometry(layers=2, kv_heads=2, head_size=8)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
WEIGHT = "layers.1.key.predict.weight"
HEADER_LIMIT = header.LIMIT


def recipe(bits: int = 2) -> Recipe:
    """Two layers: a mean, then a linear prediction."""
    scheme = Scheme(quantize=Rtn(bits=bits, group=8), predict=Linear())
    first = replace(scheme, predict=Mean())
    return Recipe("tiny", scheme, scheme, "pre", {0: (first, first)}, "a recipe for tests", Window(1, 4, 8))


def _random(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tiny(seed: int = 0, model: int = 0, bits: int = 2, corpus: str = "a" * 64, environment: str = "cpu") -> Artifact:
    """An artifact; its tensors depend on `seed`, its fingerprint on `model`."""
    tensors = {n: _random(seed, *spec) for n, spec in codec.all_specs(recipe(bits), GEOMETRY).items()}
    probes = {n: _random(1000 + model, *spec) for n, spec in fingerprint.specs(GEOMETRY).items()}
    provenance = {"model": "tiny-model", "revision": "main", "corpus": corpus, "seed": 0, "environment": environment}
    fit = {"layers": [{"key": 0.25, "value": 0.5}, {"key": 0.125, "value": 0.75}]}
    return Artifact(recipe(bits), Fingerprint(GEOMETRY, ROPE, False, probes), tensors, provenance, fit)


def data(seed: int = 0, **settings: Any) -> bytes:
    """Its file."""
    return to_bytes(tiny(seed, **settings))


def parts(good: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The metadata (with `content`), the entries, and the data of a file."""
    length = int.from_bytes(good[:8], "little")
    found = strict_json.loads(good[8 : 8 + length], "header")
    about = strict_json.loads(found.pop("__metadata__")["kvq"], "kvq")
    return about, found, good[8 + length :]


def resealed(tensors: Mapping[str, Tensor | None] | None = None, **about: Any) -> bytes:
    """A file with the right digest, but with other tensors (None removes one) or other metadata."""
    good = tiny()
    given, _, _ = parts(to_bytes(good))
    given.pop("content")
    own = {**good.tensors, **good.fingerprint.probes, **(tensors or {})}
    return seal({name: tensor for name, tensor in own.items() if tensor is not None}, given | about)


def with_header(text: bytes, body: bytes = b"") -> bytes:
    """A file with any header."""
    return len(text).to_bytes(8, "little") + text + body


def refused(given: bytes, message: str, folder: Path) -> None:
    """Assert that bytes are refused with this message, also as a file with the expected digest and size."""
    path = folder / "kvq.safetensors"
    path.write_bytes(given)
    with pytest.raises(ArtifactError, match=f"^{message}"):
        artifact.from_bytes(given)
    with pytest.raises(ArtifactError, match=f"{path}: {message}"):
        artifact.load(path, sha256(given).hexdigest(), len(given))
