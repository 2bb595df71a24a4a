"""Keys predicted from values below, and values from keys below: what a layer is a function of, it is predicted from."""

import numpy as np
import pytest
import torch
from scheme_fit import GEOMETRY, WIDTH, blocks, chunks
from torch import Tensor

from kvq_calib.fit.scheme import SchemeFit
from kvq_calib.fit.statistics import Moments
from kvq_runtime.codec.codec import Context
from kvq_runtime.fit.statistics import Statistics
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.stages.codebook import Grid
from kvq_runtime.stages.predict import Linear


def planted(role: str, seed: int = 0) -> tuple[Tensor, Context]:
    """Tokens [8, 128, C] of layer 1 that are a map of the keys, and of the values, below, and a little noise."""
    random = torch.Generator().manual_seed(seed)
    keys, values, own = (torch.randn(8, 128, WIDTH, generator=random).bfloat16() for _ in range(3))
    maps = torch.randn(2, WIDTH, WIDTH, generator=torch.Generator().manual_seed(7)) / WIDTH**0.5
    x = keys.float() @ maps[0] + values.float() @ maps[1] + 3
    x += 0.1 * torch.randn(x.shape, generator=random)
    return x, Context(keys=own if role == "value" else None, below=[(keys, values)])


def fit_of(predict: Linear, role, x: Tensor, context: Context) -> SchemeFit:
    moments = Moments(WIDTH)
    moments.update(x)
    scheme = Scheme(Grid(), predict=predict)
    statistics = Statistics(moments.value().mean_C.float())
    fit = SchemeFit(Recipe("test", scheme, scheme, "pre"), 1, role, GEOMETRY, statistics)
    fit.fit(chunks([(blocks(x, 0), context)]))
    return fit


@pytest.mark.parametrize("role", ["key", "value"])
def test_the_map_is_numpys_of_all_inputs_side_by_side(role):
    x, context = planted(role)
    fit = fit_of(Linear(both=True, ridge=0.0), role, x, context)
    keys, values = (part.flatten(0, 1).double().numpy() for part in context.below[0])
    parts = [keys, values] if context.keys is None else [context.keys.flatten(0, 1).double().numpy(), values, keys]
    inputs = np.concatenate([*parts, np.ones((len(keys), 1))], 1)
    expected, *_ = np.linalg.lstsq(inputs, x.flatten(0, 1).double().numpy() - fit.statistics.mean_C.numpy(), rcond=None)
    assert fit.tensors["predict.weight"].shape == (len(parts) * WIDTH, WIDTH)
    np.testing.assert_allclose(fit.tensors["predict.weight"].double(), expected[:-1], rtol=2**-8, atol=1e-5)
    np.testing.assert_allclose(fit.tensors["predict.bias"], expected[-1], atol=2e-3)
