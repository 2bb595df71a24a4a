"""Lay out as rows what was measured: of recipes, for `kvq eval` and `kvq compare`, and of an artifact's layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvq_runtime.artifact import Artifact
from kvq_runtime.memory import side_bits
from kvq_runtime.recipe import HALVES


def comparison(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows that `kvq compare` prints: those of `kvq eval`, with the error of attention's output."""
    from kvq_calib.plots import attention_error

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
        for half in HALVES:
            found[f"{half}s"] = round(side_bits(artifact.recipe, layer, half, artifact.fingerprint.geometry), 4)
        for half in HALVES:
            own = measures.get(half) or {}
            found |= {f"{half}s {short}": own[name] for name, short in names.items() if name in own}
        rows.append(found)
    return rows
