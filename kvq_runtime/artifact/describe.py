"""Describe recipes and artifacts as rows and records, for tables and JSON."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.disk.strict_json import flatten
from kvq_runtime.geometry import MODELS, Geometry
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.store.memory import asymptotic_bits

MEASURED = {  # {column of the table of evaluations: dotted key in the record}
    **{"model": "protocol.model.id", "text": "protocol.text.source", "windows": "protocol.windows"},
    **{"length": "protocol.length", "recent": "protocol.recent", "perplexity": "result.perplexity"},
    **{"relative": "result.relative", "kl": "result.kl", "top1": "result.top1"},  # of version 1, in use
    **{
        f"{protocol}: {name}": f"result.protocols.{protocol}.{key}"
        for protocol in ("full", "in-use")
        for name, key in {"relative": "relative", "kl": "kl", "decoded": "decoded.attention", "none": "reason"}.items()
    },
}
REFERENCE_MODEL = MODELS["qwen2.5-7b"]


def artifact_record(artifact: Artifact) -> dict[str, Any]:
    """The fields of an artifact; of its tensors number and bytes."""
    return {
        "recipe": recipe_row(artifact.recipe, artifact.fingerprint.geometry),
        "fingerprint": artifact.fingerprint.to_json(),
        "provenance": dict(artifact.provenance),
        "fit": dict(artifact.fit),
        "tensors": len(artifact.tensors),
        "tensor_bytes": sum(tensor.nbytes for tensor in artifact.tensors.values()),
    }


def brief(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of `kvq show` without the parts that `tables` shows."""
    fit = {name: value for name, value in record["fit"].items() if name != "layers"}
    rest = {name: value for name, value in record.items() if name not in ("evaluations", "fit")}
    return rest | ({"fit": fit} if fit else {})


def tables(record: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """{title: rows} of the parts of a record that are tables: a row an evaluation, a row a layer of the fit."""
    given = record.get("evaluations", [])
    answered = [row for one in given for row in _answered(one)]
    evaluations = [flatten(one) for one in given if "tasks" not in one["protocol"]]
    measured = [{name: flat[key] for name, key in MEASURED.items() if key in flat} for flat in evaluations]
    layers = record["fit"].get("layers")
    fit = [{"layer": i} | flatten(layer) for i, layer in enumerate(layers if isinstance(layers, list) else [])]
    titled = {"evaluations (--json has all of each)": measured, "tasks": answered, "fit, by layer": fit}
    return {title: rows for title, rows in titled.items() if rows}


def _answered(evaluation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each task and protocol of an evaluation by tasks: its figures by metric, and how many texts."""
    rows = []
    for protocol, part in (evaluation["result"].get("protocols") or {}).items():
        for task, found in part.get("tasks", {}).items():
            figures = {name: one["value"] for name, one in found.get("metrics", {}).items()}
            figures |= {name: found[name] for name in ("accuracy", "reason") if name in found}
            spoken = ", ".join(
                f"{name} {value:.4g}" if isinstance(value, (int, float)) else str(value)
                for name, value in figures.items()
            )
            rows.append({"task": task, "protocol": protocol, "figures": spoken, "texts": found.get("texts")})
    return rows


def recipe_row(recipe: Recipe, geometry: Geometry) -> dict[str, Any]:
    """A recipe as a row: stages, window, and mean bits per element over all layers of a model of this geometry."""
    others = {layer: " | ".join(map(stages, pair)) for layer, pair in recipe.layers.items()}
    return {
        "name": recipe.name,
        "position": recipe.position,
        "bits": round(asymptotic_bits(recipe, geometry), 4),
        "fitted": "online" if recipe.fits_prompt else recipe.fitted,
        "keys": stages(recipe.key),
        "values": stages(recipe.value) if recipe.value != recipe.key else "as keys",
        "layers": "; ".join(f"{layer}: {text}" for layer, text in others.items()),
        "window": _window(recipe),
        "summary": recipe.summary,
    }


def _window(recipe: Recipe) -> str:
    """Sinks, recent tokens and block, as in `4/128/128`; `1/32-128/32` if the window may grow from 32 to 128 tokens."""
    window, widest = recipe.window, recipe.widest.window.recent
    most = f"-{widest}" if widest > window.recent else ""
    return f"{window.sinks}/{window.recent}{most}/{window.block}"


def stages(scheme: Scheme) -> str:
    """The stages of a scheme, as in `linear > hadamard > grid(dim=2 size=16 group=all)`."""
    parts = []
    for stage in (scheme.predict, scheme.rotate, scheme.feedback, scheme.quantize, scheme.correct):
        if stage is None:
            continue
        settings = {
            field.name: getattr(stage, field.name)
            for field in dataclasses.fields(stage)
            if getattr(stage, field.name) != field.default or (stage is scheme.quantize and not field.kw_only)
        }
        inside = " ".join(f"{name}={value}" for name, value in settings.items())
        parts.append(f"{stage.kind}({inside})" if inside else stage.kind)
    return " > ".join(parts) + (", per channel" if scheme.axis == "channel" else "")
