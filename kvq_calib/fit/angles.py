"""Fit a polar transform's codebooks to the calibration's angles, by k-means++.

What is done with the clusters is `kvq_runtime.fit.angles`, which a cache that fits to its own prompt shares.

Source: Han et al., 2025 (PolarQuant), section 4.1 (offline).
"""

from torch import Tensor

from kvq_calib.fit import clusters
from kvq_runtime.fit import angles
from kvq_runtime.geometry import Geometry
from kvq_runtime.stages.polar import PolarFitted


def fit(quantize: PolarFitted, rows_NC: Tensor, geometry: Geometry, seed: int) -> dict[str, Tensor]:
    """The tensors of the quantizer, from a sample of tokens as it sees them, float32."""
    return angles.fit(quantize, rows_NC, geometry, lambda x_N, count: clusters.centres(x_N, count, seed))
