"""Encode Gaussian vectors with one codec, decode them, and say what was lost."""

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.stages.stage import Quantizer

HEADS = Geometry(1, 8, 128)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def one(stage: Quantizer, geometry: Geometry = HEADS, rotate=None) -> Codec:
    """A codec of keys with this quantizer."""
    scheme = Scheme(stage, rotate=rotate)
    return Codec(Recipe("test", scheme, scheme), 0, "key", geometry, {})


def there_and_back(made: Codec, x: Tensor) -> Tensor:
    """What is decoded of encoded numbers."""
    return made.decode(made.encode(x, Context()), Context()).float()


def relative(error: Tensor, x: Tensor) -> float:
    """The squared error over the squared numbers."""
    return float(error.double().square().sum() / x.double().square().sum())
