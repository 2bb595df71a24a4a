"""The contract of a path: one way to answer queries from what a layer holds. A cache asks its paths in order.

paths of policies (`Policy.attend`)  →  fused  →  long_query  →  absorbed  →  reference
"""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.layer import LayerStore


class Attended(NamedTuple):
    """The result of attention.

    out_BHTD  of the shape of the queries
    lse_BHT   log2 Σ 2^s of their scores, [B, query heads, T]; None from a path that reports the weights themselves
    """

    out_BHTD: Tensor
    lse_BHT: Tensor | None


class Path(ABC):
    """One way to attend."""

    @abstractmethod
    def attend(
        self, store: LayerStore, layer: int, q_BHTD: Tensor, mask: Tensor | None, scale: float
    ) -> Attended | None:
        """Attend with queries [B, query heads, T, D], those of the newest T tokens, to all that the layer holds.

        mask    bool [B or 1, 1, T, all tokens], True where a query sees a token; None: causal, nothing padded
        scale   what scores are multiplied with
        None: these queries, or this layer, are not for this path.
        """

    @staticmethod
    def refusal(recipe: Recipe, geometry: Geometry, layer: int = 0) -> str | None:
        """Return the reason why this path takes no query to this layer, with its cost; None: it takes some."""
        return None


def newest_weights(attended: Attended, store: LayerStore, q_BHTD: Tensor, scale: float) -> Tensor:
    """Return the newest query's weights over the window, for a path that reports `lse`: [B, H, G, 1, W]."""
    assert attended.lse_BHT is not None
    heads = store.codecs[0].geometry.kv_heads
    k_BH1WD = store.window_2BTC[0].float().unflatten(2, (heads, -1)).transpose(1, 2)[:, :, None]
    q_BHG1D, lse_BHG1 = (x[:, :, -1:].float().unflatten(1, (heads, -1)) for x in (q_BHTD, attended.lse_BHT))
    return (q_BHG1D @ k_BH1WD.mT * (scale / math.log(2)) - lse_BHG1[..., None]).exp2()
