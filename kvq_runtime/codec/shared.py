"""Build the codecs of a fit, and share them among all caches of a process: made once for each device, and dropped with
their last user.

An artifact's tensors are `Fitted`; whoever builds codecs of the same `Fitted` gets the same ones, and from `moved` the
same copies on another device. Nothing else of a fit is held twice, whatever the number of caches or threads.
"""

import threading
from collections.abc import Mapping
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec, specs
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe, Role

_lock = threading.RLock()
_moved: WeakKeyDictionary[Codec, WeakValueDictionary[torch.device, Codec]] = WeakKeyDictionary()


class Fitted(dict[str, Tensor]):
    """The tensors of a fit by name. They must not be changed: caches share them."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__(tensors)
        self._built: list[tuple[Recipe, Geometry, list[tuple[Codec, Codec]]]] = []

    def __reduce__(self):  # in another process codecs are made again
        return Fitted, (dict(self),)


def build(recipe: Recipe, geometry: Geometry, tensors: Mapping[str, Tensor]) -> list[tuple[Codec, Codec]]:
    """The codecs of all layers, (keys, values) each, from the tensors of an artifact: a list of its own, of codecs that
    are the same for everyone who asks with the same `Fitted`."""
    if not isinstance(tensors, Fitted):
        return [_pair(recipe, layer, geometry, tensors) for layer in range(geometry.layers)]
    with _lock:
        for known, size, pairs in tensors._built:
            if known == recipe and size == geometry:
                return list(pairs)
        pairs = [_pair(recipe, layer, geometry, tensors) for layer in range(geometry.layers)]
        tensors._built.append((recipe, geometry, pairs))
        return list(pairs)


def _pair(recipe: Recipe, layer: int, geometry: Geometry, tensors: Mapping[str, Tensor]) -> tuple[Codec, Codec]:
    def one(role: Role) -> Codec:
        names = specs(recipe, layer, role, geometry)
        own = {name: tensors[f"layers.{layer}.{role}.{name}"] for name in names}
        return Codec(recipe, layer, role, geometry, own)

    return one("key"), one("value")


def moved(codec: Codec, device: torch.device) -> Codec:
    """`codec.to(device)`, one object for all callers as long as it is in use."""
    if device == codec.device:
        return codec
    with _lock:
        known = _moved.setdefault(codec, WeakValueDictionary())
        found = known.get(device)
        if found is None:
            found = known[device] = codec.to(device)
        return found
