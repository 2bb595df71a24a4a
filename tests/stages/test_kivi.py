"""KIVI: keys per channel, values per token; what it bills, where an outlier does harm, and what generation stores."""

import numpy as np
import pytest
import torch
from feeding import error
from torch import Tensor

from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Window, preset

HEADS = Geometry(1, 8, 128)
NAMES = {"kivi-2bit": (2, 32), "kivi-4bit-g128": (4, 128)}
every = pytest.mark.parametrize("name", NAMES)


def there_and_back(name: str, role, x: Tensor, geometry: Geometry = HEADS) -> Tensor:
    made = Codec(preset(name).check(geometry), 0, role, geometry, {})
    return made.decode(made.encode(x, Context()), Context()).float()


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(rows: np.ndarray, bits: int) -> np.ndarray:
    """Equation 1 of the paper, along the last dimension, with range and step in float16."""
    low = rows.min(-1, keepdims=True).astype(np.float16).astype(float)
    step = ((rows.max(-1, keepdims=True) - low) / (2**bits - 1)).astype(np.float16).astype(float)
    return low + step * np.clip(np.round((rows - low) / step), 0, 2**bits - 1)


@every
def test_bits_are_codes_and_two_numbers_per_group(name):
    bits, group = NAMES[name]
    for role in ("key", "value"):
        assert Codec(preset(name), 0, role, HEADS, {}).bits() == bits + 2 * 16 / group
    assert preset(name).window == Window(0, 128, 128)


@every
def test_agrees_with_the_papers_equation(name):
    bits, group = NAMES[name]
    x = gaussian(2, 128, 1024) * torch.linspace(0.2, 5, 1024) + 1
    keys = rounded(x.double().numpy().reshape(2, 128 // group, group, 1024).swapaxes(2, 3), bits).swapaxes(2, 3)
    values = rounded(x.double().numpy().reshape(2, 128, 1024 // group, group), bits)
    for role, expected in (("key", keys), ("value", values)):
        expected = torch.from_numpy(expected.reshape(x.shape)).float()
        assert error(there_and_back(name, role, x), expected) < 2**-7.5


@every
def test_an_outlier_harms_its_own_group_alone(name):
    """A channel of keys that is large in every token, and a value token that is large in every channel."""
    _, group = NAMES[name]
    x = gaussian(1, 128, 1024)
    before = there_and_back(name, "key", x)
    x[..., 77] = 100 + 10 * x[..., 77]
    after = there_and_back(name, "key", x)
    others = torch.arange(1024) != 77
    assert torch.equal(before[..., others], after[..., others])
    x = gaussian(1, 128, 1024)
    before = there_and_back(name, "value", x)
    x[0, 5, 3] = 100
    after = there_and_back(name, "value", x)
    changed = (before != after).nonzero()
    assert set(changed[:, 1].tolist()) == {5} and int(changed[:, 2].max()) < group


def test_outlier_channels_are_what_it_is_for():
    """With one channel in 32 far from zero, as keys have them, rounding per token loses the 31 others."""
    x = gaussian(10, 128, 1024)
    x[..., ::32] += 20
    others = torch.arange(1024) % 32 != 0
    channel, token = (there_and_back("kivi-2bit", role, x)[..., others] for role in ("key", "value"))
    assert error(channel, x[..., others]) < 0.5
    assert error(token, x[..., others]) > 0.9
