"""A real LMCache on a CPU: chunks stored in its file tier, and loaded by another process. `make test-engines`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lmcache", reason="LMCache is in an environment of its own: make test-engines")

import torch

from benchmarks.lmcache_tier import Tier, keys
from kvq_runtime.codec import codec as codecs
from kvq_runtime.codec.codec import Context
from kvq_runtime.geometry import Geometry
from kvq_runtime.lmcache.chunk import HEADER
from kvq_runtime.recipe import preset

ROOT = Path(__file__).parents[2]
SIZE = Geometry(6, 2, 64)  # the embedded model's
SHAPE = (2, SIZE.layers, 256, SIZE.width)
NAMES = keys("a text", 3)
STORE = """
import json, sys, torch
from pathlib import Path
from benchmarks.lmcache_tier import Tier, keys
folder = Path(sys.argv[1])
with Tier(folder, json.loads(sys.argv[2])) as tier:
    tier.put(keys("a text", 3), torch.load(folder / "chunks.pt"))
"""  # in another process


def serde(recipe: str) -> dict:
    return {"type": "kvq", "cache": recipe, "model": str(ROOT / "artifacts" / "demo-model")}


def chunks(seed: int = 0) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=random).bfloat16() for _ in NAMES]


def decoded(recipe: str, chunk: torch.Tensor) -> torch.Tensor:
    """What the recipe's codecs make of a chunk, without LMCache and without a chunk's bytes."""
    found = torch.empty_like(chunk)
    for layer, pair in enumerate(codecs.build(preset(recipe), SIZE, {})):
        for role, codec in enumerate(pair):
            fields = codec.encode(chunk[role, layer].unflatten(0, (-1, 128)), Context())
            found[role, layer] = codec.decode(fields, Context()).flatten(0, 1).bfloat16()
    return found


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.data"))


@pytest.mark.parametrize(("recipe", "bits"), [("exact", 16), ("lloyd-3bit", 3.25), ("kivi-2bit", 3)])
def test_another_process_loads_what_one_has_stored(recipe: str, bits: float, tmp_path: Path):
    """Each number is the codec's; each file has the recipe's bits and a header."""
    torch.save(chunks(), tmp_path / "chunks.pt")
    given = [str(tmp_path), json.dumps(serde(recipe))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", STORE, *given], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {file.stat().st_size for file in files(tmp_path)} == {HEADER + torch.Size(SHAPE).numel() * bits / 8}
    with Tier(tmp_path, serde(recipe)) as tier:
        loaded = tier.get(NAMES, chunks()[0])
    assert len(loaded) == len(NAMES)
    for one, chunk in zip(loaded, chunks(), strict=True):
        assert torch.equal(one, decoded(recipe, chunk))


def test_a_damaged_chunk_is_a_miss_and_is_written_again(tmp_path: Path):
    """LMCache gives none of the request's chunks; the damaged file is gone, and the next request stores it."""
    with Tier(tmp_path, serde("lloyd-3bit")) as tier:
        tier.put(NAMES, chunks())
    path = next(file for file in files(tmp_path) if NAMES[1].chunk_hash.hex() in file.name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with Tier(tmp_path, serde("lloyd-3bit")) as tier:
        assert tier.get(NAMES, chunks()[0]) == []
        assert len(files(tmp_path)) == 2 and path not in files(tmp_path)
        assert len(tier.get(NAMES, chunks()[0])) == 1
        tier.put(NAMES[1:2], chunks()[1:2], stored=False)
    with Tier(tmp_path, serde("lloyd-3bit")) as tier:
        tier.put(NAMES, chunks())
    with Tier(tmp_path, serde("lloyd-3bit")) as tier:
        assert len(tier.get(NAMES, chunks()[0])) == 3


def test_another_recipes_chunks_are_a_miss(tmp_path: Path):
    """Of more bytes or of fewer, or of as many."""
    for first, second in [
        ("lloyd-3bit", "lloyd-2bit"),
        ("lloyd-2bit", "lloyd-3bit"),
        ("quarot-2bit", "rtn-2bit"),
    ]:
        folder = tmp_path / f"{first}-{second}"
        folder.mkdir()
        with Tier(folder, serde(first)) as tier:
            tier.put(NAMES, chunks())
        with Tier(folder, serde(second)) as tier:
            assert tier.get(NAMES, chunks()[0]) == []


@pytest.mark.parametrize(
    ("recipe", "message"),
    [("aqua-2bit", "has to be fitted"), ("mean-higgs-2bit", "fitted"), ("no-such-recipe", "no-such-recipe"),
     ("svdq-online-3bit", "nearest recipe that it can keep them by")],
)  # fmt: skip
def test_what_cannot_be_kept_stops_the_start(recipe: str, message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message) as refused:
        Tier(tmp_path, serde(recipe))
    assert 'serde "kvq": ' in str(refused.value)


def test_chunks_of_another_model_are_not_stored(tmp_path: Path):
    """LMCache goes on: the request's chunks are in its memory, not in its files."""
    with Tier(tmp_path, serde("lloyd-3bit")) as tier:
        odd = [torch.randn(2, 7, 256, 128).bfloat16() for _ in NAMES]
        tier.put(NAMES, odd, stored=False)
        assert all(torch.equal(one, other) for one, other in zip(tier.get(NAMES, odd[0]), odd, strict=True))
        tier.put(keys("another text", 3), chunks(1))
    assert len(files(tmp_path)) == 3
