"""Name blocks of tokens by a chain of hashes: one name is one prefix, of one model, one fit and one tenant.

    root    sha256(what decides how tokens become bytes ‖ salt); of its owner's tenant: sha256(root ‖ their salt)
    name 0  sha256(root   ‖ tokens of block 0)
    name n  sha256(name n-1 ‖ tokens of block n)

So prompts share the blocks that they begin with. A name finds a block; whether it is the right one is decided by the
tokens that are stored in it.
"""

import sys
from array import array
from collections.abc import Iterable
from hashlib import sha256

import torch
from torch import Tensor

LARGEST = 1 << 31  # token ids are below


def token_row(tokens: Tensor | Iterable[int]) -> Tensor:
    """Token ids of one row, int64 [T] on the CPU, of a list, [T] or [1, T]; ValueError for anything else."""
    given = tokens if isinstance(tokens, Tensor) else torch.as_tensor(list(tokens))
    if given.ndim == 2 and len(given) == 1:
        given = given[0]
    if given.ndim != 1 or (given.numel() and (given.is_floating_point() or given.dtype == torch.bool)):
        raise ValueError(
            f"tokens of shape {list(given.shape)}, {str(given.dtype).removeprefix('torch.')}; give the ids of one row, "
            "[T] or [1, T]: a batch row by row, without padding"
        )
    row_T = given.detach().to("cpu", torch.int64)
    if row_T.numel() and not 0 <= int(row_T.min()) <= int(row_T.max()) < LARGEST:
        raise ValueError(f"token ids from {int(row_T.min())} to {int(row_T.max())}; use 0 to {LARGEST - 1}")
    return row_T


def root(digest: str, salt: str) -> str:
    """Return the beginning of a tenant's chains: without the salt no block of them can be named, or found."""
    return sha256(b"kvq prefix root\0" + bytes.fromhex(digest) + sha256(salt.encode()).digest()).hexdigest()


def tenant(root: str, salt: str) -> str:
    """Return the beginning of the chains of a tenant of a root's owner."""
    return sha256(b"kvq prefix tenant\0" + bytes.fromhex(root) + sha256(salt.encode()).digest()).hexdigest()


def name(previous: str, tokens: Iterable[int]) -> str:
    """The name of the block that holds these tokens after `previous`."""
    ids = array("I", tokens)  # 4 bytes each
    if sys.byteorder == "big":
        ids.byteswap()
    return sha256(b"kvq prefix block\0" + bytes.fromhex(previous) + ids.tobytes()).hexdigest()


def names(begin: str, tokens_T: Tensor, block: int) -> list[str]:
    """The names of all whole blocks of a row."""
    found, previous = [], begin
    for start in range(0, len(tokens_T) // block * block, block):
        previous = name(previous, tokens_T[start : start + block].tolist())
        found.append(previous)
    return found
