"""Figures of pages in the same words everywhere, and the text where nothing was measured."""

import shlex
from collections.abc import Mapping
from typing import Any

from kvq_calib.report.page.html import Html, tag
from kvq_runtime.cli.table import percent
from kvq_runtime.registry.verdict import COLOURS

Known = Mapping[str, Any]


def reference(known: Known) -> str:
    """Return the reference that loads the version."""
    return f"{known['name']}@{known['version']}" if known["version"] else str(known["name"])


def judged(found: Mapping[str, Any]) -> Html:
    """A verdict, which leads a page: its word in its colour, what it is about, and a caution where there is one."""
    word = tag("b", str(found["word"]), class_=f"verdict {COLOURS[found['word']]}")
    caution = [" ", tag("span", f"Caution: {found['caution']}.", class_="warn")] if found.get("caution") else []
    return tag("p", word, f" {found['why']}.", *caution)


def missing(*commands: str) -> Html:
    """Say that nothing was measured, with the commands that measure it."""
    return tag("div", tag("p", "Not measured. What measures it:", class_="soft"), tag("pre", "\n".join(commands)))


def model_of(known: Known) -> str:
    """The model, as a shell gives it to `--model`."""
    given = (known.get("model") or {}).get("id")
    return shlex.quote(str(given)) if given else "MODEL"


def figure(value: float | None) -> str:
    """Three digits that count; "" where it is not known."""
    return "" if value is None else f"{value:.3g}"


def fixed(value: float | None) -> str:
    """Three decimals."""
    return "" if value is None else f"{value:.3f}"


def share(value: float | None, form: str = ".0%") -> str:
    """A share in per cent."""
    return "" if value is None else f"{value:{form}}"


def spread(said: str, error: float | None, form: str) -> str:
    """A figure with its standard error, if that is known."""
    return said if error is None else f"{said} ± {error:{form}}"


def change(value: float | None) -> str:
    """A relative difference in per cent."""
    return "" if value is None else percent(value)
