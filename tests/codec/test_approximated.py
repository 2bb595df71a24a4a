"""What a fit reads in place of codes that are searched for: where it may stand in, and where it may not."""

import pytest
import torch
from scheme_fit import NOWHERE, fitted, low_rank

from kvq_runtime.recipe import Scheme
from kvq_runtime.stages.correct import Sparse
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Basis

PATHS = Mixed((4, 2, 1, 0), (16, 16, 16, 16), codebook="trellis")


@pytest.mark.parametrize(
    "scheme, same",
    [
        pytest.param(Scheme(PATHS, Mean(), Basis()), False, id="paths"),
        pytest.param(Scheme(PATHS, Mean(), Basis(), correct=Sparse(0.02)), True, id="paths, outliers stored beside"),
    ],
)
def test_where_errors_are_stored_too_a_fit_reads_what_is_decoded(scheme, same):
    """Outliers are those of the codes: a stand-in's are others."""
    x_NTC = low_rank(4)
    codec = fitted(scheme, low_rank()).codec
    decoded, read = codec.encode_decode(x_NTC, NOWHERE)[1], codec.approximated(x_NTC, NOWHERE)
    assert torch.equal(decoded, read) == same
