"""Ten thousand artifacts and events that nobody meant: each is refused with an ArtifactError, or means what it says.

What loads is used, too: each of its codecs encodes and decodes a block.
Half are changed in their bytes, half in their content and sealed again, so that no digest refuses them. Each load is
held to 2 s of processor and to twice the file and 64 MiB of memory; an audit hook sees what is opened or executed.
"""

import gc
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import fitted
import mutate
import pytest
import tiny_artifact as tiny
import torch
from patience import PATIENCE

from kvq_runtime.artifact import artifact, fingerprint, header
from kvq_runtime.codec import codec, shared
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import presets
from kvq_runtime.registry import events

MUTANTS = int(os.environ.get("KVQ_MUTANTS", "2600"))  # of each of the four kinds
SECONDS = 2
MEMORY = 64 << 20
LARGEST = 1 << 15  # elements of a block that is tried
GEOMETRY = Geometry(layers=2, kv_heads=2, head_size=16)
# what runs or fetches something; and imports, which nothing of a file may cause
FORBIDDEN = re.compile(
    r"exec|compile|import|pickle|marshal|code\.|ctypes|socket|urllib|subprocess|os\.(system|exec|fork|posix_spawn|spawn)"
)


def artifacts() -> list[bytes]:
    """A small one of every fitted recipe, and the tiny one."""
    found = [tiny.data()]
    for recipe in presets().values():
        try:
            recipe.check(GEOMETRY)
        except ValueError:
            continue
        if recipe.fitted:
            probes = {name: torch.ones(shape) for name, (shape, _) in fingerprint.specs(GEOMETRY).items()}
            stamp = replace(tiny.tiny().fingerprint, geometry=GEOMETRY, probes=probes)
            found.append(artifact.to_bytes(replace(tiny.tiny(), recipe=recipe, fingerprint=stamp,
                                                   tensors=fitted.tensors(recipe, GEOMETRY))))  # fmt: skip
    return found


NAME = "tiny-2bit"
_ENTRY = {"sha256": "b" * 64, "size": 7}
CHANGES = (
    events.Publish("1.0.0", "a" * 64, 100, {"README.md": _ENTRY}),
    events.Promote("production", "1.0.0"),
    events.Publish("1.0.1", "c" * 64, 100, {"README.md": _ENTRY, "error.png": _ENTRY}),
    events.Promote("production", "1.0.1"),
    events.Rollback("production", "1.0.0"),
    events.Yank("1.0.1", "wrong corpus"),
)
HISTORY = [events.Event(number, NAME, "2026-01-31T12:00:00Z", change) for number, change in enumerate(CHANGES, 1)]


# ---- what a load means


def load_artifact(path: Path, good: bytes, data: bytes, draw: random.Random) -> str:
    """Load it, with the digest and size of the good one or without; the check that refused it, or "loaded"."""
    given: tuple = draw.choice(((), (), (sha256(good).hexdigest(),), (sha256(good).hexdigest(), len(good))))
    try:
        with limits(data):
            loaded = artifact.load(path, *given)
    except ArtifactError as error:
        return str(error).removeprefix(f"{path}: ").partition(":")[0]
    assert artifact.to_bytes(loaded) == good, "bytes were changed, and what was loaded means something else"
    return "loaded"


def load_resealed(path: Path, good: bytes, data: bytes, draw: random.Random) -> str:
    """Load it, expecting its own digest and size; what is loaded must be what the file says."""
    try:
        with limits(data):
            loaded = artifact.load(path, sha256(data).hexdigest(), len(data))
    except ArtifactError as error:
        return str(error).removeprefix(f"{path}: ").partition(":")[0]
    about, entries, body = mutate.opened(data)
    assert says(loaded.recipe.to_json(), about["recipe"]), "another recipe"
    stated = {"fingerprint": loaded.fingerprint.to_json(), "provenance": loaded.provenance, "fit": loaded.fit}
    assert all(same(stated[name], about[name]) for name in stated), "other metadata"
    tensors = {**loaded.tensors, **loaded.fingerprint.probes}
    assert tensors.keys() == entries.keys()
    for name, tensor in tensors.items():
        begin, end = entries[name]["data_offsets"]
        assert tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == body[begin:end], name
    artifact.to_bytes(loaded)  # which loads what it wrote
    use(loaded)
    return "loaded"


