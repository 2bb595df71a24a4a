"""Lay out as rows what was measured: of recipes, for `kvq eval` and `kvq compare`, and of an artifact's layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.recipe import ROLES
from kvq_runtime.store.memory import scheme_bits


def comparison(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows that `kvq compare` prints: those of `kvq eval`, with the error of attention's output."""
    first, *rows = table(records)
    return [first, *(row | {"attention": attention_error(one)} for row, one in zip(rows, records, strict=True))]


def table(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows that `kvq eval` prints: the 16-bit model first."""
    first = records[0]
    length = first["protocol"]["length"]
    rows = [{"recipe": "16 bit", "bits": 16.0, f"at {length}": 16.0, "at 4096": 16.0,
             "perplexity": f"{first['result']['reference_perplexity']:.3f}"}]  # fmt: skip
    for found in records:
        result, bits = found["result"], found["result"]["bits"]
        rows.append({
            "recipe": result["recipe"],
            "bits": bits["asymptotic"],
            f"at {length}": bits["at_length"],
            "at 4096": bits["at_4096"],
            "perplexity": f"{result['perplexity']:.3f}",
            "vs 16 bit": relative(result),
            "KL": result["kl"],
            "top-1": f"{result['top1']:.2%}",
        })  # fmt: skip
    return rows


def attention_error(record: Mapping[str, Any]) -> float | None:
    """The error of attention's output as the cache gives it in use, mean over layers; None where it is not measured."""
    errors = [row["attention_error"] for row in record["result"]["layers"]]
    return sum(errors) / len(errors) if errors and None not in errors else None


def relative(result: Mapping[str, Any]) -> str:
    """The distance of a perplexity from that of 16 bit, with its standard error where there is one."""
    spread = result["relative_se"]
    return f"{result['relative']:+.2%}" + ("" if spread is None else f" ± {spread:.2%}")


def by_layer(artifact: Artifact) -> list[dict[str, Any]]:
    """Bits of keys and values in each layer, and what the fit measured there."""
    names = {"explained_variance": "explained", "relative_error": "error", "attention_error": "attention"}
    rows = []
    for layer, measures in enumerate(artifact.fit["layers"]):
        found: dict[str, Any] = {"layer": layer}
        for role in ROLES:
            found[f"{role}s"] = round(scheme_bits(artifact.recipe, layer, role, artifact.fingerprint.geometry), 4)
        for role in ROLES:
            own = measures.get(role) or {}
            found |= {f"{role}s {short}": own[name] for name, short in names.items() if name in own}
        rows.append(found)
    return rows
