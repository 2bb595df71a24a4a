"""Draw how many times as fast as 16-bit attention a decode step reads packed codes, by tokens and rows.

python -m benchmarks.speed_plot benchmarks/results/gpu-<device>.jsonl picture.png [MODEL]
"""

import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.lines import Line, read
from benchmarks.report import latest
from kvq_calib.report import looks as draw
from kvq_calib.report.looks import looks


@draw.picture
def picture(lines: list[Line], caption: str) -> Figure:
    """A panel for each number of rows, a line a recipe, above 1 where it is faster.

    lines   `attend` lines of one model
    """
    recipes, batches = (list(dict.fromkeys(line[name] for line in lines)) for name in ("recipe", "batch"))
    contexts = sorted({line["tokens"] for line in lines})
    figure = Figure(figsize=(13.5, 5.4), layout="constrained")
    panels = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    for axis, batch in zip(panels, sorted(batches), strict=True):
        for recipe, look in zip(recipes, looks(recipes), strict=True):
            found = sorted((x["tokens"], x["speed_up"]) for x in lines if (x["recipe"], x["batch"]) == (recipe, batch))
            axis.plot(*zip(*found, strict=True), label=recipe, **look.line)
        axis.axhline(1, color="0.3", linewidth=1)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(FixedLocator(contexts))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        draw.log_scale(axis, 0.3, 4)
        axis.set_xlabel("tokens of a row", fontsize=9)
        axis.set_title(f"{batch} row{'s' if batch > 1 else ''}", loc="left", fontsize=10)
        draw.tidy(axis)
    panels[0].set_ylabel("times as fast as the fastest 16-bit attention", fontsize=9)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", frameon=False, fontsize=8.5)
    draw.caption(figure, caption)
    return figure


def main(source: str, target: str, model: str = "llama-3.1-8b") -> None:
    """Write the PNG."""
    lines = latest(read(Path(source)))
    device = next((f" on one {line['name']}" for line in lines if line["what"] == "device"), "")
    attended = [
        line for line in lines if (line["what"], line.get("model")) == ("attend", model) and "error" not in line
    ]
    said = (
        f"Attention of one decode step of one layer, heads of {model}{device}: above 1 it is faster than every 16-bit "
        "attention of PyTorch, and a Triton kernel, at the same shape."
    )
    Path(target).write_bytes(picture(attended, said))


if __name__ == "__main__":
    main(*sys.argv[1:])
