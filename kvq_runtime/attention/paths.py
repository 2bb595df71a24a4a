"""Ask the paths of a cache, in their order, and answer with what the first of them says.

paths of policies (`Policy.attend`)  →  fused  →  long_query  →  absorbed  →  reference
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvq_runtime.attention.absorbed import Absorbed
from kvq_runtime.attention.fused import Explanation, Fused
from kvq_runtime.attention.long_query import LongQuery
from kvq_runtime.attention.path import Observer, Path, Reference, newest_weights
from kvq_runtime.ops import dense
from kvq_runtime.store.decode import Decoder
from kvq_runtime.store.layer import LayerStore

_log = logging.getLogger("kvq_runtime.cache")  # whose paths they are


class Paths:
    """The paths of one cache.

    policies   what answers before them
    observer   takes the weights that queries give to tokens; None: nobody asks for them
    """

    def __init__(self, decoder: Decoder, fused: Fused, policies: Sequence[Any], observer: Observer | None):
        self.fused, self.positions, self._observer = fused, fused.positions, observer
        self.absorbed = Absorbed(decoder, fused.positions, observer)
        self.reference = Reference(decoder, fused.positions, observer)
        self.asked: Sequence[Any | Path] = (
            *policies,
            fused,
            LongQuery(decoder, fused),
            self.absorbed,
            self.reference,
        )
        self._told: set[int] = set()  # layers whose path the log has

    def attend(
        self, store: LayerStore, layer: int, q_BHTD: Tensor, mask: Tensor | None, scale: float, softmax: dense.Softmax
    ) -> Tensor:
        """As `BlockCache.attend`."""
        logit_H, cap = softmax.logit_H, softmax.cap
        if logit_H is not None:
            self.absorbed.levels = self.reference.levels = True  # paths of the GPU say it anyway
        for path in self.asked:
            attended = path.attend(store, layer, q_BHTD, mask, scale, cap)
            if attended is None:
                continue
            if self.positions.recorded and path is not self.fused:
                raise RuntimeError(
                    f"a step of {q_BHTD.shape[1]} query heads and {q_BHTD.shape[2]} tokens cannot be recorded: "
                    "it is not the kernel that attends, and what torch does is fixed to the tokens of this moment"
                )
            if layer not in self._told:
                self._told.add(layer)
                _log.debug("layer %d: %s", layer, Explanation(path, self.fused, layer, q_BHTD))
            if attended.lse_BHT is not None and self._observer is not None:
                weights = newest_weights(attended, store, q_BHTD, scale, cap)
                self._observer(layer, weights, range(store.length)[-1:])
            if logit_H is None or not q_BHTD.numel():
                return attended.out_BHTD
            assert attended.lse_BHT is not None, "a path without levels"
            share_BHT = dense.kept(attended.lse_BHT.float() * math.log(2), logit_H)
            return (attended.out_BHTD * share_BHT[..., None]).to(q_BHTD.dtype)
        raise AssertionError("the reference answers every query")

    @property
    def shared(self) -> list[Tensor]:
        """Tensors that do not grow with tokens."""
        return [*self.fused.shared, *self.absorbed.shared]
