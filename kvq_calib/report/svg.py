"""Write a figure as SVG for a page: without a style or an address outside, so that the page's policy admits it.

Colours of pictures become variables of page.css, so that light and dark are one picture; other colours stay. What
`frame.say` says of a mark is its `<title>`, which a pointer shows. The same figure and label give the same text, and
identifiers differ by label.
"""

import io
import json
import re
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from matplotlib import rc_context
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from kvq_calib.report import looks
from kvq_calib.report.frame import SAID, shown
from kvq_calib.report.looks import Look

_FAMILIES = (*looks.COLOURS, looks.WINE, looks.OLIVE, looks.INDIGO, looks.GREY)  # k0, k1, ... of page.css
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
