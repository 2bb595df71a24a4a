"""State the errors of blocks that a calibration saw, as an artifact's promise; measure and report those of a cache.

    error     mean |x - x̂|² of a block's tokens, padding and exact sinks left out, over a spread: mean |x - μ|²
    promise   by layer, of keys and of values: the spread of the tokens that the fit was measured on (those that it held
              out, if it did), and quantiles of the errors of their blocks
    beyond    an error of more than MARGIN times the quantile AT of that

Without a promise the spread is that of the block itself, and nothing is beyond. A block beyond stays exact beside its
codes, as sinks do beside theirs: queries read its tokens, layers above are predicted from its codes, as they were
fitted to. Files keep its codes alone.

Shapes: N blocks, B rows; the digit in a shape counts keys and values.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.codec.shared import RowCodec
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import ROLES
from kvq_runtime.store.storage import storage_bytes

QUANTILES = (0.5, 0.9, 0.99, 1.0)  # that are stored and shown
AT, MARGIN = 2, 1.25  # of these the third, and how many times that is kept
LEAST = 1e-4  # of the spread: an error below it is beyond nothing


def block_errors(gap_NTC: Tensor, counted_NT: Tensor | None = None) -> Tensor:
    """Mean |gap|² of the tokens of each block that count, float32 [N]; 0 for a block of which none does."""
    if counted_NT is None:
        return torch.linalg.vector_norm(gap_NTC.float(), dim=(1, 2)).square() / gap_NTC.shape[1]
    tokens_NT = gap_NTC.float().square().sum(2).where(counted_NT, 0.0)
    return tokens_NT.sum(1) / counted_NT.sum(1).clamp(min=1)


def own_spread(x_NTC: Tensor, counted_NT: Tensor | None = None) -> Tensor:
    """Mean |x - μ|² of each block about its own mean, likewise."""
    if counted_NT is None:
        return x_NTC.var(1, correction=0).sum(1)
    count_N11 = counted_NT.sum(1).clamp(min=1)[:, None, None]
    return block_errors(x_NTC - (x_NTC * counted_NT[..., None]).sum(1, keepdim=True) / count_N11, counted_NT)


def quantiles(errors: Sequence[float]) -> tuple[float, ...]:
    """Those of QUANTILES: of n errors the ⌈q n⌉-th smallest. () of none."""
    ranked = sorted(errors)
    return tuple(ranked[math.ceil(q * len(ranked)) - 1] for q in QUANTILES) if ranked else ()


@dataclass(frozen=True)
class Promise:
    """The errors of keys, or of values, of a layer in calibration: a spread, and quantiles over so many blocks."""

    spread: float
    blocks: int
    quantiles: tuple[float, ...]

    @staticmethod
    def of(errors_N: Tensor, spread: float) -> "Promise":
        """From `block_errors`, and the mean |x - μ|² of a token; numbers are rounded to four digits."""
        unit = _short(spread)
        return Promise(unit, len(errors_N), quantiles([_short(error / unit) for error in errors_N.tolist()]))

    @staticmethod
    def read(stated: Any) -> "Promise":
        """From an artifact's JSON. Raises ArtifactError for what is no promise."""
        ranked = stated.get("quantiles") if isinstance(stated, Mapping) else None
        numbers = [stated["spread"], *ranked] if isinstance(ranked, list) and "spread" in stated else []
        good = all(isinstance(one, (int, float)) and 0 <= one < 1e300 for one in numbers)
        if len(numbers) != 1 + len(QUANTILES) or not good or not numbers[0] or type(stated.get("blocks")) is not int:
            raise ArtifactError(f"fit: promise {stated!r:.80}; a spread above 0, blocks, {len(QUANTILES)} quantiles")
        return Promise(numbers[0], stated["blocks"], tuple(numbers[1:]))

    @property
    def bound(self) -> float:
        """The error from which on a block is beyond."""
        return max(LEAST, MARGIN * self.quantiles[AT])


def _short(x: float) -> float:
    return float(f"{x:.4g}")


@dataclass(frozen=True)
class Check:
    """The demands on the blocks of a cache.

    promises   by layer, and keys (0) or values (1)
    strict     whether a block beyond is an error
    counts     whether blocks beyond are counted alone: no error, not told of in the log, and not kept exact
    """

    promises: Mapping[tuple[int, int], Promise] = field(default_factory=dict)
    strict: bool = False
    counts: bool = False

    @staticmethod
    def of(fit: Mapping[str, Any], name: str = "", strict: bool = False) -> "Check":
        """From what an artifact's fit measured. Raises ValueError where `strict` has no promise to go by."""
        layers = fit.get("layers", ())
        found = {
            (layer, role): Promise.read(measures[name]["promise"])
            for layer, measures in enumerate(layers if isinstance(layers, Sequence) else ())
            for role, name in enumerate(ROLES)
            if isinstance(measures, Mapping) and isinstance(measures.get(name), Mapping) and "promise" in measures[name]
        }
        if strict and not found:
            who = name or "the artifact"
            raise ValueError(f"strict=True, but {who} promises nothing; new artifacts do, at the bits of their fit")
        return Check(found, strict)


@dataclass(frozen=True)
class LayerHealth:
    """The blocks of keys, or of values, of a layer, each row's own.

    seen, promised   quantiles of their errors, and of those in calibration: of each of QUANTILES; () if there are none
    bound            the error from which on a block is beyond; None: nothing is promised
    """

    layer: int
    role: str
    blocks: int
    beyond: int
    seen: tuple[float, ...]
    promised: tuple[float, ...]
    bound: float | None


