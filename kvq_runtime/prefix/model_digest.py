"""Tell models apart whose keys and values differ: by configuration, and by a sample of every tensor of the weights."""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError

SAMPLES, BYTES = 64, 8  # of every tensor in a file: so many places, evenly spaced, of so many bytes
LARGEST_HEADER = 100 << 20
# of a configuration: where it came from, and how it is run, which keys and values do not depend on
_PLACE = {"_name_or_path", "architectures", "dtype", "id2label", "label2id", "torch_dtype", "transformers_version",
          "use_cache", "return_dict"}  # fmt: skip


def config_json(config: Mapping[str, Any]) -> bytes:
    """Return the part of a decoder's configuration that decides its keys and values, as JSON."""
    return strict_json.dumps(_plain({name: x for name, x in config.items() if name not in _PLACE})).encode()


def of_files(folder: Path, config: Mapping[str, Any], more: str = "") -> str:
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
