"""Describe a picture in a sentence: model and size, text, windows, protocol, and how to read the marks."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvq_calib.report.names import name_of
from kvq_calib.report.panels import Panel
from kvq_calib.report.points import not_drawn, recommended
from kvq_calib.report.tables import reference
from kvq_runtime.registry import measured
from kvq_runtime.registry.measured import FULL, IN_USE, PROTOCOLS


def size_of(parameters: int) -> str:
    """4.1M, 7.6B: a number of parameters as text."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if parameters >= scale:
            return f"{parameters / scale:.3g}{unit}"
    return str(parameters)


def where(record: Mapping[str, Any]) -> str:
    """Model and its size."""
    model = record["protocol"]["model"]
    return f"{model['id'].rstrip('/').rpartition('/')[2]} ({size_of(model['parameters'])} parameters)"


def about(records: Sequence[Mapping[str, Any]], panels: Sequence[Panel] = (), texts: bool = True) -> str:
    """Describe what was measured, on texts of other kinds too if `texts`, and how to read the panels' marks."""
    given = records[0]["protocol"]
    said = [f"{where(records[0])}, {_windows(given)}."]
    for text, other in (given.get("texts") or {}).items() if texts else ():
        said.append(f"{text}: {_windows(other)}.")
    said += [_PROTOCOL[name] for name in PROTOCOLS if any(measured.figures(one, name) for one in records)]
    exact = [f"{one:.4g}" for name in PROTOCOLS if (one := reference(records, name))][:1]
    said += [f"Perplexity of the 16-bit model: {exact[0]}."] if exact else []
    unknown = [name_of(one) for one in records for name in PROTOCOLS if _unknown(measured.figures(one, name))]
    return " ".join(filter(None, [*said, *_marks(panels), not_drawn(unknown) if panels else ""]))


def _unknown(part: Mapping[str, Any] | None) -> bool:
    """True if there are figures without a divergence."""
    return part is not None and part.get("kl") is None


_PROTOCOL = {
    FULL: "Full encode: every token but the sinks is encoded before it is read.",
    IN_USE: "In use: tokens arrive in steps, the newest stay exact.",
}


def _windows(given: Mapping[str, Any]) -> str:
    return f"{given['windows']} held-out windows of {given['length']} tokens of {given['text']['source']}"


def _marks(panels: Sequence[Panel]) -> list[str]:
    """Explain the marks of the panels."""
    if not panels:
        return []
    said = []
    if any(panel.front for panel in panels):
        said.append("Grey stairs: the frontier; no recipe has both fewer bits and less divergence.")
    if any(one.spread is not None for panel in panels for one in panel.points):
        said.append("Whiskers: a standard error over windows.")
    if any(recommended(panel.points) for panel in panels):
        said.append("Ringed: recommended.")
    if all(len(panel.points) < 2 for panel in panels):
        said.append("No other recipe was measured beside it; kvq-calibrate --baseline NAME and kvq eval do that.")
    exact = list(dict.fromkeys(name for panel in panels for name in panel.left_out))
    if exact:
        said.append(f"Not drawn, for it is exact: {', '.join(exact)}.")
    return said
