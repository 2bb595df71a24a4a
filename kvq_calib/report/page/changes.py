"""Write how a version compares with the one before it."""

from collections.abc import Mapping
from typing import Any

from kvq_calib.report.page.html import Html, folded, pairs, table, tag
from kvq_calib.report.page.words import Known, change, figure
from kvq_runtime.cli.table import percent
from kvq_runtime.registry.measured import SPOKEN
from kvq_runtime.store.memory import human


def changes(known: Known) -> list[Any]:
    """The section: losses, sizes, digest, settings and tensors beside those of the last version."""
    before = known["before"]
    if before is None:
        return [tag("p", "There is no version before it.", class_="soft")]
    digests = {
        "last version": f"{before['version']}, {before['published']}" + (", yanked" if before["yanked"] else ""),
        "sha256 before": tag("code", str(before["sha256"])),
        "sha256 now": tag("code", str(known["sha256"])),
        "file": f"{human(before['size'])} → {human(known['size'])}",
    }
    found: list[Any] = [pairs(digests), *_losses(before)]
    if before["reason"] is not None:
        return [*found, tag("p", f"What is in the files cannot be compared: {before['reason']}", class_="bad")]
    found += [table([_size(row) for row in before["sizes"]]), *_tensors(before["tensors"])]
    if not before["settings"]:
        return [*found, tag("p", "Recipe, model and provenance are the same.", class_="soft")]
    rows = [{"part": r["part"], "setting": r["name"], "before": r["a"], "now": r["b"]} for r in before["settings"]]
    more = f", and {before['left_out']} more: kvq diff" if before["left_out"] else ""
    return [*found, folded(f"{len(rows)} settings differ{more}", table(rows))]


def _losses(before: Mapping[str, Any]) -> list[Html | None]:
    rows = [
        {
            "text": one["text"],
            "protocol": SPOKEN.get(one["protocol"], one["protocol"]),
            "KL, nats: before": figure(one["kl_before"]),
            "now": figure(one["kl"]),
            "change": _change(one["kl_before"], one["kl"]),
            "perplexity against 16 bit: before": change(one["relative_before"]),
            "now ": change(one["relative"]),
        }
        for one in before["losses"]
    ]
    if not rows:
        return [tag("p", "Neither was measured.", class_="soft")]
    note = {
        None: "One of the two was not measured.",
        False: "They were measured on other windows: differences are those of the text, too.",
        True: "Measured on the same windows.",
    }[before["same_windows"]]
    return [table(rows), tag("p", note, class_="soft" if before["same_windows"] else "warn")]


def _size(row: Mapping[str, Any]) -> dict[str, str]:
    bits = row["what"] == "bits"
    what = "bits per element, of one more token" if bits else f"all bytes at {row['tokens']:,} tokens"
    shown = [f"{row[side]:.4g}" if bits else human(row[side]) for side in ("before", "now")]
    return {"size": what, "before": shown[0], "now": shown[1], "change": _change(row["before"], row["now"])}


def _tensors(tensors: Mapping[str, Any]) -> list[Html]:
    said = f"{tensors['differ']} of {tensors['of']} fitted tensors differ"
    mean = tensors["mean_change"]
    return [
        tag("p", said + (f", by {mean:.2g} of their norm in the mean." if mean is not None else "."), class_="soft")
    ]


def _change(before: float | None, now: float | None) -> str:
    return "" if before is None or now is None or not before else percent((now - before) / abs(before))
