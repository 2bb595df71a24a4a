"""Describe a picture in a sentence: model and size, text, windows, protocol, and how to read the marks."""

from collections.abc import Sequence

from kvq_calib.report.panels import Panel
from kvq_calib.report.points import not_drawn, recommended
from kvq_calib.report.tables import reference
from kvq_runtime.registry.measured import FULL, IN_USE, PROTOCOLS, TextRecord
from kvq_runtime.registry.protocols import Model, Windows


def size_of(parameters: int | None) -> str:
    """4.1M, 7.6B: a number of parameters as text."""
    if parameters is None:
        return "unknown"
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if parameters >= scale:
            return f"{parameters / scale:.3g}{unit}"
    return str(parameters)


def where(model: Model) -> str:
    """Model and its size."""
    return f"{str(model.id).rstrip('/').rpartition('/')[2]} ({size_of(model.parameters)} parameters)"


def about(records: Sequence[TextRecord], panels: Sequence[Panel] = (), texts: bool = True) -> str:
    """Describe what was measured, on texts of other kinds too if `texts`, and how to read the panels' marks."""
    given = records[0].protocol
    said = [f"{where(given.model)}, {_windows(given)}."]
    said += [f"{text}: {_windows(other)}." for text, other in given.texts.items()] if texts else []
    said += [_PROTOCOL[name] for name in PROTOCOLS if any(one.figures(name) for one in records)]
    exact = [f"{one:.4g}" for name in PROTOCOLS if (one := reference(records, name))][:1]
    said += [f"Perplexity of the 16-bit model: {exact[0]}."] if exact else []
    figures = [(one.name, one.figures(name)) for one in records for name in PROTOCOLS]
    unknown = [name for name, found in figures if found is not None and found.kl is None]
    return " ".join(filter(None, [*said, *_marks(panels), not_drawn(unknown) if panels else ""]))


_PROTOCOL = {
    FULL: "Full encode: every token but the sinks is encoded before it is read.",
    IN_USE: "In use: tokens arrive in steps, the newest stay exact.",
}


def _windows(given: Windows) -> str:
    return f"{given.windows} held-out windows of {given.length} tokens of {given.text.source}"


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
