"""Codes that are searched for: of many blocks at once, and what a fit reads in their place."""

import pytest
import torch
from scheme_fit import NOWHERE, fitted, low_rank

from kvq_runtime.ops import trellis
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


@pytest.mark.parametrize("gain", [0, 4], ids=["no gains", "gains"])
def test_paths_of_many_blocks_are_searched_at_once_and_are_those_of_each_alone(gain, monkeypatch):
    scheme = Scheme(Mixed((4, 2, 1, 0), (16, 16, 16, 16), codebook="trellis", gain=gain), Mean(), Basis())
    codec, x_NTC, searches = fitted(scheme, low_rank()).codec, low_rank(5), []
    blocks = [(part, NOWHERE) for part in x_NTC.split([1, 2, 1, 1])]
    alone = [codec.encode(*block) for block in blocks]
    search = trellis.best_path
    monkeypatch.setattr(trellis, "best_path", lambda x, *given: searches.append(len(x)) or search(x, *given))
    together = codec.encode_each(blocks)
    assert searches == [16 * 5] * 3  # one of each count of bits
    for (part, _), fields, (again, context) in zip(blocks, alone, together, strict=True):
        assert fields.keys() == again.keys()
        assert all(torch.equal(field, again[name]) for name, field in fields.items())
        assert torch.equal(codec.decode(again, context), codec.encode_decode(part, NOWHERE)[1])