def use(loaded: artifact.Artifact) -> None:
    """Encode and decode a block with each of its codecs, if a block is no more than LARGEST elements."""
    geometry = loaded.fingerprint.geometry
    for one in (one for pair in shared.build(loaded.recipe, geometry, loaded.tensors) for one in pair):
        tokens, angle = one.block, torch.zeros(1, one.block, geometry.head_size // 2)
        if tokens * geometry.width <= LARGEST:
            x_NTC, zero_NTC = torch.randn(1, tokens, geometry.width), torch.zeros(1, tokens, geometry.width)
            context = codec.Context((angle.cos(), angle), zero_NTC, [(zero_NTC, zero_NTC)] * 3)
            fields = one.encode(x_NTC, context)
            kinds = {name: (tuple(field.shape[1:]), field.dtype) for name, field in fields.items()}
            assert kinds == one.fields(torch.float32), "it is not stored as it says"
            found_NTC = one.restore(one.decode(fields, context), context)
            assert found_NTC.shape == x_NTC.shape and bool(found_NTC.isfinite().all()), "not finite"


def says(full, given) -> bool:
    """Whether a JSON value is `given` with more keys, those that were left to their defaults."""
    if isinstance(full, dict) and isinstance(given, dict):
        return all(key in full and says(full[key], value) for key, value in given.items() if value is not None)
    return same(full, given)


def same(a, b) -> bool:
    """Whether two JSON values are one: 1, 1.0 and true are three."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


EVENT_CHECKS = {
    "json": "event: invalid JSON",
    "schema": "event: expected schema 1",
    "kind": "event: kind ",
    "keys": "event: unknown keys|event: files: .* keys|expected an object",
    "place": "event: expected .* number .*, got ",
    "field": "event: ",
    "history": "",
}


def load_event(data: bytes, number: int) -> str:
    """Read and apply it as the event of this number; the check that refused it, or "loaded"."""
    before = events.fold(NAME, HISTORY[: number - 1])
    try:
        with limits(data):
            event = events.from_bytes(data, number, NAME)
            before.apply(event)
    except ArtifactError as error:
        return next(check for check, message in EVENT_CHECKS.items() if re.match(message, str(error), re.DOTALL))
    assert same(json.loads(event.to_bytes()), json.loads(data)), "another event"
    return "loaded"


# ---- one kind, in a process of its own


def hunt(kind: str, seed: int, folder: Path) -> tuple[Counter, list[str]]:
    """Load MUTANTS of a kind: counts by the check that refused them, and what should not have happened."""
    counts, wrong, draw = Counter(), [], random.Random(f"{kind} {seed}")
    bases = artifacts() if "artifact" in kind else [event.to_bytes() for event in HISTORY]
    trees = [mutate.opened(good)[:2] for good in bases] if "artifact" in kind else [json.loads(good) for good in bases]
    known, path = mutate.vocabulary([list(tree) if isinstance(tree, tuple) else tree for tree in trees]), folder / "x"
    for index in range(-len(bases), MUTANTS):  # each as it is first, to warm up
        number = index % len(bases)
        good = data = bases[number]
        while data == good and index >= 0:
            data = _mutant(kind, good, draw.choice(bases), known, draw)
        path.write_bytes(data)
        try:
            if kind == "artifact":
                verdict = load_artifact(path, good, data, draw)
            elif kind == "artifact, resealed":
                verdict = load_resealed(path, good, data, draw)
            else:
                verdict = load_event(data, number + 1)
        except BaseException as error:
            verdict = "wrong"
            kept = folder / f"{kind}-{index}"
            kept.write_bytes(data)
            wrong.append(f"{kept}: {type(error).__name__}: {error}")
        counts[verdict] += index >= 0
        if index == -1:
            sys.addaudithook(_heard)
    return counts, wrong + [f"executed or opened: {what}" for what in sorted(set(_seen))[:5]]


def _mutant(kind: str, good: bytes, other: bytes, known: dict[str, list], draw: random.Random) -> bytes:
    if kind == "artifact, resealed":
        return mutate.resealed(good, known, draw)
    if kind == "event, well-formed":
        return json.dumps(mutate.some_json(json.loads(good), known, draw)).encode()
    return mutate.some_bytes(good, other, draw)


_watching: list[bool] = []
_seen: list[str] = []


def _heard(event: str, given: tuple) -> None:
    if _watching and (
        FORBIDDEN.match(event) or (event == "open" and not str(given[0]).endswith(("/x", *"0123456789")))
    ):
        _seen.append(f"{event} {given!r:.100}")


@contextmanager
def limits(data: bytes) -> Iterator[None]:
    """Hold what is inside to SECONDS of processor, to MEMORY beside twice the file, and listen to what it does."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 2 * len(data) + MEMORY
    signal.signal(signal.SIGPROF, _too_long)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    _watching.append(True)
    try:
        yield
    finally:
        _watching.clear()
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


EXPECTED = {
    "artifact": {"header", "size", "sha256", "content", "loaded"},
    "artifact, resealed": {"header", "schema", "recipe", "fingerprint", "tensors", "finite", "loaded"},
    "event": {*EVENT_CHECKS, "loaded"},
    "event, well-formed": {*EVENT_CHECKS, "loaded"} - {"json"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPECTED)
def test_a_mutant_is_refused_or_means_what_it_says(kind, tmp_path, record_property):
    with multiprocessing.get_context("fork").Pool(1, gc.freeze) as pool:
        counts, wrong = pool.apply_async(hunt, (kind, 0, tmp_path)).get(PATIENCE)
    record_property(
        "kvq", f"{kind}: {counts.total()} mutants; " + ", ".join(f"{n} {c}" for c, n in counts.most_common())
    )
    assert not wrong, f"{len(wrong)}: " + "\n".join(wrong[:10])
    assert all(counts[check] > 0 for check in EXPECTED[kind])
    assert counts.total() == MUTANTS
    if kind == "artifact, resealed":
        assert not counts["sha256"] + counts["size"] + counts["content"], "a digest refused what was sealed again"


def test_every_check_of_an_artifact_is_met():
    assert EXPECTED["artifact"] | EXPECTED["artifact, resealed"] == {*header.CHECKS, "loaded"}


def test_the_limits_hold_and_the_hook_hears(tmp_path):
    with multiprocessing.get_context("fork").Pool(1, gc.freeze) as pool:
        assert pool.apply(_provoked) == ["MemoryError", "RuntimeError", "TimeoutError", "compile", "exec"]


def _provoked() -> list[str]:
    sys.addaudithook(_heard)
    caught = []
    more = 1 << 36  # bytes: of a few hundred MiB, what earlier tests gave back to the allocator would do
    for action in (
        lambda: bytes(more),
        lambda: torch.empty(more, dtype=torch.uint8),
        lambda: next(x for x in iter(int, 1) if x),
    ):
        try:
            with limits(b""):
                action()
        except (MemoryError, RuntimeError, TimeoutError) as error:
            caught.append(type(error).__name__)
    with limits(b""):
        exec("1")
    return [*caught, *sorted({event.split()[0] for event in _seen})]
