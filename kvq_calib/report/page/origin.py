"""Write whether a version is whole, where it comes from, and what became of its name."""

from collections.abc import Mapping
from typing import Any

from kvq_calib.report.page.html import folded, pairs, table, tag
from kvq_calib.report.page.words import Known, change, figure
from kvq_calib.report.sections import machine_of
from kvq_runtime.disk.strict_json import flatten
from kvq_runtime.store.memory import human

_RESULTS = {"ok": "good", "failed": "bad", "not reached": "warn", "not compared": "soft"}


def health(known: Known) -> list[Any]:
    """The checks, and what was measured again since."""
    rows = [
        {"check": row["check"], "result": tag("span", row["result"], class_=_RESULTS.get(row["result"])),
         "what": row["what"]}
        for row in known["health"]
    ]  # fmt: skip
    found: list[Any] = [table(rows)]
    if known["drift"]:
        weeks = [{"week": str(one["week"]), "KL, nats": figure(one["kl"]), "against 16 bit": change(one["relative"])}
                 for one in known["drift"]]  # fmt: skip
        found += [tag("h3", "Measured again, by week"), table(weeks)]
    else:
        found += [tag("p", "Not measured again since: the flow drift does so (docs/fleet.md).", class_="soft")]
    return found


def provenance(known: Known) -> list[Any]:
    """Model, text, machine, digests; the card."""
    model, given = known.get("model") or {}, known.get("provenance") or {}
    corpus = known.get("corpus") or {}
    shape = f"{model['layers']} layers, {model['kv_heads']} KV heads of {model['head_size']}" if model else None
    machine = given.get("environment")
    rows = {
        "model": model.get("id"),
        "revision": model.get("revision"),
        "shape": shape,
        "fingerprint": "in the file: shape, RoPE, a probe of the projections" if model else None,
        "corpus": corpus.get("source"),
        "corpus digest": corpus.get("corpus_digest"),
        "token digest": corpus.get("token_digest"),
        "sequences": f"{given['samples']} of {given.get('seq_len')} tokens" if "samples" in given else None,
        "held out": given.get("held_out"),
        "seed": given.get("seed"),
        "environment": machine_of(machine) if isinstance(machine, Mapping) else machine,
        "fitted tensors": human(known["tensor_bytes"]) if "tensor_bytes" in known else None,
        "papers": ", ".join((known["recipe"] or {}).get("papers", [])) or None,
        "file": human(known["size"]),
        "sha256": tag("code", str(known["sha256"])),
        "registry": known["registry"] or None,
    }
    files = [
        {"file": name, "bytes": entry["size"], "sha256": entry["sha256"]} for name, entry in known["files"].items()
    ]
    everything = [{"setting": name, "value": value} for name, value in flatten(dict(given)).items()]
    return [
        pairs(rows),
        folded("Everything that the file says of its fit", table(everything)) if everything else None,
        folded(f"{len(files)} files beside it", table(files)) if files else None,
        folded("Its card, as published", tag("pre", known["card"])) if known["card"] else None,
    ]


def history(known: Known) -> list[Any]:
    """Every change of the name."""
    rows = [
        {name: value for name, value in row.items() if name != "sha256"} | {"sha256": str(row["sha256"] or "")[:12]}
        for row in known["history"]
    ]
    for row in rows:
        row["number"] = str(row["number"])
    return [table(rows) if rows else tag("p", "A file: a registry keeps the history of a name.", class_="soft")]
