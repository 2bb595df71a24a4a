"""Fill the templates of pages, draw their pictures: nothing that a registry holds becomes markup, a page loads nothing.

Jinja escapes every value that is not Markup; our own files and pictures alone are. A page allows its own style and
script alone, by their digests (Content-Security-Policy): whatever slipped through would neither run nor be fetched.
Style attributes are not allowed either; colours are classes, so that light and dark are one page.

Pictures are SVG without a style or an address outside. Their colours become variables of page.css; other colours stay.
What `looks.say` says of a mark is its `<title>`, which a pointer shows. The same figure and label give the same text,
and identifiers differ by label.
"""

import base64
import hashlib
import io
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, lru_cache, wraps
from importlib.resources import files
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from kvq_calib.report.answered import grid
from kvq_calib.report.fit_plots import layer_bits
from kvq_calib.report.looks import BLUE, COLOURS, GREY, INDIGO, OLIVE, SAID, WINE, Look, names_as_they_are
from kvq_calib.report.panels import Point
from kvq_calib.report.plots import SHORT, layer_errors, scatter
from kvq_calib.report.tables import change, exact, figure, size_of
from kvq_runtime.cli.table import cell
from kvq_runtime.registry import verdict
from kvq_runtime.registry.measured import SPOKEN, Cell
from kvq_runtime.store.memory import human

Rows = Sequence[Mapping[str, Any]]
MOST_CELLS = 32  # lengths, depths and tasks that a picture has; what has more is a table alone
_FAMILIES = (*COLOURS, WINE, OLIVE, INDIGO, GREY)  # k0, k1, ... of page.css
_VARIABLES = (
    {Look(colour, "o").ink: "ink" for colour in _FAMILIES}
    | {colour.lower(): f"k{number}" for number, colour in enumerate(_FAMILIES)}
    | {to_hex(grey): "soft" for grey in ("0.35", "0.4")}
    | {to_hex(grey): "line" for grey in ("0.72", "0.8")}
    | {to_hex(grey): "hair" for grey in ("0.92", "0.955")}
    | {"#ffffff": "card"}
)
_KEPT = {"fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "stroke-linecap", "fill-opacity",
         "stroke-opacity", "opacity", "text-anchor", "font-size", "font-weight"}  # fmt: skip
_PLACES = {"d", "x", "y", "width", "height", "transform", "viewBox", "id", "clip-path"}
HALO = "halo"  # class of names that lie over lines
_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(%| [KMGT]?i?B)?( ± [\d.]+%?)?|")


def page(template: str, **given: Any) -> str:
    """A whole page."""
    return environment().get_template(template).render(given)


@cache
def environment() -> Environment:
    """The templates of this folder, with the words and figures that they share."""
    found = Environment(
        loader=PackageLoader("kvq_calib.report", "page"), autoescape=True, undefined=StrictUndefined, finalize=_said,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    shared = (change, exact, figure, human, size_of)
    found.filters |= {one.__name__: one for one in shared} | {"anchor": anchor, "digest": _digest}
    found.globals |= {"colours": verdict.COLOURS, "columns": columns, "own": _own, "spoken": SPOKEN}
    found.globals |= {"pictures": {one.__name__: one for one in (bits, errors, frontier, answers)}}
    return found


def _said(value: Any) -> Any:
    """A value as text: without control characters; numbers and what JSON held as tables have them."""
    return value if isinstance(value, Markup) else shown(value) if isinstance(value, str) else cell(value)


def columns(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool]]:
    """The columns of a table, and whether all that is in each is numbers."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [(name, all(_is_number(row.get(name)) for row in rows)) for name in names]


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return bool(_NUMBER.fullmatch(value))
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def anchor(title: str) -> str:
    """The name of a section's place in the page."""
    return "".join(letter if letter.isalnum() else "-" for letter in title.lower())


def _own(file: str) -> Markup:
    """A file of this package: a style or a script that we wrote, which holds no end of its element."""
    text = files("kvq_calib.report.page").joinpath(file).read_text(encoding="utf-8")
    assert "</" not in text, f"{file} would end its element"
    return Markup(text)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _drawn(draw: Callable[..., Figure]) -> Callable[..., Markup]:
    """Draw a picture from what JSON can hold; a screen reader reads the function's docstring."""
    label = str(draw.__doc__).rstrip(".")

    @lru_cache(maxsize=64)  # a page of every version of a registry has many pictures twice
    def draw_once(given: str) -> Markup:
        with names_as_they_are():
            return Markup(f"<figure>{svg(draw(*json.loads(given)), label)}</figure>")

    @wraps(draw)
    def drawn(*given: Any) -> Markup:
        return draw_once(json.dumps(given, default=asdict))

    return drawn


@_drawn
def bits(rows: Rows) -> Figure:
    """Bits per element by layer."""
    return layer_bits(rows, 10, 2.8)


