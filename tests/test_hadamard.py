"""The signed Hadamard rotation: orthogonal, the same everywhere, and no constant survives it as a spike."""

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard as theirs

from kvq_runtime.ops import hadamard


def test_the_hash_is_splitmix64():
    """The first numbers of the published generator for these seeds."""
    assert hadamard.hash64(0) == 0xE220A8397B1DCDAF
    assert hadamard.hash64(1234567) == 6457827717110365317
    assert hadamard.hash64(1, 2) != hadamard.hash64(2, 1)
    assert hadamard.hash64(-1) == hadamard.hash64(2**64 - 1)


@pytest.mark.parametrize("size", [1, 2, 16, 256])
@pytest.mark.parametrize("seed", [0, 7])
def test_it_is_a_signed_sylvester_matrix(size, seed):
    signs = hadamard.signs(size, seed).double()
    assert set(signs.tolist()) <= {-1.0, 1.0}
    expected = signs[:, None] * torch.from_numpy(theirs(size).astype(np.float64)) / size**0.5
    matrix = hadamard.matrix(size, seed).double()
    torch.testing.assert_close(matrix, expected, rtol=0, atol=1e-7)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-6)


def test_a_constant_is_spread():
    """A plain H gathers a constant in one component; the signs leave none above 5 times the mean."""
    turned = torch.ones(1024) @ hadamard.matrix(1024, 0)
    assert float(turned.abs().max()) < 5
    assert float(turned.square().mean()) == pytest.approx(1.0, rel=1e-5)
    assert abs(float(hadamard.signs(1024, 0).sum())) < 4 * 1024**0.5


def test_seeds_differ():
    assert not torch.equal(hadamard.signs(64, 0), hadamard.signs(64, 1))


@pytest.mark.parametrize("size", [0, 3, 80, -4])
def test_sizes_that_have_no_matrix(size):
    with pytest.raises(ValueError, match="power of two"):
        hadamard.matrix(size, 0)
