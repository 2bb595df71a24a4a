"""Fill the templates of pages: nothing that a registry holds becomes markup, and a page loads nothing.

Jinja escapes every value; our own style alone is Markup. A page's Content-Security-Policy allows its style by digest,
and pictures that are part of it; it has no script. Pictures are SVG in `<img>`, where nothing of theirs runs.
"""

import base64
import hashlib
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from kvq_calib.report.plots import svg
from kvq_runtime.cli.table import cell
from kvq_runtime.registry.rating import LOSSY, NOT_MEASURED, USABLE

COLOURS = {USABLE: "good", LOSSY: "bad", NOT_MEASURED: "warn"}  # classes of page.css


def page(template: str, **given: Any) -> str:
    """Return a whole page."""
    return environment().get_template(template).render(given)


@cache
def environment() -> Environment:
    """Return the templates of pages."""
    made = Environment(
        loader=PackageLoader("kvq_calib.report", "templates"), autoescape=True, undefined=StrictUndefined,
        finalize=_as_text, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    style = Markup(files("kvq_calib.report").joinpath("templates/page.css").read_text(encoding="utf-8"))
    assert "</" not in style, "page.css would end its element"
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    made.globals |= {"style": style, "digest": f"sha256-{digest}", "colours": COLOURS, "columns": columns}
    made.filters |= {"address": _address}
    return made


def columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns of a table, in the order in which rows name them."""
    return list(dict.fromkeys(name for row in rows for name in row))


def shown(text: str) -> str:
    """Escape control characters and marks that change the direction of text; line ends stay."""
    return "".join(
        letter
        if letter in "\n\t" or unicodedata.category(letter) not in ("Cc", "Cf", "Cs", "Co", "Cn")
        else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _as_text(value: Any) -> Any:
    return value if isinstance(value, Markup) else shown(value) if isinstance(value, str) else cell(value)


def _address(figure: Figure) -> str:
    """Return a picture as the address of an image."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg(figure)).decode()
