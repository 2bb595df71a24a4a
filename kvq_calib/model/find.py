"""Find a model: by its name in the catalog, in a local folder, or by its id on the Hugging Face Hub."""

import difflib
import re
from importlib import resources
from pathlib import Path

from kvq_calib.model.catalog import CATALOG, Entry, entry
from kvq_calib.model.files import ModelFiles, read

__all__ = ["CATALOG", "Entry", "ModelFiles", "entry", "resolve"]

WANTED = ["model*.safetensors", "*.json", "tokenizer*", "vocab*", "merges*", "README.md"]
UNWANTED = ["*/*", "*.bin", "*.py"]


def resolve(name: str | Path, revision: str | None = None) -> ModelFiles:
    """Find a model and check that it can be captured.

    name       a name of the catalog, else a folder, else a Hub id `org/name`, downloaded if it is not in the cache
    revision   of a Hub model: commit, tag or branch

    Raises ValueError for an unknown name and for a model that is not supported, RuntimeError when the Hub
    cannot be reached.
    """
    name = str(name)
    if name == "demo":
        return read(_demo_folder(), "demo")
    known = CATALOG.get(name)
    if known is None and Path(name).is_dir():
        path = Path(name).resolve()
        return read(path, path.name)
    hub = known.hub if known else name
    if hub is None or not re.fullmatch(r"[\w.-]+/[\w.-]+", hub) or Path(name).is_absolute():
        near = difflib.get_close_matches(name, CATALOG, n=3, cutoff=0.5) or list(CATALOG)
        raise ValueError(f"model {name!r} is no folder, no Hub id (org/name) and not in the catalog: {', '.join(near)}")
    path = _download(hub, revision or (known.revision if known else None))
    return read(path, hub, path.name)


def _download(hub: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    what = hub if revision is None else f"{hub}@{revision}"
    try:
        return Path(snapshot_download(hub, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except GatedRepoError as error:
        raise ValueError(f"{what} is gated: accept its licence on the Hub, then `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"{what} is not on the Hub, or is private: `hf auth login`") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise RuntimeError(
            f"could not download {what}, and the cache does not hold it: {error}. Go online once, or give a folder "
            "with config.json, model.safetensors and tokenizer.json"
        ) from error


def _demo_folder() -> Path:
    """The embedded model: a folder of the checkout, or package data of the wheel."""
    # the checkout first: an editable install holds a copy of the model as it was on that day
    checkout = Path(__file__).parents[2] / "artifacts" / "demo-model"
    if checkout.is_dir():
        return checkout
    try:
        return Path(str(resources.files("kvq_demo_model") / "config.json")).parent
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "the demo model is neither in artifacts/demo-model nor installed (kvq_demo_model)"
        ) from error