@dataclass(frozen=True)
class Health:
    """The health of a cache's blocks, by what calibration promised; `print` it, or read its fields.

    layers   a row for keys and one for values of each layer that has blocks; none if nothing is measured
    """

    recipe: str
    layers: tuple[LayerHealth, ...]

    @property
    def blocks(self) -> int:
        """Blocks of keys and of values, of all layers and rows."""
        return sum(one.blocks for one in self.layers)

    @property
    def beyond(self) -> int:
        """Those of them that are beyond."""
        return sum(one.beyond for one in self.layers)

    @property
    def promised(self) -> bool:
        """True if there is a promise to compare with."""
        return any(one.promised for one in self.layers)

    @property
    def worst(self) -> LayerHealth:
        """The row with the largest share of blocks beyond. ValueError where there are no rows."""
        return max(self.layers, key=lambda one: one.beyond / max(1, one.blocks))

    def as_dict(self) -> dict[str, Any]:
        """All fields as plain numbers, text, lists and dicts, for JSON."""
        return asdict(self) | {"quantiles": QUANTILES, "blocks": self.blocks, "beyond": self.beyond}

    def __str__(self) -> str:
        if not self.layers:
            return f"{self.recipe}: no block has been encoded, or none is measured"
        said = f"{self.beyond:,} of {self.blocks:,} blocks are beyond what calibration promised"
        lines = [f"{self.recipe}: {said if self.promised else 'nothing is promised: no artifact says what to expect'}"]
        for one in self.layers:
            promised = ""
            if one.promised:
                promised = f", promised {_spoken(one.promised)}: {one.beyond} beyond the limit of {one.bound:.3g}"
            lines.append(f"  layer {one.layer} {one.role}s: {one.blocks} blocks, error {_spoken(one.seen)}{promised}")
        return "\n".join(lines)

    def warning(self, kept: bool) -> str:
        """A sentence on the blocks that are beyond, of which there are some; `kept`: their tokens are exact."""
        worst = self.worst
        return (
            f"{self.recipe}: {str(self).split(chr(10))[0].partition(': ')[2]}; most in layer {worst.layer}, "
            f"{worst.beyond} of {worst.blocks} blocks of its {worst.role}s, error up to "
            f"{max(worst.seen, default=math.inf):.3g} where {worst.bound:.3g} is promised. A few are what the blocks "
            "that the fit held out did not show; many, another text, or model, than the fit's. They are "
            f"{'kept exact' if kept else 'held as they are'}; cache.health() has all layers"
        )

    def prometheus(self) -> str:
        """The same as Prometheus' text, gauges of what the cache holds."""
        lines = []
        for name, about, values in (
            ("blocks", "Encoded blocks of a cache.", lambda one: [("", one.blocks)]),
            ("blocks_beyond", "Blocks whose error is beyond the promise.", lambda one: [("", one.beyond)]),
            ("block_error", "Quantiles of errors of blocks.", lambda one: _labelled(one.seen)),
            ("block_error_promised", "Those of calibration.", lambda one: _labelled(one.promised)),
        ):
            lines += [f"# HELP kvq_{name} {about}", f"# TYPE kvq_{name} gauge"]
            for one in self.layers:
                of = f'recipe="{self.recipe}",layer="{one.layer}",role="{one.role}"'
                lines += [f"kvq_{name}{{{of}{label}}} {value:.6g}" for label, value in values(one)]
        return "\n".join(lines) + "\n"


def _labelled(found: tuple[float, ...]) -> list[tuple[str, float]]:
    return [(f',quantile="{q:g}"', value) for q, value in zip(QUANTILES, found, strict=False)]


def _spoken(found: tuple[float, ...]) -> str:
    """The median and the largest."""
    return f"{found[0]:.3g} to {found[-1]:.3g}" if found else "not known"


Exact = tuple[dict[int, Tensor], dict[int, Tensor]]  # tokens of blocks by number, of keys and of values, [B, block, C]


class Watch:
    """The errors of one layer's blocks, and the exact tokens of those that are beyond.

    keeps   whether these are kept: not where a kernel or a policy reads codes alone
    exact   of all rows, if one is beyond
    """

    def __init__(self, check: Check, layer: int, keeps: bool):
        self.layer, self.keeps, self.check = layer, keeps and not check.counts, check
        self.promises = tuple(check.promises.get((layer, role)) for role in (0, 1))
        self.exact: Exact = ({}, {})
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
        if self.check.counts or self.promises == (None, None):
            return []
        found = []
        for role, (promise, errors_NB) in enumerate(zip(self.promises, errors_2BN.mT.tolist(), strict=True)):
            for number, errors_B in enumerate(errors_NB):
                if promise is None or max(errors_B, default=0.0) <= promise.bound:
                    continue
                if self.check.strict:
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

    def adopt(self, count: int, rows: int) -> None:
        """Begin with blocks that were encoded elsewhere, whose errors are not known."""
        self._errors = [torch.full((2, rows), math.nan, dtype=torch.float32) for _ in range(count)]

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

    def health(self) -> Iterator[LayerHealth]:
        """Of keys and of values."""
        errors_2NB = torch.stack([one.cpu() for one in self._errors], 1).tolist() if self._errors else [[], []]
        for role, (promise, blocks) in enumerate(zip(self.promises, errors_2NB, strict=True)):
            errors = [error for row in blocks for error in row]
            beyond = sum(error > promise.bound for error in errors) if promise is not None else 0
            seen = quantiles([error for error in errors if math.isfinite(error)])
            promised, bound = (promise.quantiles, promise.bound) if promise is not None else ((), None)
            yield LayerHealth(self.layer, ROLES[role], len(errors), beyond, seen, promised, bound)
