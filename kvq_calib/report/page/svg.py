"""Draw by layer: bars and lines, as SVG whose colours are classes of page.css, so that light and dark are one picture.

    scales   values → pixels       Frame   axes, ticks, labels of a picture 720 wide

Every mark says its value in a `<title>`, which a pointer shows.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvq_calib.report.frame import plain, short, ticks
from kvq_calib.report.page.html import Html, tag

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720, 76, 12, 8, 36
STROKES = ("solid", "dashed", "dotted")


@dataclass(frozen=True)
class Frame:
    """The inside of a picture: x and y place values, `marks` are its axes."""

    height: int
    x: Callable[[float], float]
    y: Callable[[float], float]
    marks: Sequence[Html]

    def draw(self, label: str, *children: Any) -> Html:
        """The picture; `label` is what a screen reader says."""
        box = f"0 0 {WIDTH} {self.height}"
        return tag("svg", *self.marks, *children, viewBox=box, role="img", aria_label=label)


def linear(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    """A scale from values to pixels."""
    return lambda value: begin + (end - begin) * (value - low) / ((high - low) or 1.0)


def logarithmic(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    """A logarithmic scale; values at or below 0 stand at its foot."""
    inner = linear(math.log10(low), math.log10(high), begin, end)
    return lambda value: inner(math.log10(max(value, low)))


def framed(
    x: tuple[float, float, Sequence[float]], y: tuple[float, float], height: int, xlabel: str, ylabel: str, log: bool,
    across: bool = False,
) -> Frame:  # fmt: skip
    """Axes of a picture.

    x        low, high and the values that have a tick
    y        low and high; logarithmic with `log`
    across   also vertical lines
    """
    foot, edge = height - BOTTOM, WIDTH - RIGHT
    along, up = linear(x[0], x[1], LEFT, edge), (logarithmic if log else linear)(y[0], y[1], foot, TOP)
    marks = []
    for value in ticks(y[0], y[1]) if log else even(*y):
        marks.append(tag("line", x1=LEFT, x2=edge, y1=up(value), y2=up(value), class_="grid"))
        marks.append(tag("text", short(value), x=LEFT - 6, y=up(value) + 4, text_anchor="end"))
    for value in x[2]:
        if across:
            marks.append(tag("line", x1=along(value), x2=along(value), y1=TOP, y2=foot, class_="grid"))
        marks.append(tag("text", plain(value), x=along(value), y=foot + 15, text_anchor="middle"))
    marks.append(tag("line", x1=LEFT, x2=edge, y1=foot, y2=foot, class_="axis"))
    marks.append(tag("text", xlabel, x=(LEFT + edge) / 2, y=height - 5, text_anchor="middle"))
    middle = (TOP + foot) / 2
    marks.append(tag("text", ylabel, x=12, y=middle, text_anchor="middle", transform=f"rotate(-90 12 {middle:g})"))
    return Frame(height, along, up, marks)


def even(low: float, high: float) -> list[float]:
    """Some four round numbers between two."""
    step = 10.0 ** math.floor(math.log10((high - low) or 1.0))
    step = next(part * step for part in (0.2, 0.5, 1, 2, 5) if (high - low) / (part * step) <= 6)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def layer_ticks(count: int) -> list[int]:
    """Numbers of layers that are written: at most some 16."""
    step = next(step for step in (1, 2, 4, 5, 8, 10, 16, 20, 50, 100, 1000) if count / step <= 16)
    return list(range(0, count, step))


def bars(rows: Sequence[Mapping[str, float]], names: Sequence[str], ylabel: str) -> Html:
    """A group of bars a layer, one bar a name; `rows` has a mapping a layer."""
    high = max((row[name] for row in rows for name in names), default=1.0) or 1.0
    frame = framed((-0.5, len(rows) - 0.5, layer_ticks(len(rows))), (0.0, high * 1.05), 210, "layer", ylabel, False)
    wide = min((frame.x(1) - frame.x(0)) * 0.8 / len(names), 28.0)
    drawn = []
    for layer, row in enumerate(rows):
        for place, name in enumerate(names):
            left = frame.x(layer) + (place - len(names) / 2) * wide
            title = tag("title", f"layer {layer}, {name}: {row[name]:.4g}")
            size = {"width": wide * 0.92, "height": frame.y(0) - frame.y(row[name])}
            drawn.append(tag("rect", title, x=left, y=frame.y(row[name]), class_=f"k{place}", **size))
    return tag("figure", key({name: (place, "") for place, name in enumerate(names)}), frame.draw(ylabel, drawn))


def lines(curves: Mapping[str, Sequence[float | None]], ylabel: str) -> Html:
    """A line a name over the layers, on a logarithmic axis; None and 0 leave a gap. At most seven can be told apart."""
    assert len(curves) <= 7, "more lines than can be told apart"
    known = [value for curve in curves.values() for value in curve if value]
    if not known:
        return tag("p", "Not measured.", class_="soft")
    low, high = min(known) / 1.3, max(known) * 1.3
    count = max(map(len, curves.values()))
    frame = framed((-0.5, count - 0.5, layer_ticks(count)), (low, high), 240, "layer", ylabel, True)
    drawn, looks = [], {}
    for place, (name, curve) in enumerate(curves.items()):
        looks[name] = place, STROKES[place % len(STROKES)]
        drawn.append(tag("path", d=_path(frame, curve), class_=f"curve k{place} {looks[name][1]}"))
        for layer, value in enumerate(curve):
            if value:
                title = tag("title", f"layer {layer}, {name}: {value:.3g}")
                drawn.append(tag("circle", title, cx=frame.x(layer), cy=frame.y(value), r=3, class_=f"k{place}"))
    return tag("figure", key(looks), frame.draw(ylabel, drawn))


def _path(frame: Frame, curve: Sequence[float | None]) -> str:
    parts, begun = [], False
    for layer, value in enumerate(curve):
        if value:
            parts.append(f"{'L' if begun else 'M'}{frame.x(layer):.1f} {frame.y(value):.1f}")
        begun = bool(value)
    return "".join(parts)


def key(looks: Mapping[str, tuple[int, str]]) -> Html:
    """What the colours and strokes mean: {name: (colour, stroke)}; without a stroke it is a filled square."""
    return tag("div", (_entry(name, *look) for name, look in looks.items()), class_="key")


def _entry(name: str, colour: int, stroke: str) -> Html:
    line = tag("path", d="M0 6H18", class_=f"curve k{colour} {stroke}")
    box = tag("rect", x=4, y=1, width=10, height=10, class_=f"k{colour}")
    return tag("span", tag("svg", line if stroke else box, viewBox="0 0 18 12", aria_hidden="true"), name)


def spark(values: Iterable[float | None], here: int | None = None) -> Html:
    """A small line of a value a version, on a logarithmic scale; a dot at `here`."""
    given = list(values)
    known = [value for value in given if value]
    if not known:
        return tag("span", "", class_="soft")
    up = logarithmic(min(known) / 1.15, max(known) * 1.15, 18, 2)
    along = linear(0, max(1, len(given) - 1), 4, 80)
    at = [(along(place), up(value)) for place, value in enumerate(given) if value]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
    drawn = [tag("path", d=path, class_="curve k0")] if len(at) > 1 else []
    value = given[here] if here is not None else None
    if here is not None and value:
        drawn.append(tag("circle", cx=along(here), cy=up(value), r=2.6, class_="k1"))
    elif len(at) == 1:
        drawn.append(tag("circle", cx=at[0][0], cy=at[0][1], r=2.6, class_="k0"))
    return tag("svg", *drawn, viewBox="0 0 84 20", class_="spark", aria_hidden="true")
