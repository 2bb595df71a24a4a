"""Describe recipes and artifacts as rows and records, for tables and JSON."""

import dataclasses
from typing import Any

from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.geometry import MODELS, Geometry
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.store.memory import asymptotic_bits

REFERENCE_MODEL = MODELS["qwen2.5-7b"]
SHOWN = ("bits", "dim", "size", "group", "range", "scale", "levels")  # settings of a quantizer that are always stated

MOST = 3  # layers of their own that are written out


def artifact_record(artifact: Artifact) -> dict[str, Any]:
    """Return the fields of an artifact, with number and bytes of its tensors."""
    return {
        "recipe": recipe_row(artifact.recipe, artifact.fingerprint.geometry),
        "fingerprint": artifact.fingerprint.to_json(),
        "provenance": dict(artifact.provenance),
        "fit": dict(artifact.fit),
        "tensors": len(artifact.tensors),
        "tensor_bytes": sum(tensor.nbytes for tensor in artifact.tensors.values()),
    }


def recipe_row(recipe: Recipe, geometry: Geometry) -> dict[str, Any]:
    """Return a recipe as a row: stages, window, and mean bits per element over all layers of this geometry.

    The window is sinks/recent/block, as in 4/128/128; 1/32-128/32 if it may grow from 32 to 128 recent tokens.
    """
    window, widest = recipe.window, recipe.widest.window.recent
    recent = f"{window.recent}-{widest}" if widest > window.recent else window.recent
    layers = [f"{layer}: {' | '.join(map(stages, pair))}" for layer, pair in recipe.layers.items()]
    if len(layers) > MOST:
        layers = [layers[0], f"and {len(layers) - 1} more of their own (kvq show --json)"]
    return {
        "name": recipe.name,
        "position": recipe.position,
        "bits": round(asymptotic_bits(recipe, geometry), 4),
        "fitted": "online" if recipe.fits_prompt else recipe.fitted,
        "keys": stages(recipe.key),
        "values": stages(recipe.value) if recipe.value != recipe.key else "as keys",
        "layers": "; ".join(layers),
        "window": f"{window.sinks}/{recent}/{window.block}",
        "summary": recipe.summary,
    }


def stages(scheme: Scheme) -> str:
    """Write the stages of a scheme, as in `linear > hadamard > grid(dim=2 size=16 group=all)`."""
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
