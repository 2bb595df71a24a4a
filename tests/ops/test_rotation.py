"""Rotations: orthogonal, the same everywhere; a Hadamard spreads a constant, a random one is uniform."""

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard as theirs
from scipy.stats import kstest

from kvq_runtime.ops import rotation


def test_the_hash_is_splitmix64():
    """The first numbers of the published generator for these seeds."""
    found = rotation.mix(torch.tensor([0, 1234567]))
    assert [int(x) % 2**64 for x in found] == [0xE220A8397B1DCDAF, 6457827717110365317]
    assert torch.equal(rotation.hashes(-1, 3), rotation.hashes(2**64 - 1, 3))


@pytest.mark.parametrize("size", [1, 2, 16, 256])
@pytest.mark.parametrize("seed", [0, 7])
def test_it_is_a_signed_sylvester_matrix(size, seed):
    signs = rotation.signs(size, seed).double()
    assert set(signs.tolist()) <= {-1.0, 1.0}
    expected = signs[:, None] * torch.from_numpy(theirs(size).astype(np.float64)) / size**0.5
    matrix = rotation.hadamard_matrix(size, seed).double()
    torch.testing.assert_close(matrix, expected, rtol=0, atol=1e-7)
    for odd in (0, 3, -4):
        with pytest.raises(ValueError, match="power of two"):
            rotation.hadamard_matrix(odd, seed)


@pytest.mark.parametrize("size", [1, 2, 3, 64, 80, 128])
def test_a_random_matrix_is_orthogonal(size):
    matrix = rotation.random_matrix(size, 0).double()
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(size).double(), atol=1e-6, rtol=0)


@pytest.mark.slow
def test_it_is_uniform_over_rotations():
    """Every element of a random orthogonal matrix of 3 is uniform on [-1, 1] (Archimedes), only with the sign fix."""
    matrices = torch.stack([rotation.random_matrix(3, seed) for seed in range(2000)])
    for row in range(3):
        for column in range(3):
            assert kstest(matrices[:, row, column].numpy(), "uniform", (-1, 2)).pvalue > 1e-4
    assert 900 < int((torch.linalg.det(matrices) > 0).sum()) < 1100


def test_a_seed_is_one_matrix():
    first = rotation.random_matrix(3, 0)
    assert not torch.equal(first, rotation.random_matrix(3, 1))
    pinned = [
        [-0.55541259, 0.76116282, -0.33488518],
        [-0.39460999, 0.11323708, 0.91184449],
        [-0.73198348, -0.63859892, -0.23746914],
    ]
    torch.testing.assert_close(first, torch.tensor(pinned), atol=1e-6, rtol=0)
