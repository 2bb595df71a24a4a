"""Draw a grid of shares, 0 to 1, as a heat map with the figure in each cell: answers by length and depth."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvq_calib.report.frame import plain
from kvq_calib.report.page.html import Html, tag

CELL, HIGH, SIDE, HEAD = 62, 26, 60, 34


def answers(title: str, cells: Sequence[Mapping[str, Any]]) -> Html:
    """Accuracy by length, a row each, and depth, a column each; what was not asked stays empty."""
    lengths, depths = (sorted({one[name] for one in cells}) for name in ("length", "depth"))
    found = {(one["length"], one["depth"]): one["accuracy"] for one in cells}
    drawn = [tag("text", "tokens", x=SIDE - 8, y=HEAD - 6, text_anchor="end"),
             tag("text", "depth", x=SIDE, y=11)]  # fmt: skip
    for column, depth in enumerate(depths):
        drawn.append(tag("text", plain(depth), x=SIDE + (column + 0.5) * CELL, y=HEAD - 6, text_anchor="middle"))
    for row, length in enumerate(lengths):
        y = HEAD + row * HIGH
        drawn.append(tag("text", plain(length), x=SIDE - 8, y=y + 17, text_anchor="end"))
        for column, depth in enumerate(depths):
            share = found.get((length, depth))
            if share is not None:
                drawn += _cell(SIDE + column * CELL, y, min(max(share, 0.0), 1.0))
    wide, high = SIDE + CELL * len(depths), HEAD + HIGH * len(lengths)
    picture = tag("svg", drawn, viewBox=f"0 0 {max(wide, 360)} {high}", role="img", aria_label=title)
    return tag("figure", tag("figcaption", title), picture, class_="small")


def _cell(x: float, y: float, share: float) -> list[Html]:
    size = {"width": CELL - 2, "height": HIGH - 2, "rx": 2}
    box = tag("rect", x=x, y=y, class_="cell", fill_opacity=f"{0.06 + 0.94 * share:.3f}", **size)
    style = "on" if share > 0.55 else "ink"
    return [box, tag("text", f"{share:.0%}", x=x + CELL / 2 - 1, y=y + 17, text_anchor="middle", class_=style)]
