"""Figures of pages in the same words everywhere, "" where one is not known."""

import shlex
from collections.abc import Mapping
from typing import Any

from kvq_runtime.cli.table import percent

Known = Mapping[str, Any]


def reference(known: Known) -> str:
    """Return the reference that loads the version."""
    return f"{known['name']}@{known['version']}" if known["version"] else str(known["name"])


def named(one: Mapping[str, Any]) -> str:
    """Return the label of a point."""
    return reference({"version": None} | dict(one))


def model_of(known: Known) -> str:
    """The model, as a shell gives it to `--model`."""
    given = (known.get("model") or {}).get("id")
    return shlex.quote(str(given)) if given else "MODEL"


def figure(value: float | None) -> str:
    """Three digits that count."""
    return "" if value is None else f"{value:.3g}"


def fixed(value: float | None) -> str:
    """Three decimals."""
    return "" if value is None else f"{value:.3f}"


def exact(value: float | None) -> str:
    """All digits, for a program."""
    return "" if value is None else repr(value)


def share(value: float | None, form: str = ".0%") -> str:
    """A share in per cent."""
    return "" if value is None else f"{value:{form}}"


def spread(said: str, error: float | None, form: str) -> str:
    """A figure with its standard error, if that is known."""
    return said if error is None else f"{said} ± {error:{form}}"


def change(value: float | None) -> str:
    """A relative difference in per cent."""
    return "" if value is None else percent(value)
