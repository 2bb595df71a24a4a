"""Compare a version with the one that was published before it: bits, bytes, losses, digest, settings, tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvq_calib.report.page import health, losses
from kvq_calib.report.page.words import change, figure
from kvq_runtime.artifact import folder
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.artifact.diff import diff
from kvq_runtime.cli.table import percent
from kvq_runtime.registry.events import State, Version
from kvq_runtime.registry.measured import SPOKEN, Record, TextRecord
from kvq_runtime.registry.registry import Registry
from kvq_runtime.store.memory import human

Rows = list[dict[str, Any]]
MAX_LINES = 60  # lines of settings that differ; more are counted


def last(state: State, version: Version) -> Version | None:
    """The version published before; None for the first."""
    published = list(state.versions.values())
    place = published.index(version)
    return published[place - 1] if place else None


def compared(
    registry: Registry, state: State, version: Version, made: Artifact | None, records: Sequence[Record]
) -> dict[str, Any] | None:
    """Return the differences from the last version; None if there is none.

    `same_windows` is None where one of the two was not measured; losses of other windows are shown, and said to be so.
    """
    other = last(state, version)
    if other is None:
        return None
    found: dict[str, Any] = {"version": other.version, "published": other.at, "sha256": other.sha256}
    found |= {"size": other.size, "yanked": other.yanked, "settings": [], "left_out": 0, "reason": None}
    checks, before = health.checked(registry, state.name, other)
    earlier, _ = health.evaluations(registry, state.name, other)
    mine, theirs = losses.main(records, made), losses.main(earlier, before)
    found["losses"] = _losses(mine, theirs)
    digests = [one.protocol.text.token_digest for one in (mine, theirs) if one]
    found["same_windows"] = digests[0] == digests[1] if len(digests) == 2 else None
    if before is None or made is None:
        failed = next((row["what"] for row in checks if row["result"] == health.FAILED), "this version does not load")
        return found | {"reason": failed}
    rows = diff(before, made)
    settings = [row for row in rows if row["part"] in ("recipe", "model", "provenance")]
    tensors = [row for row in rows if row["part"] == "tensor"]
    changes = [row["change"] for row in tensors if row["change"] is not None]
    found["settings"], found["left_out"] = settings[:MAX_LINES], max(0, len(settings) - MAX_LINES)
    mean = sum(changes) / len(changes) if changes else None
    found["tensors"] = {"differ": len(tensors), "of": len(made.tensors), "mean_change": mean}
    return found | {"sizes": _sizes(before, made)}


def _sizes(before: Artifact, made: Artifact) -> list[dict[str, Any]]:
    """Bits of an element, and bytes of a row of some lengths, before and now."""
    old, new = folder.sizes(before), folder.sizes(made)
    found: list[dict[str, Any]] = [{"what": "bits", "before": old["bits"], "now": new["bits"]}]
    lengths = (
        {"what": "bytes", "tokens": int(n), "before": old["bytes"][n], "now": new["bytes"][n]} for n in old["bytes"]
    )
    return [*found, *lengths]


def _losses(mine: TextRecord | None, theirs: TextRecord | None) -> list[dict[str, Any]]:
    """Divergence and perplexity against 16 bit of both, by text and protocol."""
    sides = [{(row["text"], row["protocol"]): row for row in losses.rows(one)} if one else {} for one in (theirs, mine)]
    found = []
    for key in dict.fromkeys([*sides[1], *sides[0]]):
        before, now = (side.get(key, {}) for side in sides)
        row: dict[str, Any] = {"text": key[0], "protocol": key[1]}
        row |= {"kl_before": before.get("kl"), "kl": now.get("kl")}
        found.append(row | {"relative_before": before.get("relative"), "relative": now.get("relative")})
    return found


def losses_rows(before: Mapping[str, Any]) -> Rows:
    """Losses beside those of the last version."""
    return [
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


def sizes_rows(before: Mapping[str, Any]) -> Rows:
    """Bits and bytes beside those of the last version."""
    rows = []
    for one in before["sizes"]:
        bits = one["what"] == "bits"
        what = "bits per element, of one more token" if bits else f"all bytes at {one['tokens']:,} tokens"
        old, new = (f"{one[side]:.4g}" if bits else human(one[side]) for side in ("before", "now"))
        rows.append({"size": what, "before": old, "now": new, "change": _change(one["before"], one["now"])})
    return rows


def _change(before: float | None, now: float | None) -> str:
    return "" if before is None or now is None or not before else percent((now - before) / abs(before))


def settings_rows(before: Mapping[str, Any]) -> Rows:
    """Settings that are not those of the last version."""
    return [{"part": r["part"], "setting": r["name"], "before": r["a"], "now": r["b"]} for r in before["settings"]]
