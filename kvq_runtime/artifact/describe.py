"""Describe recipes and artifacts, and how two artifacts differ, as rows and records, for tables and JSON."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.artifact.artifact import Artifact, spec
from kvq_runtime.disk.strict_json import flatten
from kvq_runtime.geometry import MODELS, Geometry
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.store.memory import asymptotic_bits

REFERENCE_MODEL = MODELS["qwen2.5-7b"]
SHOWN = ("bits", "dim", "size", "group", "range", "scale", "levels")  # settings of a quantizer that are always stated


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
    """{title: rows} of the parts of a record that are tables: a row a layer of the fit."""
    layers = record["fit"].get("layers")
    rows = [{"layer": i} | flatten(layer) for i, layer in enumerate(layers if isinstance(layers, list) else [])]
    return {"fit, by layer": rows} if rows else {}


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
            if getattr(stage, field.name) != field.default or (stage is scheme.quantize and field.name in SHOWN)
        }
        inside = " ".join(f"{name}={value}" for name, value in settings.items())
        parts.append(f"{stage.kind}({inside})" if inside else stage.kind)
    return " > ".join(parts) + (", per channel" if scheme.axis == "channel" else "")


# ---- differences -----------------------------------------------------------------------------------------------------


def diff(a: Artifact, b: Artifact) -> list[dict[str, Any]]:
    """Rows {part, name, a, b, change} of everything that differs.

    change   numbers: (b - a) / |a|; float tensors: ‖b - a‖ / ‖a‖; codes: the share of bytes that differ
    """
    rows = _settings("recipe", a.recipe.to_json(), b.recipe.to_json())
    rows += _settings("model", a.fingerprint.to_json(), b.fingerprint.to_json())
    rows += _tensors("model", a.fingerprint.probes, b.fingerprint.probes)
    rows += _settings("provenance", a.provenance, b.provenance)
    rows += _settings("fit", a.fit, b.fit)
    return rows + _tensors("tensor", a.tensors, b.tensors)


def _settings(part: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    a, b = flatten(dict(a)), flatten(dict(b))
    rows = []
    for name in dict.fromkeys([*a, *b]):
        before, after = a.get(name), b.get(name)
        if before != after or (name in a) != (name in b):
            rows.append({"part": part, "name": name, "a": before, "b": after, "change": relative(before, after)})
    return rows


def relative(a: Any, b: Any) -> float | None:
    """(b - a) / |a| of two numbers; None for anything else, and where a is 0."""
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (a, b))
    return (b - a) / abs(a) if numbers and a else None


def _tensors(part: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    rows = []
    for name in dict.fromkeys([*a, *b]):
        before, after = a.get(name), b.get(name)
        change = _distance(before, after) if before is not None and after is not None else None
        if change != 0:
            rows.append({"part": part, "name": name, "a": _shape(before), "b": _shape(after), "change": change})
    return rows


def _distance(a: Tensor, b: Tensor) -> float | None:
    if a.shape != b.shape or a.dtype != b.dtype:
        return None
    if not a.is_floating_point():
        return float((a != b).double().mean()) if a.numel() else 0.0
    change, size = (b.double() - a.double()).norm(), a.double().norm()
    return float(change / size.clamp_min(torch.finfo(torch.float64).tiny)) if change else 0.0


def _shape(tensor: Tensor | None) -> str | None:
    return None if tensor is None else spec(tuple(tensor.shape), tensor.dtype)
