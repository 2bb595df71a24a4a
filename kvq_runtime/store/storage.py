"""Count the memory behind tensors, as allocated."""

from collections.abc import Iterable

from torch import Tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of their storages; tensors that share one count once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
