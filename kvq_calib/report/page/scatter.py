"""Draw losses against bits: a marker a recipe, the frontier, our recommendation ringed, names where they are free."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvq_calib.report.looks import Look, family, looks
from kvq_calib.report.page import marks
from kvq_calib.report.page.html import Html, tag
from kvq_calib.report.page.naming import Name, around, steps, written
from kvq_calib.report.page.svg import BOTTOM, RIGHT, WIDTH, Frame, even, framed
from kvq_calib.report.points import RECOMMENDED

HEIGHT = 360
FAMILIES = 10  # that have a look of their own in a picture; of more, the rarest are drawn alike
OTHER = Look("#808080", "o")
Point = Mapping[str, Any]


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points with less divergence than every one of as few bits, by bits."""
    found: list[Point] = []
    for one in sorted(points, key=lambda one: (one["bits"], one["kl"])):
        if not found or one["kl"] < found[-1]["kl"]:
            found.append(one)
    return found


def losses_by_bits(points: Sequence[Point], stairs: bool = True, named: Sequence[Point] | None = None) -> Html:
    """KL divergence against bits, of points {"name", "recipe", "bits", "kl", "kl_se", "this"}.

    stairs   with the frontier: points of one model and text
    named    those whose names are written if there is room; None: this version, the recommended one and the frontier
    """
    drawn = [one for one in points if one["kl"] > 0 and one["bits"] < 16]
    if not drawn:
        return tag("p", "Nothing to draw: all are exact.", class_="soft")
    looked, shown = _looks(drawn)
    frame = _frame(drawn)
    best = frontier(drawn) if stairs and len(drawn) > 1 else []
    ours = next((one for name in RECOMMENDED for one in drawn if one["recipe"] == name), None) if stairs else None
    whiskers = [_whisker(frame, one, look) for one, look in zip(drawn, looked, strict=True) if one.get("kl_se")]
    dots = [
        marks.marker(look, frame.x(one["bits"]), frame.y(one["kl"]), tag("title", _said(one)))
        for one, look in zip(drawn, looked, strict=True)
    ]
    rings = [_ring(frame, one) for one in drawn if one.get("this") or one is ours]
    wanted = [*(one for one in drawn if one.get("this")), *([ours] if ours else []), *best] if named is None else named
    names = _names(frame, drawn, list({id(one): one for one in wanted}.values()), ours, best)
    picture = frame.draw("KL divergence against bits per element", _stairs(frame, best), whiskers, dots, rings, names)
    return tag("figure", _key(shown), picture)


def _looks(drawn: Sequence[Point]) -> tuple[list[Look], dict[str, Look]]:
    """A look a point, and what the key says: the families of this version and of the frontier, those that are met most,
    and the others as one."""
    recipes = [one["recipe"] for one in drawn]
    first = [*(one for one in drawn if one.get("this")), *frontier(drawn)]
    often = [
        *(family(one["recipe"]) for one in first),
        *(name for name, _ in Counter(map(family, recipes)).most_common()),
    ]
    often = list(dict.fromkeys(often))[:FAMILIES]
    given = dict(zip(map(family, recipes), looks(recipes), strict=True))
    shown = {name: given[name] for name in sorted(often)}
    found = [shown.get(family(recipe), OTHER) for recipe in recipes]
    return found, shown | ({"others": OTHER} if any(look is OTHER for look in found) else {})


def _frame(drawn: Sequence[Point]) -> Frame:
    bits, losses = [one["bits"] for one in drawn], [one["kl"] for one in drawn]
    room = max(0.15 * (max(bits) - min(bits)), 0.4)
    low, high = max(0.0, min(bits) - room), max(bits) + room
    return framed((low, high, even(low, high)), (min(losses) / 1.8, max(losses) * 1.8), HEIGHT,
                  "bits per key or value element, asymptotic", "KL divergence, nats per token", True, True)  # fmt: skip


def _stairs(frame: Frame, best: Sequence[Point]) -> list[Html]:
    if not best:
        return []
    path = f"M{frame.x(best[0]['bits']):.1f} {frame.y(best[0]['kl']):.1f}"
    path += "".join(f"H{frame.x(one['bits']):.1f}V{frame.y(one['kl']):.1f}" for one in best[1:]) + f"H{WIDTH - RIGHT}"
    return [tag("path", tag("title", "the frontier"), d=path, class_="stairs")]


def _whisker(frame: Frame, one: Point, look: Look) -> Html:
    x, spread = frame.x(one["bits"]), one["kl_se"]
    ends = frame.y(one["kl"] + spread), frame.y(max(one["kl"] - spread, 0.1 * one["kl"]))
    return tag("line", x1=x, x2=x, y1=ends[0], y2=min(ends[1], HEIGHT - BOTTOM), class_=f"whisker {marks.ink(look)}")


def _ring(frame: Frame, one: Point) -> Html:
    return tag("circle", cx=frame.x(one["bits"]), cy=frame.y(one["kl"]), r=10, class_="ring")


def _names(
    frame: Frame, drawn: Sequence[Point], wanted: Sequence[Point], ours: Point | None, best: Sequence[Point]
) -> list[Html]:
    """Names beside their points where nothing is in the way."""
    rings = {id(one): one.get("this") or one is ours for one in drawn}
    taken = [around(*_at(frame, one), 11 if rings[id(one)] else 6) for one in drawn]
    taken += steps([_at(frame, one) for one in best])
    given = []
    for one in wanted:
        said = " (this version)" if one.get("this") else " (recommended)" if one is ours else ""
        given.append(Name(*_at(frame, one), name(one)[:48] + said, bool(said)))
    return written(given, taken, HEIGHT)


def _at(frame: Frame, one: Point) -> tuple[float, float]:
    return frame.x(one["bits"]), frame.y(one["kl"])


def _said(one: Point) -> str:
    spread = f" ± {one['kl_se']:.2g}" if one.get("kl_se") else ""
    return f"{name(one)}: {one['bits']:.3g} bits, {one['kl']:.3g}{spread} nats"


def name(one: Point) -> str:
    """What a point is called."""
    return f"{one['name']}@{one['version']}" if one.get("version") else str(one["name"])


def _key(shown: Mapping[str, Look]) -> Html:
    entries = (
        tag("span", tag("svg", marks.marker(look, 9, 6), viewBox="0 0 18 12", aria_hidden="true"), name)
        for name, look in shown.items()
    )
    return tag("div", entries, class_="key")
