"""List the differences between two artifacts: settings, provenance, results of the fit, and every tensor."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.disk.strict_json import flatten


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
            rows.append({"part": part, "name": name, "a": before, "b": after, "change": _relative(before, after)})
    return rows


def _relative(a: Any, b: Any) -> float | None:
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
    return None if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
