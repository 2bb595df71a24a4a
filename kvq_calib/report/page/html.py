"""Build HTML in which nothing that a registry holds can become markup, and a page that loads nothing.

`tag` escapes every child that is not Html, and every attribute; only this module makes Html from text. A page allows
its own style and script alone, by their digests (Content-Security-Policy): whatever slipped through would neither run
nor be fetched. Style attributes are not allowed either; colours are classes, so that light and dark are one page.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from kvq_calib.report.frame import shown
from kvq_runtime.cli.table import cell

_VOID = {"meta", "br", "input", "rect", "path", "line", "circle"}
_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(%| [KMGT]?i?B)?( ± [\d.]+%?)?|")


class Html(str):
    """Text that is HTML already."""


def tag(name: str, /, *children: Any, **attributes: Any) -> Html:
    """An element.

    children     text, which is escaped; Html, which is not; None, which is left out; or iterables of these
    attributes   `class_` for class, `_` for `-`; None and False are left out, True is an attribute without a value
    """
    given = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    if name in _VOID and not children:
        return Html(f"<{name}{given}>" if name in ("meta", "br", "input") else f"<{name}{given}/>")
    return Html(f"<{name}{given}>{join(children)}</{name}>")


def join(children: Iterable[Any]) -> Html:
    """Children one after the other, text escaped."""
    return Html("".join(_child(child) for child in children))


def _child(child: Any) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str):
        return escape(shown(child), quote=True)
    if isinstance(child, Iterable):
        return join(child)
    return escape(cell(child), quote=True)


def _attribute(name: str, value: Any) -> str:
    name = name.rstrip("_").replace("_", "-") if name != "viewBox" else name
    if isinstance(value, bool):
        return f" {name}" if value else ""
    text = f"{value:.5g}" if isinstance(value, float) else shown(str(value))
    return f' {name}="{escape(text, quote=True)}"'


def table(rows: Sequence[Mapping[str, Any]], class_: str | None = None, heads: Sequence[str] | None = None) -> Html:
    """Rows as a table that scrolls where it is wider than the page; columns of numbers are set to the right.

    heads   the columns; None: all keys, in their order
    """
    names = list(heads or dict.fromkeys(name for row in rows for name in row))
    right = {name: all(_is_number(row.get(name)) for row in rows) for name in names}
    head = tag("tr", (tag("th", name, class_="n" if right[name] else None, scope="col") for name in names))
    body = (
        tag("tr", (tag("td", _said(row.get(name)), class_="n" if right[name] else None) for name in names))
        for row in rows
    )
    whole = tag("table", tag("thead", head), tag("tbody", body), class_=class_)
    return tag("div", whole, class_="wide", tabindex="0")


def tiles(figures: Sequence[tuple[Any, str]]) -> Html:
    """Figures and what each is, in rows of about as many: more than five are two rows, so that none stands alone."""
    columns = len(figures) if len(figures) <= 5 else -(-len(figures) // 2)
    parts = (tag("div", tag("b", figure), tag("span", said), class_="tile") for figure, said in figures)
    return tag("div", parts, class_=f"tiles of-{columns}")


def pairs(rows: Mapping[str, Any]) -> Html:
    """Names and values, a line each; values that are None are left out."""
    lines = (
        tag("tr", tag("th", name, scope="row"), tag("td", _said(value)))
        for name, value in rows.items()
        if value is not None
    )
    return tag("div", tag("table", tag("tbody", lines), class_="pairs"), class_="wide", tabindex="0")


def _said(value: Any) -> Any:
    """A value as a cell's child: of lists and objects that JSON held, their text."""
    return value if value is None or isinstance(value, str) else cell(value)


def folded(title: str, *children: Any) -> Html:
    """Return an element that a reader unfolds."""
    return tag("details", tag("summary", title), *children)


def section(title: str, *children: Any) -> Html:
    """A part of the page with its heading, which a link of the page's head leads to."""
    return tag("section", tag("h2", title), *children, id=anchor(title))


def anchor(title: str) -> str:
    """The name of a section's place in the page."""
    return "".join(letter if letter.isalnum() else "-" for letter in title.lower())


def document(title: str, *body: Any, script: bool = False, broad: bool = False) -> str:
    """A whole page.

    script   with the sorting and filtering of tables of class `sorted`
    broad    for a wide table
    """
    style = _own("page.css")
    code = _own("sort.js") if script else ""
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'; " + f"style-src '{_digest(style)}'"
    policy += f"; script-src '{_digest(code)}'" if code else ""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(style)),
    )
    scripts = tag("script", Html(code)) if code else None
    return (
        "<!doctype html>\n"
        + tag("html", head, tag("body", tag("main", *body, class_="broad" if broad else None), scripts), lang="en")
        + "\n"
    )


def _own(file: str) -> str:
    """A file of this package: a style or a script that we wrote, which holds no end of its element."""
    text = files("kvq_calib.report.page").joinpath(file).read_text(encoding="utf-8")
    assert "</" not in text, f"{file} would end its element"
    return text


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return bool(_NUMBER.fullmatch(value))
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
