"""Write names beside points where nothing is in the way, the nearest free place first; a line leads to a far one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvq_calib.report.page.html import Html, tag
from kvq_calib.report.page.svg import BOTTOM, LEFT, RIGHT, TOP, WIDTH

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels
LETTER, LINE = 6.1, 13.0  # pixels of a letter, and of a line of text
GAPS = (9, 15, 26, 40, 58, 80, 110, 150)  # from a point to its name
LED = 15  # the gap from which a line leads there
TURNS = [math.radians(degrees) for degrees in (0, 180, 90, 270, *range(30, 360, 30), *range(15, 360, 30))]


@dataclass(frozen=True)
class Name:
    """A point, its name, and whether it is one that a reader looks for first: it has a ring."""

    x: float
    y: float
    text: str
    first: bool


def around(x: float, y: float, size: float) -> Box:
    """The box of a marker, or of its ring."""
    return x - size, y - size, x + size, y + size


def steps(at: Sequence[tuple[float, float]]) -> list[Box]:
    """The boxes of a frontier's stairs through these points, to the edge."""
    ends = [*at[1:], (float(WIDTH - RIGHT), at[-1][1])] if at else []
    flat = [(x, y - 2, right, y + 2) for (x, y), (right, _) in zip(at, ends, strict=True)]
    return flat + [(right - 2, y, right + 2, below) for (_, y), (right, below) in zip(at, ends, strict=True)]


def written(names: Sequence[Name], taken: Sequence[Box], height: int) -> list[Html]:
    """The names, in this order: one that finds no place is left out.

    taken    boxes that no name may lie on
    height   of the picture
    """
    busy, found = list(taken), []
    for one in names:
        place = next((place for place in _places(one) if _free(place[0], busy, height)), None)
        if place is None:
            continue
        box, gap = place
        busy.append(box)
        if gap > LED:
            end = min(max(one.x, box[0]), box[2]), min(max(one.y, box[1]), box[3])
            found.append(tag("line", x1=one.x, y1=one.y, x2=end[0], y2=end[1], class_="tail"))
        style = "ink strong" if one.first else "ink"
        found.append(tag("text", one.text, x=box[0], y=box[3] - 3, class_=style))
    return found


def _places(one: Name) -> list[tuple[Box, int]]:
    """Boxes for a name with their gaps: the side that faces the point is at the gap."""
    wide, found = LETTER * len(one.text), []
    for gap in GAPS if not one.first else GAPS[1:]:
        for turn in TURNS:
            across, up = round(math.cos(turn), 6), round(math.sin(turn), 6)
            x, y = one.x + across * (gap + wide / 2), one.y - up * (gap + LINE / 2)
            found.append(((x - wide / 2, y - LINE / 2, x + wide / 2, y + LINE / 2), gap))
    return found


def _free(box: Box, taken: Sequence[Box], height: int) -> bool:
    if box[0] < LEFT + 2 or box[2] > WIDTH - 2 or box[1] < TOP or box[3] > height - BOTTOM:
        return False
    return all(box[0] > b[2] or box[2] < b[0] or box[1] > b[3] or box[3] < b[1] for b in taken)
