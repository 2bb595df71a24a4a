"""Show where compressed caches left the 16-bit model's greedy text: rows of tables, and a card's section."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from kvq_calib.report.tables import in_bold, markdown_table, spread, where
from kvq_runtime.errors import counted
from kvq_runtime.registry.measured import DECODE, GreedyRecord, Record

FIGURES = ("reason", "kl", "kl_se", "top1", "accepted", "trend", "windows", "bins")  # that pages show
QUARTERS = 4


def rows(records: Sequence[GreedyRecord]) -> list[dict[str, Any]]:
    """A row a recipe: where it left, KL in nats in each quarter of the continuation, its trend, the worst window."""
    return [
        {"recipe": one.name, "bits": one.result.bits["asymptotic"], **row(one.result.protocols[DECODE])}
        for one in records
    ]


def row(part: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of what one record found, without the recipe's; where there are no figures, why."""
    if "reason" in part:
        return {"first": part["reason"]}
    found = {"first": _first(part["windows"]), "KL": spread(f"{part['kl']:.3g}", part["kl_se"], ".1g")}
    found |= {f"KL {number + 1}/{QUARTERS}": kl for number, kl in enumerate(_quarters(part["bins"]))}
    trend = part["trend"]
    found |= {"KL per 1000 tokens": spread(f"{trend['kl_per_1000']:+.3g}", trend["se"], ".1g")}
    found |= {"worst window": max(window["kl"] for window in part["windows"]), "top-1": f"{part['top1']:.2%}"}
    if part.get("accepted") is not None:  # older records lack it
        found["accepted of 8"] = f"{part['accepted']:.2f}"
    return found | {"decoded": f"{part['bins'][-1]['decoded']:.0%} at the end"}


def positions(part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row a part of the continuation, of what one record found."""
    return [
        {
            "tokens": f"{one['from']} to {one['to']}",
            "KL": spread(f"{one['kl']:.3g}", one["kl_se"], ".1g"),
            "worst window": one["kl_worst"],
            "entropy": f"{one['entropy']:.2f}",
            "decoded": f"{one['decoded']:.0%}",
        }
        for one in part.get("bins", [])
    ]


def about(records: Sequence[GreedyRecord]) -> str:
    """A sentence on what was followed."""
    given = records[0].protocol
    parts = [one.result.protocols[DECODE] for one in records]
    entropies = next((part["bins"] for part in parts if "bins" in part), [])
    sure = (
        f", from {entropies[0]['entropy']:.2f} nats of entropy to {entropies[-1]['entropy']:.2f}" if entropies else ""
    )
    return (
        f"Greedy text of the 16-bit model{sure}: {counted(given.windows, 'window')}, "
        f"{given.prompt} tokens of {given.text.source}, {given.text.split} part, "
        f"continued to {given.length}. first: the first token chosen otherwise, median and least over windows."
    )


def _first(windows: Sequence[Mapping[str, Any]]) -> str:
    left = sorted(window["first"] for window in windows if window["first"] is not None)
    never = f"{len(windows) - len(left)} of {len(windows)} never" if len(left) < len(windows) else ""
    said = f"{median(left):.0f}, least {left[0]}" if left else ""
    return "; ".join(filter(None, (said, never)))


def _quarters(bins: Sequence[Mapping[str, Any]]) -> list[float]:
    """KL by quarter, over the bins that begin in each; as many as there are bins, if they are fewer."""
    parts: list[list[float]] = [[] for _ in range(min(QUARTERS, len(bins)))]
    for number, one in enumerate(bins):
        parts[number * len(parts) // len(bins)].append(one["kl"])
    return [sum(some) / len(some) for some in parts]


def found(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The findings of each record, as `evaluate/decode.py` writes it, with "about", a sentence on what was followed.

    Records of a registry may be by anybody: what cannot be laid out is left out.
    """
    return [found for record in records if isinstance(record, GreedyRecord) and (found := _found(record)) is not None]


def _found(record: GreedyRecord) -> dict[str, Any] | None:
    try:
        part = record.result.protocols[DECODE]
        found = {name: part[name] for name in FIGURES if name in part}
        _ = row(found), positions(found)
        return {"about": f"{where(record.protocol.model)}. {about([record])}", **found}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None


def sections(records: Sequence[Record]) -> list[str]:
    """The section of a card, if there are records of greedy text."""
    said = [
        f"{in_bold(one.protocol.model)}; {about([one])} KL in nats.\n\n{markdown_table(rows([one]))}"
        for one in records
        if isinstance(one, GreedyRecord)
    ]
    return ["## Greedy text\n\n" + "\n\n".join(said)] if said else []
