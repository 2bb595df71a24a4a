"""Report how the blocks of a cache keep what calibration promised: as text, as JSON, and for Prometheus."""

from dataclasses import asdict, dataclass
from typing import Any

from kvq_runtime.store.promise import QUANTILES


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
    """How the blocks of a cache keep what calibration promised; `print` it, or read its fields.

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
            promised = f", promised {_spoken(one.promised)}: {one.beyond} beyond" if one.promised else ""
            lines.append(f"  layer {one.layer} {one.role}s: {one.blocks} blocks, error {_spoken(one.seen)}{promised}")
        return "\n".join(lines)

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
