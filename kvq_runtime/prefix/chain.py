"""Name blocks of tokens by a chain of hashes: one name is one prefix, of one model, one fit and one tenant.

    root    sha256 of everything that decides how tokens become bytes; of a tenant, sha256(root ‖ salt)
    name 0  sha256(root     ‖ tokens of block 0)
    name n  sha256(name n-1 ‖ tokens of block n)

Prompts share the blocks that they begin with. A name finds a block; the tokens stored in it decide whether it is the
right one. A model is identified by its configuration and a sample of each weight.
"""

import json
from array import array
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.errors import check_type

MAX_TOKEN = (1 << 31) - 1
SAMPLES = 64  # elements of each weight, evenly spaced
# entries of a configuration on which keys and values do not depend: where it came from, and how it is run
_IRRELEVANT = {"_name_or_path", "architectures", "dtype", "id2label", "label2id", "torch_dtype", "transformers_version",
               "use_cache", "return_dict"}  # fmt: skip


def token_row(tokens: Tensor | Iterable[int]) -> Tensor:
    """Return the token ids of one row, int64 [T] on the CPU, from a list, [T] or [1, T]; ValueError otherwise."""
    row = tokens if isinstance(tokens, Tensor) else torch.as_tensor(list(tokens))
    if row.ndim == 2 and len(row) == 1:
        row = row[0]
    if row.ndim != 1 or (row.numel() and (row.is_floating_point() or row.dtype == torch.bool)):
        raise ValueError(
            f"tokens of shape {list(row.shape)}, {row.dtype}; give the ids of one row, [T] or [1, T], without padding"
        )
    row_T = row.detach().to("cpu", torch.int64)
    if row_T.numel() and not 0 <= int(row_T.min()) <= int(row_T.max()) <= MAX_TOKEN:
        raise ValueError(f"token ids from {int(row_T.min())} to {int(row_T.max())}; use 0 to {MAX_TOKEN}")
    return row_T


def tenant_root(root: str, salt: str) -> str:
    """Return the root of a tenant's chains; without the salt none of their blocks can be named or found."""
    check_type("salt", salt, str, "a text that only the tenant knows")
    return sha256(b"kvq prefix tenant\0" + bytes.fromhex(root) + sha256(salt.encode()).digest()).hexdigest()


def block_names(root: str, tokens_T: Tensor, block: int) -> list[str]:
    """Return the names of all whole blocks of a row."""
    names, previous = list[str](), root
    for start in range(0, len(tokens_T) // block * block, block):
        ids = array("I", tokens_T[start : start + block].tolist()).tobytes()  # 4 bytes each
        previous = sha256(b"kvq prefix block\0" + bytes.fromhex(previous) + ids).hexdigest()
        names.append(previous)
    return names


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of all tensors: names, dtypes, shapes and elements."""
    digest = sha256()
    for name, tensor in sorted(tensors.items()):
        _update(digest, name, tensor, tensor.detach().cpu().contiguous().view(-1))
    return digest.hexdigest()


def model_digest(config: Mapping[str, Any], weights: Iterable[tuple[str, Tensor]], more: str = "") -> str:
    """Return the sha256 of a decoder's configuration and of 64 evenly spaced elements of each weight.

    more   whatever else decides keys and values, such as a quantization at load time
    """
    relevant = {name: value for name, value in config.items() if name not in _IRRELEVANT}
    digest = sha256(f"{json.dumps(relevant, sort_keys=True, default=repr)}\0{more}".encode())
    for name, tensor in sorted(weights, key=lambda pair: pair[0]):
        flat = tensor.detach().reshape(-1)
        count = min(SAMPLES, len(flat))
        places = torch.arange(count, device=flat.device) * len(flat) // max(1, count)
        _update(digest, name, tensor, flat.view(torch.uint8).view(len(flat), flat.itemsize)[places].cpu())
    return digest.hexdigest()


def _update(digest: Any, name: str, tensor: Tensor, elements: Tensor) -> None:
    digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
    digest.update(elements.view(torch.uint8).numpy().data)
