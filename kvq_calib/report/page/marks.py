"""Draw a family's marker as SVG, in the colour and shape that `kvq_calib/report/looks.py` gives it in every picture."""

import math
from collections.abc import Sequence
from typing import Any

from kvq_calib.report import looks
from kvq_calib.report.looks import Look
from kvq_calib.report.page.html import Html, tag

# classes k0, k1, ... of page.css stand for these, in this order, with a lighter one each for the dark
COLOURS = (*looks.COLOURS, looks.WINE, looks.OLIVE, looks.INDIGO, looks.GREY)
R = 5.0  # pixels from a marker's middle to its edge


def marker(look: Look, x: float, y: float, *children: Any) -> Html:
    """A marker at a place; children are its title."""
    return tag("path", *children, d=_path(look.marker, x, y), class_=f"k{COLOURS.index(look.colour)}")


def ink(look: Look) -> str:
    """The class of its colour."""
    return f"k{COLOURS.index(look.colour)}"


def _path(kind: str, x: float, y: float) -> str:
    if kind == "o":
        return f"M{x - R:.1f} {y:.1f}a{R} {R} 0 1 0 {2 * R} 0a{R} {R} 0 1 0 {-2 * R} 0Z"
    return "M" + "L".join(f"{x + R * across:.1f} {y - R * up:.1f}" for across, up in _SHAPES[kind]) + "Z"


def _ring(points: int, size: float = 1.0, turn: float = 90.0) -> list[tuple[float, float]]:
    angles = [math.radians(turn + 360 * place / points) for place in range(points)]
    return [(size * math.cos(angle), size * math.sin(angle)) for angle in angles]


def _star() -> list[tuple[float, float]]:
    outer, inner = _ring(5, 1.4), _ring(5, 0.6, 126)
    return [place for pair in zip(outer, inner, strict=True) for place in pair]


def _cross(turned: bool) -> list[tuple[float, float]]:
    a, b = 0.38, 1.1
    plus = [(-a, b), (a, b), (a, a), (b, a), (b, -a), (a, -a), (a, -b), (-a, -b), (-a, -a), (-b, -a), (-b, a), (-a, a)]
    half = math.sqrt(0.5)
    return [((x - y) * half, (x + y) * half) for x, y in plus] if turned else plus


_SHAPES: dict[str, Sequence[tuple[float, float]]] = {
    "s": [(-0.9, 0.9), (0.9, 0.9), (0.9, -0.9), (-0.9, -0.9)],
    "D": [(0, 1.2), (1.2, 0), (0, -1.2), (-1.2, 0)],
    "d": [(0, 1.3), (0.75, 0), (0, -1.3), (-0.75, 0)],
    "^": [(0, 1.1), (1.1, -0.9), (-1.1, -0.9)],
    "v": [(0, -1.1), (1.1, 0.9), (-1.1, 0.9)],
    "<": [(-1.1, 0), (0.9, 1.1), (0.9, -1.1)],
    ">": [(1.1, 0), (-0.9, 1.1), (-0.9, -1.1)],
    "*": _star(),
    "p": _ring(5, 1.15),
    "h": _ring(6, 1.1),
    "P": _cross(False),
    "X": _cross(True),
}
