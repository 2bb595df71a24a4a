"""Decide whether what was measured is good enough to be published."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvq_runtime.registry.measured import SPOKEN, TextRecord
from kvq_runtime.registry.sound import read


@dataclass(frozen=True)
class Bounds:
    """Bounds on what an artifact costs; None: no bound.

    perplexity_ratio   held-out perplexity over that of the 16-bit model; above 1 it has got worse
    kl                 divergence from the 16-bit model, nats per token
    """

    perplexity_ratio: float | None = None
    kl: float | None = None

    def __post_init__(self):
        for name, bound in self.given.items():
            if not (math.isfinite(bound) and bound > 0):
                raise ValueError(f"--max-{name.replace('_', '-')} {bound}; use a number above 0")
        if self.perplexity_ratio is not None and self.perplexity_ratio < 1:
            raise ValueError(
                f"--max-perplexity-ratio {self.perplexity_ratio}: perplexity over that of 16 bit, which is the least "
                "that can be asked for; use a number of at least 1: 1.02 allows +2%"
            )

    @property
    def given(self) -> dict[str, float]:
        """The bounds that there are."""
        return {name: bound for name, bound in asdict(self).items() if bound is not None}


class Refused(RuntimeError):
    """Artifacts do not keep their bounds, and were not published; `done`: all that was made."""

    def __init__(self, done: Sequence[Any]):
        reasons = [f"{one.name} was not published. {reason}" for one in done for reason in one.failed]
        super().__init__("; ".join(reasons))
        self.done = list(done)


def passes(record: TextRecord, bounds: Bounds) -> list[str]:
    """Compare an evaluation record with bounds; return the reasons why it does not pass, none if it does.

    The full encode is judged where it was measured, else what was measured in use. A figure that is no number passes no
    bound, and neither does an evaluation in which nothing was decoded: it shows nothing about what is bounded.
    """
    if not bounds.given:
        return []
    if record.decisive is None:
        return [f"a bound cannot be judged; {'; '.join(record.reasons())}"]
    protocol, result = record.decisive
    if result.decoded is not None and result.decoded.reads == 0:
        return [f"a bound cannot be judged; {SPOKEN[protocol]}: nothing that was read had been encoded"]
    found = {"perplexity_ratio": 1 + result.relative, "kl": math.nan if result.kl is None else result.kl}
    named = {"perplexity_ratio": "perplexity over that of 16 bit", "kl": "KL divergence, nats"}
    return [
        f"{named[name]}, {SPOKEN[protocol]}: {found[name]:.6g}, allowed {bound:.6g}"
        for name, bound in bounds.given.items()
        if not found[name] <= bound
    ]


def judged(record: Mapping[str, Any], bounds: Bounds) -> dict[str, Any]:
    """The record's JSON with bounds and verdict in its result; without bounds, itself."""
    if not bounds.given:
        return dict(record)
    found = read(record, TextRecord)
    decisive = None if found.decisive is None else found.decisive[0]
    verdict = {"bounds": bounds.given, "protocol": decisive, "failed": passes(found, bounds)}
    return {**record, "result": {**record["result"], "gate": verdict}}
