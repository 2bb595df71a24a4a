"""Count the memory that an object really owns, by walking it."""

import torch

from kvq_runtime.ops.rope import Rotary


def owned(thing, seen: dict[int, object] | None = None) -> dict[int, int]:
    """Bytes of every storage reachable from an object, by its address. The model's own rotation is not the cache's."""
    seen = {} if seen is None else seen
    if id(thing) in seen or isinstance(thing, (type, Rotary)):
        return {}
    seen[id(thing)] = thing
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()} if storage.nbytes() else {}
    if isinstance(thing, dict):
        parts = [*thing.keys(), *thing.values()]
    elif isinstance(thing, (list, tuple, set, frozenset)):
        parts = list(thing)
    else:
        parts = list(getattr(thing, "__dict__", {}).values())
    return {address: size for part in parts for address, size in owned(part, seen).items()}
