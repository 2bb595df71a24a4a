"""Try the paths of a cache in their order; the first that takes the queries answers them.

paths of policies (`Policy.path`)  →  fused  →  long_query  →  reference
"""

import math
from collections.abc import Sequence

from torch import Tensor

from kvq_runtime.attention.fused import Fused
from kvq_runtime.attention.long_query import LongQuery
from kvq_runtime.attention.path import Observer, Path, Query, Reference, newest_weights
from kvq_runtime.ops import dense
from kvq_runtime.store.decode import Decoder


class Paths:
    """The paths of one cache.

    chosen     of its policies, which answer before the others
    observer   takes the weights that queries give to tokens; None: nothing needs them
    """

    def __init__(self, decoder: Decoder, fused: Fused, chosen: Sequence[Path], observer: Observer | None):
        self.fused, self.positions, self._observer = fused, fused.positions, observer
        self.reference = Reference(decoder, observer)
        self._plain = (*chosen, self.reference)  # of layers that no kernel reads
        self._indexed = (*chosen, fused, LongQuery(decoder, fused), self.reference)

    def attend(self, query: Query, logit_H: Tensor | None) -> Tensor:
        """As `BlockCache.attend`."""
        store = query.store
        if logit_H is not None:
            self.reference.levels = True  # paths of the GPU say it anyway
        for path in self._plain if store.index is None else self._indexed:
            attended = path.attend(query)
            if attended is not None:
                break
        else:
            raise AssertionError("the reference answers every query")
        out_BHTD, lse_BHT = attended
        if self.positions.recorded and path is not self.fused:
            raise RuntimeError(
                f"a step of {out_BHTD.shape[1]} query heads and {out_BHTD.shape[2]} tokens cannot be recorded: "
                "it is not the kernel that attends, and what torch does is fixed to the tokens of this moment"
            )
        if lse_BHT is not None and self._observer is not None:
            self._observer(store, newest_weights(query, lse_BHT), range(store.length)[-1:])
        if logit_H is None or not out_BHTD.numel():
            return out_BHTD
        assert lse_BHT is not None, "a path without levels"
        share_BHT = dense.kept(lse_BHT.float() * math.log(2), logit_H)
        return (out_BHTD * share_BHT[..., None]).to(out_BHTD.dtype)
