"""Read the points of a picture from records: bits, cost and standard error of each, and which are the frontier."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvq_calib.report.tables import attention_error, standard_error
from kvq_runtime.registry.measured import Figures, TextRecord

# what README.md recommends where bits may differ by layer: marked where it was measured
RECOMMENDED = ("auto-2.1bit",)
KL, PERPLEXITY, ATTENTION = "kl", "relative", "attention"


@dataclass(frozen=True)
class Point:
    """A recipe's cost at its bits.

    spread   standard error of the cost over windows; None: not known
    tail     bits of a whole cache of 4096 tokens; None: not asked for
    here     whether it is what the picture is about
    """

    recipe: str
    name: str
    bits: float
    cost: float
    spread: float | None = None
    tail: float | None = None
    here: bool = False


def points(records: Sequence[TextRecord], measure: str, protocol: str, tail: str = "") -> list[Point]:
    """The points of one panel, in the order of the records; those without figures are left out.

    measure   KL in nats; PERPLEXITY above that of 16 bit, in percent; ATTENTION, the relative error of its output
    tail      which bits of the record a line to the right ends at
    """
    found = []
    for record in records:
        part, bits = record.figures(protocol), record.result.bits
        if part is None:
            continue
        cost, spread = _cost(record, part, measure, protocol)
        if cost is not None:
            end = bits[tail] if tail else None
            found.append(Point(record.result.recipe, record.name, bits["asymptotic"], cost, spread, end))
    return found


def _cost(record: TextRecord, part: Figures, measure: str, protocol: str) -> tuple[float | None, float | None]:
    """The cost and its standard error."""
    if measure == ATTENTION:
        return attention_error(record, protocol), None
    if measure == KL:
        return part.kl, kl_error(part)
    spread = standard_error(part)
    return 100 * part.relative, None if spread is None else 100 * spread


def kl_error(part: Figures) -> float | None:
    """The standard error of a divergence over windows; None for fewer than three, or where they were not kept."""
    kls = () if part.windows is None else part.windows.kl
    if len(kls) < 3:
        return None
    mean = sum(kls) / len(kls)
    return math.sqrt(sum((one - mean) ** 2 for one in kls) / (len(kls) - 1) / len(kls))


def frontier(given: Sequence[Point]) -> list[Point]:
    """The points that no other one beats, by ascending bits: another has more bits, or costs more.

    Of points with equal bits and cost the first counts.
    """
    found: list[Point] = []
    for one in sorted(given, key=lambda one: (one.bits, one.cost)):
        if not found or one.cost < found[-1].cost:
            found.append(one)
    return found


def not_drawn(names: Iterable[str]) -> str:
    """A sentence on what has no divergence, and so no mark; empty where there is no such thing."""
    said = ", ".join(dict.fromkeys(names))
    return f"Not drawn, for their divergence was not measured: {said}." if said else ""


def recommended(given: Sequence[Point]) -> Point | None:
    """The point of our recommendation, if it was measured."""
    known = {one.recipe: one for one in given}
    return next((known[name] for name in RECOMMENDED if name in known), None)


def by_bits(records: Sequence[TextRecord]) -> list[TextRecord]:
    """Records in the order of their asymptotic bits, then of their divergence; those without one last."""

    def order(one: TextRecord) -> tuple[float, float]:
        cost = None if one.decisive is None else one.decisive[1].kl
        return one.result.bits["asymptotic"], math.inf if cost is None else cost

    return sorted(records, key=order)
