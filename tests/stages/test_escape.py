"""The escape: tokens that nobody foresaw are caught, stored exactly, marked and billed."""

from dataclasses import replace

import torch
from scheme_fit import GEOMETRY, NOWHERE, WIDTH, decoded, fitted, low_rank
from torch import Tensor

from kvq_runtime.codec.codec import Codec
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.stages.correct import Escape
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Basis


def escaping(slots: int = 1) -> tuple[Codec, Codec, Tensor]:
    """A codec with the escape, the same without, and a block that was not fitted on."""
    scheme = Scheme(Mixed(target=1.5), predict=Mean(), rotate=Basis(), correct=Escape(slots))
    found = fitted(scheme, low_rank())
    without = replace(found.scheme, correct=None)
    tensors = {name: tensor for name, tensor in found.tensors.items() if not name.startswith("correct")}
    return found.codec, Codec(Recipe("test", without, without, "pre"), 0, "key", GEOMETRY, tensors), low_rank(1, seed=5)


def test_a_planted_outlier_is_caught_marked_and_billed():
    made, plain, x = escaping()
    planted = x.clone()
    planted[0, 37] = 5 + 40 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(8))
    fields = made.encode(planted, NOWHERE)
    assert fields["escape_place"].tolist() == [[37]] and fields["escape_wanted"].tolist() == [[1]]
    assert Escape().count(fields) == (1, 1)
    found, clipped = decoded(made, planted), decoded(plain, planted)
    energy = float(planted[0, 37].square().sum())
    assert float((clipped - planted)[0, 37].square().sum()) > 0.5 * energy
    assert float((found - planted)[0, 37].square().sum()) < 1e-4 * energy
    others = torch.arange(128) != 37
    assert torch.equal(found[:, others], clipped[:, others])
    held = sum(8 * tensor.untyped_storage().nbytes() for tensor in fields.values())
    assert made.bits() == held / x.numel() > plain.bits() + 8 / 128


def test_ordinary_tokens_do_not_escape():
    made, plain, x = escaping(3)
    fields = made.encode(x, NOWHERE)
    assert Escape().count(fields) == (0, 0) and fields["escape_place"].tolist() == [[-1, -1, -1]]
    assert torch.equal(decoded(made, x), decoded(plain, x))


def test_the_worst_get_the_slots_and_the_others_are_counted():
    made, _, x = escaping(2)
    noise = torch.randn(WIDTH, generator=torch.Generator().manual_seed(8))
    for place, size in ((3, 20), (50, 60), (90, 30)):
        x[0, place] = 5 + size * noise
    fields = made.encode(x, NOWHERE)
    assert fields["escape_place"].tolist() == [[50, 90]]
    assert Escape().count(fields) == (2, 3)


def test_of_copies_the_last_one_is_served():
    """Copies of a real token fill the slots before it, where padding and exact sinks lie."""
    made, _, x = escaping()
    x[0, :5] = 5 + 40 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(8))
    assert made.encode(x, NOWHERE)["escape_place"].tolist() == [[4]]
