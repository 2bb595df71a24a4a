"""Put a recipe or an artifact into the words of a table."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvq_runtime.artifact import Artifact
from kvq_runtime.geometry import Geometry
from kvq_runtime.memory import asymptotic_bits
from kvq_runtime.recipe import Recipe, Side
from kvq_runtime.table import flatten

MEASURED = {  # what a person looks for first in an evaluation, by its place in the record
    **{"model": "protocol.model.id", "text": "protocol.text.source", "windows": "protocol.windows"},
    **{"length": "protocol.length", "recent": "protocol.recent", "perplexity": "result.perplexity"},
    **{"relative": "result.relative", "kl": "result.kl", "top1": "result.top1"},
}
REFERENCE_MODEL = Geometry(layers=28, kv_heads=4, head_size=128)  # Qwen2.5-7B


def artifact_record(fitted: Artifact) -> dict[str, Any]:
    """What an artifact holds, as nested fields."""
    return {
        "recipe": recipe_row(fitted.recipe, fitted.fingerprint.geometry),
        "fingerprint": fitted.fingerprint.to_json(),
        "provenance": dict(fitted.provenance),
        "fit": dict(fitted.fit),
        "tensors": len(fitted.tensors),
        "tensor_bytes": sum(tensor.nbytes for tensor in fitted.tensors.values()),
    }


def brief(record: Mapping[str, Any]) -> dict[str, Any]:
    """What `kvq show` found, without what `tables` makes tables of."""
    fit = {name: value for name, value in record["fit"].items() if name != "layers"}
    found = {name: value for name, value in record.items() if name not in ("evaluations", "fit")}
    return found | ({"fit": fit} if fit else {})


def tables(record: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows of the parts of it that have rows, by their titles: a line an evaluation, a line a layer of the fit."""
    measured = [flatten(one) for one in record.get("evaluations", [])]
    rows = [{name: one[path] for name, path in MEASURED.items() if path in one} for one in measured]
    given = record["fit"].get("layers")
    layers = given if isinstance(given, list) else []
    fit = [{"layer": index} | flatten(layer) for index, layer in enumerate(layers)]
    found = {"evaluations (--json has all of each)": rows, "fit, by layer": fit}
    return {title: rows for title, rows in found.items() if rows}


def summary(about: Mapping[str, Any]) -> dict[str, Any]:
    """Recipe, model and corpus, from what an artifact's header says of itself: what a search looks at."""
    given = about["provenance"]
    model, text = given.get("model"), given.get("corpus")
    model = model if isinstance(model, Mapping) else {"id": model, "revision": given.get("revision")}
    text = text if isinstance(text, Mapping) else {"source": text}
    recipe = about["recipe"].get("name") if isinstance(about["recipe"], Mapping) else None
    found = {"recipe": recipe, "model": model.get("id"), "revision": model.get("revision")}
    found |= {"corpus": text.get("source"), "corpus_digest": text.get("corpus_digest")}
    return {name: value if value is None else str(value)[:200] for name, value in found.items()}


def recipe_row(recipe: Recipe, geometry: Geometry) -> dict[str, Any]:
    """A recipe in one line: stages, window, and mean bits per element over all layers."""
    others = {layer: " | ".join(map(_stages, pair)) for layer, pair in recipe.layers.items()}
    return {
        "name": recipe.name,
        "position": recipe.position,
        "bits": round(asymptotic_bits(recipe, geometry), 4),
        "fitted": "online" if recipe.online else recipe.fitted,
        "keys": _stages(recipe.key),
        "values": _stages(recipe.value) if recipe.value != recipe.key else "as keys",
        "layers": "; ".join(f"{layer}: {text}" for layer, text in others.items()),
        "window": _window(recipe),
        "summary": recipe.summary,
    }


def _window(recipe: Recipe) -> str:
    """Sinks, recent tokens and block, as in `4/128/128`, or `1/32-128/32` where attention may keep up to 128."""
    sinks, recent, block = recipe.key.window
    return f"{sinks}/{recent}" + (f"-{recipe.window.most(recent, block)}" if recipe.window else "") + f"/{block}"


def _stages(side: Side) -> str:
    """The stages of a side, as in `linear > hadamard > grid(dim=2 size=16 group=all)`."""
    parts = []
    for stage in (side.predict, side.rotate, side.feedback, side.quantize, side.correct):
        if stage is None:
            continue
        settings = {field.name: getattr(stage, field.name) for field in dataclasses.fields(stage)}
        if stage is not side.quantize:
            settings = {f.name: settings[f.name] for f in dataclasses.fields(stage) if settings[f.name] != f.default}
        inside = " ".join(f"{name}={value}" for name, value in settings.items())
        parts.append(f"{stage.kind}({inside})" if inside else stage.kind)
    return " > ".join(parts) + (", per channel" if side.axis == "channel" else "")
