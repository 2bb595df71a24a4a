"""What a plan counts: texts that settings are measured on, and sequences that leave something to fit."""

from dataclasses import replace

import pytest

from kvq_calib.model import find as models
from kvq_calib.run import budget
from kvq_calib.run import plan as plans
from kvq_runtime.recipe import preset

AQUA = preset("aqua-2bit")


def made(model, seq_len: int, recipe=AQUA, **settings) -> plans.Plan:
    (other := model / "other.txt").write_text("another text")
    texts = {"source": str(model / "corpus.txt"), "transfer": str(other)}
    return plans.make(models.resolve(str(model)), (recipe,), seq_len=seq_len, **texts, **settings)


@pytest.mark.parametrize(
    "held_out, count, own, other", [(20, 8, range(10, 14), range(20, 24)), (3, 3, range(10, 12), range(12, 14))]
)
def test_two_texts_are_measured_as_much_of(model, held_out, count, own, other):
    """Four chunks of two sequences of either, or what is held out, whose last chunk may be shorter."""
    plan = made(model, 4096, samples=20 + held_out, held_out=held_out)
    assert plan.chunk == 2 and plan.transfer_samples == count
    assert budget.texts(plan) == [[*own], [*other]]


def test_sequences_of_sinks_alone_are_refused(model):
    recipe = replace(AQUA, window=replace(AQUA.window, sinks=130))
    assert made(model, 131, recipe, samples=2).seq_len == 131
    with pytest.raises(ValueError, match="seq_len=130 is shorter"):
        made(model, 130, recipe, samples=2)
