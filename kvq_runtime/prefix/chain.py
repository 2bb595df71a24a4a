"""Name blocks of tokens by a chain of hashes: one name is one prefix, of one model, one fit and one tenant.

Models are told apart whose keys and values differ: by configuration, and by a sample of every tensor of the weights.

    root    sha256(what decides how tokens become bytes ‖ salt); of its owner's tenant: sha256(root ‖ their salt)
    name 0  sha256(root   ‖ tokens of block 0)
    name n  sha256(name n-1 ‖ tokens of block n)

So prompts share the blocks that they begin with. A name finds a block; whether it is the right one is decided by the
tokens that are stored in it.
"""

import json
import sys
from array import array
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError, check_type

LARGEST = 1 << 31  # token ids are below
SAMPLES, BYTES = 64, 8  # of every tensor in a file: so many places, evenly spaced, of so many bytes
LARGEST_HEADER = 100 << 20
# of a configuration: where it came from, and how it is run, which keys and values do not depend on
_PLACE = {"_name_or_path", "architectures", "dtype", "id2label", "label2id", "torch_dtype", "transformers_version",
          "use_cache", "return_dict"}  # fmt: skip


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
    check_type("salt", salt, str, "a text that only the tenant knows")
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


def config_json(config: Mapping[str, Any]) -> bytes:
    """Return the part of a decoder's configuration that decides its keys and values, as JSON."""
    return strict_json.dumps(_plain({name: x for name, x in config.items() if name not in _PLACE})).encode()


def model_digest(folder: Path, config: Mapping[str, Any], more: str = "") -> str:
    """sha256 of a configuration, and of a sample of the weights in a folder's safetensors files.

    more   what else decides keys and values, such as how weights are quantized as they are loaded
    Raises ArtifactError where there is no such file, or one that cannot be read.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ArtifactError(
            f"{folder} has no safetensors files, by whose weights kept prefixes of one model are told from another's; "
            "save the model as safetensors"
        )
    digest = sha256(config_json(config) + b"\0" + more.encode())
    for path in paths:
        _add(digest, path)
    return digest.hexdigest()


def add_tensors(digest: Any, tensors: Mapping[str, Tensor]) -> None:
    """Update a sha256 with tensors: names, dtypes, shapes and elements."""
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)


def _add(digest: Any, path: Path) -> None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LARGEST_HEADER:
            raise ArtifactError(f"{path}: its header is {length} bytes long; it is no safetensors file")
        try:
            entries = json.loads(file.read(length))
            spans = {name: (str(entry["dtype"]), list(entry["shape"]), *map(int, entry["data_offsets"]))
                     for name, entry in entries.items() if name != "__metadata__"}  # fmt: skip
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArtifactError(f"{path}: no safetensors file: {error}") from None
        for name, (dtype, shape, start, stop) in sorted(spans.items()):
            digest.update(f"\0{name}\0{dtype}\0{shape}\0".encode())
            for place in range(SAMPLES):
                file.seek(8 + length + start + (stop - start) * place // SAMPLES)
                digest.update(file.read(min(BYTES, stop - start)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, str)) else repr(value)
