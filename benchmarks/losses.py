"""Show what recipes lose on five kinds of text, by model: tables in Markdown, and a picture.

    python -m benchmarks.losses benchmarks/records/losses.png > table.md

It reads LOSSES and IN_USE: lines of `kvq eval NAME ... --protocol full --output FILE`, and `--protocol in-use`. A
text's cell is KL divergence in nats. A mean is perplexity against 16 bit and divergence, of the texts measured; of all
in README and in use. Bits are Qwen2.5-7B's where models stand side by side.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from kvq_runtime.artifact import recipe_text
from kvq_runtime.artifact.describe import REFERENCE_MODEL
from kvq_runtime.cli.recipes import readers
from kvq_runtime.recipe import preset, presets
from kvq_runtime.store.memory import asymptotic_bits

LOSSES, IN_USE = Path("benchmarks/results/real/losses.jsonl"), Path("benchmarks/results/real/in-use.jsonl")
TEXTS = {
    "valid.txt": "WikiText-2",
    "demo": "documentation",
    "demo-code": "code",
    "pg2600_war_and_peace.txt": "War and Peace",
    "chats.jsonl": "chats",
}
LINES = {"fisher-pre": "C2", "fisher": "C0", "fisher-head": "C1", "kvarn": "C3", "kivi": "C4", "aqua": "C5"}
SUMMARY = ("fisher-2bit", "fisher-2.5bit", "fisher-3bit", "fisher-4bit", "fisher-head-2bit", "fisher-head-3bit",
           "fisher-pre-2bit", "fisher-pre-3bit", "aqua-2bit", "aqua-fisher-2bit", "kivi-2bit", "kivi-4bit",
           "kvquant-3bit", "kvarn-k4v2", "kvarn-k4v4")  # fmt: skip
Found = dict[tuple[str, str], dict[str, Any]]  # (recipe, text) → figures


def losses(path: Path, protocol: str) -> dict[str, Found]:
    """Return a protocol's figures of each model, by recipe and text."""
    models: dict[str, Found] = defaultdict(dict)
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        measured, result = entry["protocol"], entry["result"]
        figures = result["protocols"][protocol] | {"bits": result["bits"]["asymptotic"]}
        models[measured["model"]["id"]][result["recipe"], TEXTS[measured["text"]["source"]]] = figures
    return models


def names(found: Found) -> list[str]:
    """Return the recipes, by bits."""
    bits = {recipe: figures["bits"] for (recipe, _), figures in found.items()}
    return sorted(bits, key=lambda recipe: (bits[recipe], recipe))


def table(model: str, found: Found) -> Iterator[str]:
    """Return the lines of a model's table."""
    yield from (f"| {model} | bits | {' | '.join([*TEXTS.values(), 'mean'])} |", "|---" * (len(TEXTS) + 3) + "|")
    for recipe in names(found):
        cells = [found.get((recipe, text)) for text in TEXTS.values()]
        shown = [f"{cell['kl']:.2g}" if cell else "" for cell in cells]
        mean = means(found, recipe)
        yield f"| `{recipe}` | {mean['bits']:.2f} | {' | '.join([*shown, figures(mean)])} |"


def means(found: Found, recipe: str) -> dict[str, float]:
    """Return the means over the texts that were measured, and the number of these."""
    cells = [found[recipe, text] for text in TEXTS.values() if (recipe, text) in found]
    return {key: fmean(cell[key] for cell in cells) for key in ("bits", "relative", "kl")} | {"texts": len(cells)}


def summary(models: dict[str, Found], recipes: Sequence[str], texts: int = len(TEXTS)) -> Iterator[str]:
    """Return the lines of a table of models: means over so many texts; bits on Qwen2.5-7B."""
    yield from (f"| recipe | bits | kernel | vLLM | {' | '.join(models)} |", "|---" * (len(models) + 4) + "|")
    for name in recipes:
        known = [means(found, name) if name in names(found) else None for found in models.values()]
        cells = [figures(mean) if mean and mean["texts"] == texts else "" for mean in known]
        recipe = preset(name)
        bits, by = asymptotic_bits(recipe, REFERENCE_MODEL), readers(recipe)
        kernel, vllm = ("yes" if yes else "no" for yes in (by["kernel"], by["vllm"] != "no"))
        yield f"| `{name}` | {bits:.2f} | {kernel} | {vllm} | {' | '.join(cells)} |"


def figures(mean: dict[str, float]) -> str:
    """Return perplexity against 16 bit, and divergence."""
    return f"{100 * mean['relative']:+.1f}%, {mean['kl']:.2g}"


def panel(axis: Axes, model: str, found: Found) -> None:
    """Draw the mean divergence of each recipe against its bits; filled: a GPU kernel reads it packed."""
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    labels: list[tuple[float, float]] = []
    for recipe in sorted(names(found), key=lambda recipe: -means(found, recipe)["kl"]):
        mean, family = means(found, recipe), recipe.rsplit("-", 1)[0]
        if mean["texts"] < len(TEXTS) or recipe not in presets():  # a changed preset is in the tables alone
            continue
        bits, kl = mean["bits"], mean["kl"]
        color = LINES.get(family, "0.45")
        filled = color if readers(recipe_text.read(recipe))["kernel"] else "white"
        axis.plot(bits, kl, "o", color=color, markerfacecolor=filled, markersize=6, zorder=3)
        height = 1.03 * kl
        while any(abs(bits - x) < 0.7 and height > 0.83 * y for x, y in labels):  # below the labels beside it
            height *= 0.99
        labels.append((bits, height))
        axis.annotate(recipe, (bits, height), (6, 0), textcoords="offset points", fontsize=7, color="0.25")
        lines[family].append((bits, kl))
    for name, points in lines.items():
        if name in LINES:
            axis.plot(*zip(*points, strict=True), color=LINES[name], linewidth=1, zorder=2)
    axis.set(yscale="log", xlabel="bits per key or value element")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.margins(x=0.16)
    axis.set_title(model, loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="0.92", linewidth=0.8)


def main() -> None:
    """Print the tables and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    models = losses(LOSSES, "full")
    print("\n".join(summary(models, SUMMARY)), end="\n\n")
    figure = Figure(figsize=(5.2 * len(models), 4.6), layout="constrained")
    axes = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
    for axis, (model, found) in zip(axes, models.items(), strict=True):
        panel(axis, model, found)
        print("\n".join(table(model, found)), end="\n\n")
    used = losses(IN_USE, "in-use")
    print("\n".join(summary(used, names(used[next(iter(used))]), texts=4)))
    figure.supylabel("KL divergence from 16 bit, nats a token", fontsize=9)
    figure.supxlabel("filled: a GPU kernel reads it packed", fontsize=8.5, x=0.01, ha="left", color="0.35")
    figure.savefig(args.picture, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
