"""The random rotation: orthogonal, the same for every caller, and as random as it says."""

import pytest
import torch
from scipy.stats import kstest

from kvq_runtime.codec import Codec
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import hadamard, orthogonal
from kvq_runtime.recipe import Recipe, Side
from kvq_runtime.stages.exact import Exact
from kvq_runtime.stages.lloyd import Lloyd
from kvq_runtime.stages.rotate import Random


@pytest.mark.parametrize("size", [1, 2, 3, 64, 80, 128])
def test_it_is_orthogonal(size):
    matrix = orthogonal.matrix(size, 0).double()
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(size).double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_its_numbers_are_the_hash(seed):
    expected = [((hadamard.hash64(seed, place) >> 11) + 0.5) / 2**53 for place in range(500)]
    assert orthogonal.uniform(seed, 500).tolist() == expected


def test_it_is_uniform_over_rotations():
    """Every element of a random orthogonal matrix of 3 is uniform on [-1, 1] (Archimedes), only with the sign fix."""
    matrices = torch.stack([orthogonal.matrix(3, seed) for seed in range(2000)])
    for row in range(3):
        for column in range(3):
            assert kstest(matrices[:, row, column].numpy(), "uniform", (-1, 2)).pvalue > 1e-4
    assert 900 < int((torch.linalg.det(matrices) > 0).sum()) < 1100


def test_a_seed_is_one_matrix():
    first = orthogonal.matrix(3, 0)
    orthogonal.matrix.cache_clear()
    assert torch.equal(first, orthogonal.matrix(3, 0))
    assert not torch.equal(first, orthogonal.matrix(3, 1))
    pinned = [
        [-0.55541259, 0.76116282, -0.33488518],
        [-0.39460999, 0.11323708, 0.91184449],
        [-0.73198348, -0.63859892, -0.23746914],
    ]
    torch.testing.assert_close(first, torch.tensor(pinned), atol=1e-6, rtol=0)


def test_layers_keys_and_values_share_it():
    geometry = Geometry(3, 2, 80)
    side = Side(Lloyd(), rotate=Random())
    recipe = Recipe("test", side, side)
    shared = [Codec(recipe, layer, half, geometry, {}).shared for layer in range(3) for half in ("key", "value")]
    assert len({tensor.data_ptr() for tensors in shared for tensor in tensors}) == 3  # forward, back, back in float32


@pytest.mark.parametrize("geometry", [Geometry(1, 4, 80), Geometry(1, 8, 128), Geometry(1, 1, 24)])
def test_sizes(geometry):
    width = geometry.width
    assert Random().size(width, geometry) == geometry.head_size
    assert Random("all").size(width, geometry) == width & -width
    assert Random(8).size(width, geometry) == 8
    with pytest.raises(ValueError, match="group=7 does not divide"):
        Random(7).size(width, geometry)
    with pytest.raises(ValueError, match="use at most 1024"):
        Random(2048).size(4096, geometry)
    with pytest.raises(ValueError, match="exact keeps tokens as they are"):
        Recipe("test", Side(Exact(), rotate=Random()), Side(Exact())).check()
