"""Draw what compressed caches cost by position, in windows as long as the model takes: a column a protocol.

The bytes of a PNG; the same lines give the same picture.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvq_calib.report import frame
from kvq_calib.report.captions import where
from kvq_calib.report.looks import looks
from kvq_runtime.registry.measured import PROTOCOLS, SPOKEN
from kvq_runtime.registry.protocols import Model

Lines = Sequence[Mapping[str, Any]]


@frame.picture
def by_position(exact: Mapping[str, Any], lines: Lines, text: str) -> Figure:
    """Divergence and perplexity above 16 bit against position; the 16-bit model's own perplexity is in grey.

    exact   the part of the 16-bit model, {"bins": [...]}, as `positions.part` gives it
    lines   {"recipe", "protocol", "bits", "part", "model"} of one text and length
    text    what it is called
    """
    protocols = [name for name in PROTOCOLS if any(one["protocol"] == name for one in lines)]
    names = list(dict.fromkeys(one["recipe"] for one in lines))
    styles = dict(zip(names, looks(names), strict=True))
    figure = Figure(figsize=(5.6 * len(protocols) + 2, 7.6), layout="constrained")
    grid = figure.subplots(2, len(protocols), squeeze=False, sharex=True)
    places = [(one["from"] + one["to"]) / 2 for one in exact["bins"]]
    for (upper, lower), protocol in zip(grid.T, protocols, strict=True):
        some = [one for one in lines if one["protocol"] == protocol]
        heights = []
        for one in some:
            kl = [_mean(part["kl"]) for part in one["part"]["bins"]]
            label = f"{one['recipe']} ({one['bits']['asymptotic']:.2f})"
            upper.plot(places, kl, label=label, **styles[one["recipe"]].line)
            heights += [height for height in kl if height > 0]
            lower.plot(places, _above(one["part"], exact), **styles[one["recipe"]].line)
        upper.set_title(SPOKEN[protocol], loc="left", fontsize=10)
        if heights:
            frame.log_scale(upper, min(heights) / 1.4, max(heights) * 1.4)
        _tidy(lower, [height for one in some for height in _above(one["part"], exact)])
        frame.tidy(upper)
        lower.set_xlabel("position in the text, tokens", fontsize=9)
    grid[0][0].set_ylabel("KL divergence from the 16-bit model, nats")
    grid[1][0].set_ylabel("perplexity above that of the 16-bit model, %")
    shown = {label: line for axis in grid[0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", frameon=False, fontsize=8.5)
    windows, length = len(exact["bins"][0]["loss"]), exact["bins"][-1]["to"]
    model = where(Model(**lines[0]["model"]))
    own = [exact["bins"][0]["loss"], exact["bins"][-1]["loss"]]
    frame.caption(
        figure,
        f"{model}. {windows} windows of {length} tokens of {text}; each point is the mean of "
        f"{exact['bins'][-1]['to'] - exact['bins'][-1]['from']} tokens of each. In brackets: bits per element. Mean "
        f"loss of the 16-bit model in the first part {_mean(own[0]):.3g} nats, in the last {_mean(own[1]):.3g}. Full "
        "encode: every token but the sinks is encoded before it is read. In use: tokens arrive in steps, the newest "
        "stay exact.",
    )
    return figure


def _above(part: Mapping[str, Any], exact: Mapping[str, Any]) -> list[float]:
    """Per cent of perplexity above 16 bit, by position: e to the difference of mean losses, less 1."""
    pairs = zip(part["bins"], exact["bins"], strict=True)
    return [100 * math.expm1(_mean(one["loss"]) - _mean(other["loss"])) for one, other in pairs]


def _tidy(axis: Axes, heights: Sequence[float]) -> None:
    """An axis of per cents with its zero, linear where little is and logarithmic beyond."""
    axis.axhline(0, color="0.35", linewidth=1, linestyle="--", zorder=1)
    low, high = min([0.0, *heights]), max([0.1, *heights])
    frame.symlog_scale(axis, 1.2 * low - 0.1, 1.3 * high, 1.0)
    frame.tidy(axis)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
