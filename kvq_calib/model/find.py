"""Find a model: by its name in the catalog, in a local folder or GGUF file, or by its id on the Hugging Face Hub; and
tell models of one name apart, by a digest.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from kvq_calib.model import config, gguf
from kvq_calib.model.catalog import CATALOG, Entry, entry, hub_id
from kvq_calib.model.files import INDEX, SINGLE, ModelFiles, tensors_of
from kvq_calib.model.gguf import is_gguf
from kvq_runtime.disk import files as disk
from kvq_runtime.errors import NotFound
from kvq_runtime.registry.hub_client import disable_telemetry

__all__ = ["CATALOG", "Entry", "ModelFiles", "entry", "look_up", "resolve"]

SMALL = ["*.json", "tokenizer*", "vocab*", "merges*", "README.md"]
WEIGHTS = "model*.safetensors"
UNWANTED = ["*/*", "*.bin", "*.py"]
CHECKOUT = Path(__file__).parents[2]
PIECES, PIECE = 1024, 4096  # of each file that a digest has, evenly spaced; bytes each


def resolve(name: str | Path, revision: str | None = None) -> ModelFiles:
    """Find a model and check that it can be calibrated.

    name       a name of the catalog, else a folder or a GGUF file, else a Hub id `org/name`, downloaded if it is not in
               the cache
    revision   of a Hub model: commit, tag or branch

    Raises NotFound for an unknown name, ValueError for a model that is not supported, ArtifactError for a damaged file,
    PermissionError for a gated model, RuntimeError when the Hub cannot be reached.
    """
    return _find(str(name), revision, [WEIGHTS, *SMALL])


def look_up(name: str | Path, revision: str | None = None) -> ModelFiles:
    """`resolve` for a plan alone: weights that are only on the Hub are not downloaded."""
    return _find(str(name), revision, SMALL)


def _find(name: str, revision: str | None, patterns: list[str]) -> ModelFiles:
    """The model of a name; of one on the Hub the files of these patterns."""
    local = _local(name, revision)
    if local is not None:
        return local
    known, hub = CATALOG.get(name), hub_id(name)
    revision = revision or (known.revision if known else None)
    path = _download(hub, revision, patterns)
    return read(path, hub, path.name, weights=WEIGHTS in patterns or _has_weights(path))


def read(path: Path, id: str, revision: str | None = None, weights: bool = True) -> ModelFiles:
    """Open the folder of a model and check that it can be calibrated.

    weights   False if they are not in the folder
    Raises ValueError for a model that is not supported, ArtifactError for a damaged file, by its name.
    """
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        instead = (
            f"its GGUF file {files[0]}" if files else "the folder of a model in Hugging Face format, or a .gguf file"
        )
        raise ValueError(f"{path} has no config.json; give {instead}")
    settings = config.read(path, id)
    tensors = tensors_of(path, id, settings["num_hidden_layers"]) if weights else {}
    return ModelFiles(path, id, revision, settings, tensors)


def _local(name: str, revision: str | None) -> ModelFiles | None:
    """An embedded model, or the one in a folder or a GGUF file; None for any other name."""
    known, path = CATALOG.get(name), Path(name)
    embedded, folder = known is not None and known.hub is None, known is None and path.is_dir()
    file = known is None and path.is_file()
    if revision is not None and (folder or embedded or file):
        kind = "file" if file else "folder"
        raise ValueError(f"revision {revision!r:.80} is of a model on the Hub, and {name} is a {kind}; leave it out")
    if embedded:
        return read(_embedded_folder(name), name)
    if folder:
        return read(path.resolve(), path.resolve().name)
    if file and not is_gguf(path):
        raise ValueError(f"{name} is a file, but no .gguf; give that, or the folder of a model in Hugging Face format")
    if file:
        return read(gguf.converted(path.resolve()), path.name)
    return None


def _download(hub: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    disable_telemetry()
    with _translated(hub, revision):
        return Path(snapshot_download(hub, revision=revision, allow_patterns=patterns, ignore_patterns=UNWANTED))


def _has_weights(path: Path) -> bool:
    """True if all files of the weights are in a folder."""
    index = path / INDEX
    files = set(disk.json_object(index).get("weight_map", {}).values()) if index.is_file() else {SINGLE}
    return all((path / file).is_file() for file in files)


@contextmanager
def _translated(hub: str, revision: str | None) -> Iterator[None]:
    """Turn the errors of huggingface_hub into ours, each saying what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what = hub if revision is None else f"{hub}@{revision}"
    try:
        yield
    except GatedRepoError as error:
        raise PermissionError(f"{what} is gated: accept its licence on the Hub, then `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise NotFound(f"{what} is not on the Hub, or is private: `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise NotFound(f"{hub} has no revision {revision} on the Hub: give a commit, tag or branch") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise RuntimeError(
            f"could not download {what}, and the cache does not hold it: {_sentence(error)}. Go online once, or give a "
            "folder with config.json, model.safetensors and tokenizer.json"
        ) from error


def _sentence(error: Exception) -> str:
    """An error's message on one line, to be gone on with after a full stop."""
    return " ".join(str(error).split()).rstrip(".")


def _embedded_folder(name: str) -> Path:
    """An embedded model: a folder of the checkout, or package data of the wheel."""
    # the checkout first: an editable install holds a copy of the model as it was on that day
    own = CHECKOUT / "artifacts" / f"{name}-model"
    if own.is_dir():
        return own
    package = f"kvq_{name}_model"
    try:
        return Path(str(resources.files(package) / "config.json")).parent
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"the {name} model is neither in artifacts/{name}-model nor installed ({package})"
        ) from error


def digest(files: ModelFiles) -> str:
    """sha256 of a model's settings, tokenizer and evenly spaced bytes of its weights.

    It tells models in one folder apart, which a training may write to: one changes most matrices nearly everywhere.
    """
    hashed = hashlib.sha256(json.dumps(dict(files.config), sort_keys=True, default=str).encode())
    if (tokenizer := files.path / "tokenizer.json").is_file():
        hashed.update(tokenizer.read_bytes())
    for name in sorted(set(files.tensors.values())):
        size = (files.path / name).stat().st_size
        hashed.update(f"\0{name} {size}\0".encode())
        with (files.path / name).open("rb") as file:
            for number in range(PIECES):
                file.seek(max(0, size - PIECE) * number // (PIECES - 1))
                hashed.update(file.read(PIECE))
    return hashed.hexdigest()
