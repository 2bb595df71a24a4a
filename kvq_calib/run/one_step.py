"""Find the step of entropy-coded places (`dead_zone`), so that files take the bits that their recipe promises.

    draft     notes what files would take of each place at each of STEPS
    first     the step, in √nats, at which that is the target in all, is everyone's
    layer l   the layers below have been fitted, and what their codes take of text that they were not fitted to is
              known: of layer l and those above, the step is that at which they take what is left

A draft promises too little: its predictions are in full precision and from layers that are coded otherwise, and of
4,096 tokens; SmolLM2's codes take 1.3 times as much. So layers above are taken to grow as those below have grown: as if
all latents were larger than the draft's by one factor, that at which the draft's rates come to what was measured. Bits
that a layer takes too many are thus spread over all above it. No step is more than MOST times, or less than a MOST-th
of, the first one: where few layers are left, quality goes before the promise.

The target is of files of prefixes of `block_file.LENGTH` tokens: sinks and frames are taken off before. Of a plan that
holds no sequences out, what the fit's own text takes is what is known, which is less than other text will.

All that a layer's step depends on are the notes of the draft and of the layers below: a run that was killed goes on
with the same.
"""

import math
from collections.abc import Callable, Sequence

# in √nats, at which the rates of places are noted
STEPS = tuple(2.0 ** (place / 2) for place in range(-28, 3))
MOST = 4.0
HALVINGS = 50

Curve = Sequence[float]  # bits per element at each of STEPS


def first(curves: Sequence[Curve], target: float) -> float:
    """The step at which places take `target` bits per element in the mean. ValueError: there is none."""
    low, high = (math.fsum(curve[end] for curve in curves) / len(curves) for end in (-1, 0))
    if not low <= target <= high:
        raise ValueError(
            f"target: {target:.3g} bits but for sinks and frames; this model can have {low:.3g} to {high:.3g}"
        )
    return _step(_falling(lambda at: _sum(curves, at) - target * len(curves), 0, len(STEPS) - 1))


def next_one(below: Sequence[tuple[Curve, float, float]], above: Sequence[Curve], target: float, begun: float) -> float:
    """The step of the places above, at which all take `target` bits per element in the mean.

    below   of each place that is fitted its curve, the step that it has, and the bits per element that it takes
    begun   the step that all were to have
    """
    spent = math.fsum(bits for *_, bits in below)
    places = [(curve, _place(step)) for curve, step, _ in below]
    far = len(STEPS) - 1
    grown = _falling(lambda by: spent - math.fsum(_at(curve, at - by) for curve, at in places), -far, far)
    left = target * (len(below) + len(above)) - spent
    reach, start = 2 * math.log2(MOST), _place(begun)
    return _step(_falling(lambda at: _sum(above, at - grown) - left, start - reach, start + reach))


def _falling(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that falls is 0; the end that is nearer to it, if it is nowhere."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return high


def _sum(curves: Sequence[Curve], at: float) -> float:
    return math.fsum(_at(curve, at) for curve in curves)


def _at(curve: Curve, at: float) -> float:
    """Bits at a place among STEPS, between two of them in proportion; beyond the last, as there."""
    at = min(max(at, 0.0), len(STEPS) - 1.0)
    low = min(int(at), len(STEPS) - 2)
    return curve[low] + (at - low) * (curve[low + 1] - curve[low])


def _place(step: float) -> float:
    return 2 * math.log2(step) - 2 * math.log2(STEPS[0])


def _step(place: float) -> float:
    return STEPS[0] * 2.0 ** (place / 2)
