"""The step of entropy-coded places: the target's, and what layers take beyond what was promised taken back above."""

import math
from dataclasses import replace

import pytest

from kvq_calib.run import share
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Scheme, preset
from kvq_runtime.stages.exact import Exact

FALLING = [max(0.0, 7 - place / 4) for place in range(len(share.STEPS))]  # half a bit an octave


def taken(step: float, larger: float) -> float:
    """What a place really takes whose latents are so much larger than the draft's."""
    return max(0.0, 7 - (2 * math.log2(step / larger) + 28) / 4)


def run(larger: list[float], target: float) -> list[tuple[float, float]]:
    """(step, bits) of each layer, of one place."""
    begun, found = share.first_step([FALLING] * len(larger), target), []
    for layer, factor in enumerate(larger):
        below = [(FALLING, step, bits) for step, bits in found]
        left = [FALLING] * (len(larger) - layer)
        step = share.next_step(below, left, target, begun) if below else begun
        found.append((step, taken(step, factor)))
    return found


def test_a_draft_that_is_right_is_everyone_s_step():
    found = run([1.0] * 8, 1.0)
    assert [step for step, _ in found] == pytest.approx([2.0**-2] * 8) and sum(bits for _, bits in found) == 8


def test_what_layers_take_too_much_is_taken_back_from_those_above():
    """All latents twice as large as the draft's: half a bit too many in the first layer, spread over eleven."""
    found = run([2.0] * 12, 1.0)
    assert found[0][1] == pytest.approx(1.5)
    assert [bits for _, bits in found[1:]] == pytest.approx([10.5 / 11] * 11)


def test_layers_that_differ_are_averaged_and_the_sum_is_kept():
    larger = [1.0, 1.3, 2.0, 1.6, 1.7, 2.2, 1.4, 1.8, 1.5, 2.1, 1.7, 1.6] * 2
    found = run(larger, 1.0)
    assert sum(bits for _, bits in found) / len(found) == pytest.approx(1.0, abs=0.01)
    steps = [math.log2(step) for step, _ in found[8:-1]]
    assert max(steps) - min(steps) < 0.5  # nearly one step all the same


def test_no_step_is_far_from_the_first():
    """Two layers, of which the first has taken all there was: the other is not emptied."""
    (first, _), (second, bits) = run([32.0, 1.0], 1.2)
    assert second == pytest.approx(first * share.MOST) and bits == pytest.approx(0.2)
    (first, _), (second, _) = run([2.0**-9, 1.0], 3.0)
    assert second == pytest.approx(first / share.MOST)


@pytest.mark.parametrize("target", [-0.1, 7.1])
def test_a_target_that_no_step_has_is_refused(target):
    with pytest.raises(ValueError, match=r"bits but for sinks and frames; this model can have 0 to 7"):
        share.first_step([FALLING], target)


def test_a_first_layer_that_is_not_coded_changes_no_step_above_it():
    """Nothing was taken below: the second layer's step is the first one."""
    exact = Scheme(Exact())
    recipe, geometry = replace(preset("rest-2bit"), layers={0: (exact, exact)}), Geometry(3, 2, 64)
    notes = [{role: {"rates": FALLING, "scale": 1.0} for role in ("key", "value")}] * 3
    first, second = (share.shared_out(recipe, geometry, [{}, *notes[1:]], taken) for taken in ((), [{}]))
    assert first == second and first.scheme(1, "key").quantize.step > 0
