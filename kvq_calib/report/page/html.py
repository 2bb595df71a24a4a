"""Fill the templates of pages: nothing that a registry holds can become markup, and a page loads nothing.

Jinja escapes every value that is not Markup; our own files and pictures alone are. A page allows its own style and
script alone, by their digests (Content-Security-Policy): whatever slipped through would neither run nor be fetched.
Style attributes are not allowed either; colours are classes, so that light and dark are one page.
"""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvq_calib.report.page.pictures import shown
from kvq_calib.report.words import change, exact, figure, size_of
from kvq_runtime.cli.table import cell
from kvq_runtime.registry.measured import SPOKEN
from kvq_runtime.registry.verdict import COLOURS
from kvq_runtime.store.memory import human

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
    found.globals |= {"colours": COLOURS, "columns": columns, "own": _own, "spoken": SPOKEN}
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