@_drawn
def errors(rows: Rows) -> Figure:
    """Relative squared error by layer."""
    return layer_errors([rows], [Look(BLUE, "o").line])


@_drawn
def frontier(points: Rows) -> Figure:
    """KL divergence against bits per element."""
    return scatter(_points(points))


@_drawn
def outliers(points: Rows, worst: int) -> Figure:
    """KL divergence against bits per element."""
    found = _points(points)
    apart = {(one.bits, one.cost): one for one in reversed(found)}  # of points in one place the first
    return scatter(found, front=False, named=sorted(apart.values(), key=lambda one: -one.cost)[:worst])


def _points(points: Rows) -> list[Point]:
    return [Point(**{**one, "name": one["name"][:48]}) for one in points]


@_drawn
def _grid(rows: Sequence[tuple[str, Rows]], *given: Any) -> Figure:
    """Right answers by task, length and depth."""
    figure = grid([(protocol, [Cell(**cell) for cell in cells]) for protocol, cells in rows], *given)
    figure.set_figwidth(max(figure.get_figwidth(), 10))  # as wide as the others, so that letters are as large
    return figure


def answers(tasks: Rows) -> Markup | None:
    """Accuracy by length and depth, a row of panels a protocol; None where it was not counted so."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in tasks:
        protocol = str(SPOKEN.get(one["protocol"], one["protocol"]))
        found.setdefault(protocol, []).extend(cell | {"task": one["task"][:SHORT]} for cell in one["cells"])
    rows = [(protocol, cells) for protocol, cells in found.items() if cells]
    cells = [cell for _, some in rows for cell in some]
    names, lengths, depths = ({cell[name] for cell in cells} for name in ("task", "length", "depth"))
    if not cells or max(map(len, (names, lengths, depths))) > MOST_CELLS:
        return None
    return _grid(rows, sorted(names), sorted(lengths), sorted(depths))


def shown(text: str) -> str:
    """The text with control characters, and marks that turn its direction round, as escapes; line ends stay."""
    return "".join(
        letter
        if letter in "\n\t" or unicodedata.category(letter) not in ("Cc", "Cf", "Cs", "Co", "Cn")
        else letter.encode("unicode_escape").decode()
        for letter in text
    )


def svg(figure: Figure, label: str) -> str:
    """The figure as an element of HTML; a screen reader reads `label`."""
    for patch in (figure.patch, *(axis.patch for axis in figure.axes)):
        patch.set_visible(False)
    for text in (text for axis in figure.axes for text in axis.texts if text.get_path_effects()):
        text.set_path_effects([])  # which would be drawn as outlines of letters
        text.set_gid(HALO)
    stream = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    given = ElementTree.fromstring(shown(stream.getvalue()))
    root = Element("svg", {"viewBox": given.attrib["viewBox"], "role": "img", "aria-label": shown(label)})
    root.extend(part for child in given for part in _cleaned(child))
    return ElementTree.tostring(root, encoding="unicode")


def _cleaned(given: Element) -> list[Element]:
    """An element without what a page does not need; the parts of a group that says nothing."""
    name = given.tag.rpartition("}")[2]
    if name in ("metadata", "style"):
        return []
    children = [part for child in given for part in _cleaned(child)]
    attributes, titles = _attributes(given), []
    identity = attributes.pop("id", "") if name in ("g", "svg") else ""
    if identity == HALO:
        attributes["class"] = HALO
    elif identity.startswith(SAID):
        titles = json.loads(identity.removeprefix(SAID))
    marks = [mark for child in children for mark in child.iter("use")]
    if len(titles) > 1 and len(titles) == len(marks):
        for mark, title in zip(marks, titles, strict=True):
            mark.append(_title(title))
        titles = []
    if name == "g" and not attributes and not titles:
        return children
    found = Element(name, attributes)
    found.text = given.text if name == "text" else None
    found.extend([*map(_title, titles[:1]), *children])
    return [found] if children or name not in ("g", "defs") else []


def _title(text: str) -> Element:
    found = Element("title")
    found.text = shown(text)
    return found


def _attributes(given: Element) -> dict[str, str]:
    """Places with two decimals, declarations of the style as attributes, links to what is in the picture."""
    found = {name: _short(value) if name in _PLACES - {"id", "clip-path"} else value
             for name, value in given.attrib.items() if name in _PLACES}  # fmt: skip
    if found.get("transform", "").startswith("rotate(-0 "):
        del found["transform"]
    for part in filter(None, given.attrib.get("style", "").split(";")):
        name, _, value = (piece.strip() for piece in part.partition(":"))
        if name in _KEPT:
            found[name] = f"var(--{_VARIABLES[value]})" if value in _VARIABLES else _short(value)
    link = next((value for name, value in given.attrib.items() if name.endswith("}href")), "")
    return found | ({"href": link} if link.startswith("#") else {})


def _short(value: str) -> str:
    text = re.sub(r"-?\d+\.\d+", lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), value)
    return " ".join(text.split())
