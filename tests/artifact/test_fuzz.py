"""Artifacts that nobody meant: each is refused with an ArtifactError, or means what it says.

Half are changed in their bytes, half in their content and sealed again, so that no digest refuses them.
"""

import json
import random
from hashlib import sha256
from pathlib import Path

import mutate
import pytest
import tiny_artifact as tiny

from kvq_runtime.artifact import artifact, header
from kvq_runtime.codec import shared
from kvq_runtime.errors import ArtifactError

GOLDEN = Path(__file__).parents[2] / "artifacts" / "golden" / "v1" / "svdq-2bit-v4.safetensors"


def check_of(error: ArtifactError) -> str:
    return str(error).partition(":")[0]


def same(a, b) -> bool:
    """Whether two JSON values are one: 1, 1.0 and true are three."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def load_bytes(good: bytes, data: bytes, digest: str | None) -> str:
    """The check that refused changed bytes, or "loaded" where they mean the same."""
    try:
        loaded = artifact.from_bytes(data, digest)
    except ArtifactError as error:
        return check_of(error)
    assert artifact.to_bytes(loaded) == good, "bytes were changed, and what was loaded means something else"
    return "loaded"


def load_resealed(data: bytes) -> str:
    """The check that refused changed content, or "loaded" where what is loaded is what the file says."""
    try:
        loaded = artifact.from_bytes(data, sha256(data).hexdigest())
    except ArtifactError as error:
        return check_of(error)
    about, entries, _ = mutate.opened(data)
    stated = {"fingerprint": loaded.fingerprint.to_json(), "provenance": loaded.provenance, "fit": loaded.fit}
    assert all(same(stated[name], about[name]) for name in stated), "other metadata"
    assert {**loaded.tensors, **loaded.fingerprint.probes}.keys() == entries.keys()
    artifact.to_bytes(loaded)  # which loads what it wrote
    shared.build(loaded.recipe, loaded.fingerprint.geometry, loaded.tensors)
    return "loaded"


@pytest.mark.parametrize("count", [60, pytest.param(1500, marks=pytest.mark.slow)])
def test_a_mutant_is_refused_or_means_what_it_says(count):
    bases, draw = [tiny.data(), GOLDEN.read_bytes()], random.Random(count)
    known = mutate.vocabulary([list(mutate.opened(good)[:2]) for good in bases])
    met = set()
    for number in range(count):
        good, other = draw.sample(bases, 2)
        digest = sha256(good).hexdigest() if number % 3 == 0 else None
        met.add(load_bytes(good, mutate.some_bytes(good, other, draw), digest))
        met.add(load_resealed(mutate.resealed(good, known, draw)))
    assert met <= {*header.CHECKS, "loaded"} and {"header", "content", "recipe"} <= met
