"""Measure the errors of a layer's blocks as they are encoded, and keep the exact tokens of those beyond their promise.

A block beyond stays exact beside its codes, as sinks do beside theirs: queries read its tokens, layers above are
predicted from its codes, as they were fitted to.

Shapes: N blocks, B rows; the digit in a shape counts keys and values.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.codec.per_row import RowCodec
from kvq_runtime.geometry import ROLES
from kvq_runtime.store.health import LayerHealth
from kvq_runtime.store.promise import Check, block_errors, own_spread, quantiles
from kvq_runtime.store.storage import storage_bytes


class Watch:
    """The errors of one layer's blocks, and the exact tokens of those that are beyond.

    keeps   whether these are kept: not where a kernel or a policy reads codes alone
    exact   by block, of keys and of values, [B, block, C]; of all rows, if one is beyond
    """

    def __init__(self, check: Check, layer: int, keeps: bool):
        self.layer, self.keeps, self.strict = layer, keeps, check.strict
        self.promises = tuple(check.promises.get((layer, role)) for role in (0, 1))
        self.exact: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})
        self._errors: list[Tensor] = []  # of each block [2, B]: NaN if it was encoded elsewhere, infinite if beyond

    def errors(
        self, codec: Codec | RowCodec, x_NTC: Tensor, context: Context, decoded_NTC: Tensor, counted_NT: Tensor | None
    ) -> Tensor:
        """The errors of blocks as the codec takes them, which it decodes, centred, to this: [N]."""
        gap_NTC = x_NTC.float() - decoded_NTC.float()
        gap_NTC = gap_NTC if codec.predictor is None else gap_NTC - codec.mean(context)
        promise = self.promises[ROLES.index(codec.role)]
        spread = own_spread(x_NTC.float(), counted_NT).clamp(min=1e-30) if promise is None else promise.spread
        return (block_errors(gap_NTC, counted_NT) / spread).nan_to_num(math.inf, math.inf)

    def beyond(self, errors_2BN: Tensor, first: int) -> list[tuple[int, int]]:
        """(role, block) of those beyond, of blocks from `first` on. RuntimeError if there are, and none may be."""
        if self.promises == (None, None):
            return []
        found = []
        for role, (promise, errors_NB) in enumerate(zip(self.promises, errors_2BN.mT.tolist(), strict=True)):
            for number, errors_B in enumerate(errors_NB):
                if promise is None or max(errors_B, default=0.0) <= promise.bound:
                    continue
                if self.strict:
                    raise RuntimeError(
                        f"layer {self.layer}, block {first + number}: the error of its {ROLES[role]}s is "
                        f"{max(errors_B):.3g} of their spread, calibration promised at most {promise.bound:.3g}; "
                        "without strict=True it is kept exact"
                    )
                found.append((role, first + number))
        return found

    def add(self, errors_2BN: Tensor, first: int, window_2BTC: Tensor, block: int) -> bool:
        """Take in the oldest blocks of a window, from number `first` on; True if any is beyond."""
        beyond = self.beyond(errors_2BN, first)
        self.truncate(first)  # of a pass that was undone before its block was there
        self._errors += errors_2BN.unbind(2)
        for role, number in beyond if self.keeps else ():
            start = (number - first) * block
            self.exact[role][number] = window_2BTC[role, :, start : start + block].clone()
        return bool(beyond)

    def adopt(self, count: int, exact: tuple[dict[int, Tensor], dict[int, Tensor]], rows: int) -> None:
        """Begin with blocks that were encoded elsewhere, some of them with their exact tokens; told, where codes alone
        are read, and not held."""
        self.exact = exact if self.keeps else ({}, {})
        self._errors = [torch.full((2, rows), math.nan) for _ in range(count)]
        for role, blocks in enumerate(exact):
            for number in blocks:
                self._errors[number][role] = math.inf

    def truncate(self, blocks: int) -> None:
        """Keep the first `blocks` blocks."""
        del self._errors[blocks:]
        for exact in self.exact:
            for number in [number for number in exact if number >= blocks]:
                del exact[number]

    def reorder(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        self._errors = [errors.index_select(1, rows.to(errors.device)) for errors in self._errors]
        self.exact = tuple({n: x.index_select(0, rows) for n, x in exact.items()} for exact in self.exact)  # type: ignore[assignment]

    def put(self, role: int, out_BTC: Tensor, first: int, block: int) -> None:
        """Write the exact tokens of blocks over what was decoded of blocks from number `first` on."""
        for number, x_BTC in self.exact[role].items():
            start = (number - first) * block
            if 0 <= start < out_BTC.shape[1]:
                out_BTC[:, start : start + block] = x_BTC

    def bytes(self) -> dict[str, int]:
        """Allocated bytes by kind."""
        exact = storage_bytes(x for blocks in self.exact for x in blocks.values())
        return {"errors": storage_bytes(self._errors), "beyond": exact}

    def health(self) -> Iterator["LayerHealth"]:
        """Of keys and of values."""
        errors_2NB = torch.stack([one.cpu() for one in self._errors], 1).tolist() if self._errors else [[], []]
        for role, (promise, blocks) in enumerate(zip(self.promises, errors_2NB, strict=True)):
            errors = [error for row in blocks for error in row]
            beyond = sum(error > promise.bound for error in errors) if promise is not None else 0
            seen = quantiles([error for error in errors if math.isfinite(error)])
            promised, bound = (promise.quantiles, promise.bound) if promise is not None else ((), None)
            yield LayerHealth(self.layer, ROLES[role], len(errors), beyond, seen, promised, bound)
