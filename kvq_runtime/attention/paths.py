"""Ask the paths of a cache, in their order, and answer with what the first of them says.

paths of policies (`Policy.path`)  →  fused  →  long_query  →  reference
"""

import logging
import math
from collections.abc import Sequence

from torch import Tensor

from kvq_runtime.attention.fused import Fused
from kvq_runtime.attention.long_query import LongQuery
from kvq_runtime.attention.path import Observer, Path, Query, Reference, newest_weights
from kvq_runtime.ops import dense
from kvq_runtime.store.decode import Decoder

_log = logging.getLogger("kvq_runtime.cache")  # whose paths they are


class Paths:
    """The paths of one cache.

    own        of its policies, which answer before the others
    observer   takes the weights that queries give to tokens; None: nobody asks for them
    """

    def __init__(self, decoder: Decoder, fused: Fused, own: Sequence[Path], observer: Observer | None):
        self.fused, self.positions, self._observer = fused, fused.positions, observer
        self.reference = Reference(decoder, observer)
        self._plain = (*own, self.reference)  # of layers that no kernel reads
        self._indexed = (*own, fused, LongQuery(decoder, fused), self.reference)
        self._told: set[int] = set()  # layers whose path the log has

    def attend(self, query: Query, logit_H: Tensor | None) -> Tensor:
        """As `BlockCache.attend`."""
        store, q_BHTD, layer = query.store, query.q_BHTD, query.store.layer
        if logit_H is not None:
            self.reference.levels = True  # paths of the GPU say it anyway
        for path in self._plain if store.index is None else self._indexed:
            attended = path.attend(query)
            if attended is None:
                continue
            if self.positions.recorded and path is not self.fused:
                raise RuntimeError(
                    f"a step of {q_BHTD.shape[1]} query heads and {q_BHTD.shape[2]} tokens cannot be recorded: "
                    "it is not the kernel that attends, and what torch does is fixed to the tokens of this moment"
                )
            if layer not in self._told and _log.isEnabledFor(logging.DEBUG):
                self._told.add(layer)
                why = "" if path is self.fused else f"; Fused refuses: {self.fused.declined(query)}"
                _log.debug("layer %d: %s attends%s", layer, type(path).__name__, why)
            if attended.lse_BHT is not None and self._observer is not None:
                self._observer(store, newest_weights(query, attended.lse_BHT), range(store.length)[-1:])
            if logit_H is None or not q_BHTD.numel():
                return attended.out_BHTD
            assert attended.lse_BHT is not None, "a path without levels"
            share_BHT = dense.kept(attended.lse_BHT.float() * math.log(2), logit_H)
            return (attended.out_BHTD * share_BHT[..., None]).to(q_BHTD.dtype)
        raise AssertionError("the reference answers every query")

    @property
    def shared(self) -> list[Tensor]:
        """Tensors that do not grow with tokens."""
        return self.fused.shared
