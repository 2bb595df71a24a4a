"""Memory that lasts from one forward pass to the next: allocate it for any mode, and count it, as allocated."""

from collections.abc import Iterable

import torch
from torch import Tensor

# of a function that allocates what is written into later: tensors made in inference mode could not be, outside it
lasting = torch.inference_mode(False)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of their storages; tensors that share one count once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
