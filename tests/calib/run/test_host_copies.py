"""Activations in host memory beside a GPU: a chunk's tensors are on their way while the chunk before is at work."""

from dataclasses import dataclass, field

import pytest
import torch

from kvq_calib.run.run import Copies, InMemory


@dataclass
class Noted:
    """Stands for a GPU's copies: notes which were begun, in their order."""

    begun: list[float] = field(default_factory=list)
    settled: int = 0

    def up(self, host):
        self.begun.append(float(host[0]))
        return Came(host.clone())

    def settle(self):
        self.settled += 1


@dataclass
class Came:
    tensor: torch.Tensor

    def taken(self):
        return self.tensor


def path(folder, kind, index):
    return folder / "layer-0000.partial" / f"{kind}-{index:05d}.safetensors"


@pytest.fixture
def held(tmp_path):
    held = InMemory(3600, copies=Noted())  # pyright: ignore[reportArgumentType]
    for index in range(3):
        held.save(
            {"key": torch.full((2,), index + 0.0), "value": torch.full((2,), index + 0.5)},
            path(tmp_path, "capture", index),
        )
        held.save({"hidden": torch.full((2,), index + 10.0)}, path(tmp_path, "hidden", index))
    return held


def test_the_next_chunk_is_begun_when_one_is_taken_and_nothing_is_copied_twice(held, tmp_path):
    for index in range(3):
        found = held.load(path(tmp_path, "capture", index), "meta", ["key"])
        assert list(found) == ["key"] and float(found["key"][0]) == index
    assert held._copies.begun == [0, 1, 2] and not held._coming


def test_a_tensor_that_is_replaced_or_forgotten_is_not_handed_out(held, tmp_path):
    held.load(path(tmp_path, "hidden", 0), "meta")
    held.save({"hidden": torch.full((2,), 7.0)}, path(tmp_path, "hidden", 1))
    assert float(held.load(path(tmp_path, "hidden", 1), "meta")["hidden"][0]) == 7
    held.remove(path(tmp_path, "hidden", 2))
    assert held._copies.begun == [10, 11, 7, 12] and not held._coming
    with pytest.raises(FileNotFoundError):
        held.load(path(tmp_path, "hidden", 2))


def test_the_host_waits_for_what_it_reads(held, tmp_path):
    assert float(held.load(path(tmp_path, "hidden", 0))["hidden"][0]) == 10
    assert held._copies.settled == 1 and not held._copies.begun


@pytest.mark.gpu
def test_copies_of_a_device_are_what_it_held(tmp_path):
    held, device = InMemory(3600, copies=Copies("cuda")), "cuda"
    given = [torch.randn(1 << 20, device=device).cumsum(0) for _ in range(8)]
    for index, x in enumerate(given):
        held.save({"hidden": x * 2}, path(tmp_path, "hidden", index))
    for index, x in enumerate(given):
        assert torch.equal(held.load(path(tmp_path, "hidden", index), device)["hidden"], x * 2)
    assert torch.equal(held.load(path(tmp_path, "hidden", 3))["hidden"], (given[3] * 2).cpu())
    assert held._held[path(tmp_path, "hidden", 0).parent.with_suffix("") / "hidden-00000.safetensors"][
        "hidden"
    ].is_pinned()
