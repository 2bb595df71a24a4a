"""Add what was rounded to what was predicted: x̂ = prediction + scale · rounded, in the prediction's memory."""

from torch import Tensor

from kvq_runtime.ops import dispatch


@dispatch.paired
def add(predicted_NTC: Tensor, rounded_NTC: Tensor) -> Tensor:
    """The sum, in place of `predicted` and in its dtype; summed in the wider of the two."""
    return predicted_NTC.copy_(predicted_NTC + rounded_NTC)
