"""Say what differs between two artifacts: settings, origin, what the fit measured, and every tensor."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.artifact import Artifact
from kvq_runtime.table import flatten


def differences(a: Artifact, b: Artifact) -> list[dict[str, Any]]:
    """Rows {part, name, a, b, change}, only where the two differ.

    change   numbers: (b - a) / |a|; float tensors: ‖b - a‖ / ‖a‖; codes: the share of bytes that differ
    """
    stamps = a.fingerprint, b.fingerprint
    rows = _settings("recipe", a.recipe.to_json(), b.recipe.to_json())
    rows += _settings("model", *(stamp.to_json() for stamp in stamps))
    rows += _tensors("model", *(stamp.probes for stamp in stamps))
    rows += _settings("provenance", a.provenance, b.provenance)
    rows += _settings("fit", a.fit, b.fit)
    return rows + _tensors("tensor", a.tensors, b.tensors)


def _settings(part: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    one, other = flatten(dict(a)), flatten(dict(b))
    rows = []
    for name in dict.fromkeys([*one, *other]):
        before, after = one.get(name), other.get(name)
        if before != after or (name in one) != (name in other):
            rows.append({"part": part, "name": name, "a": before, "b": after, "change": _relative(before, after)})
    return rows


def _relative(a: Any, b: Any) -> float | None:
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (a, b))
    return (b - a) / abs(a) if numbers and a else None


def _tensors(part: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    rows = []
    for name in dict.fromkeys([*a, *b]):
        one, other = a.get(name), b.get(name)
        change = _distance(one, other) if one is not None and other is not None else None
        if change != 0:
            rows.append({"part": part, "name": name, "a": _shape(one), "b": _shape(other), "change": change})
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
