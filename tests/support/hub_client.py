"""Point this process' huggingface_hub at a `hub_server.Hub`, with its own cache and a token."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import huggingface_hub
import pytest
from hub_server import Hub
from huggingface_hub import constants
from huggingface_hub.utils import disable_progress_bars
from patience import PATIENCE

from kvq_runtime.registry.hub import client
from kvq_runtime.registry.hub import index as hub_index

NAME = "tiny-2bit"
REPO = f"org/{NAME}"
CARD = {"README.md": b"---\nlibrary_name: kvq\ntags: [kvq]\n---\n# card\n![e](error.png)\n", "error.png": b"png"}
TOKEN = "hf_" + "canary" * 5  # must appear in requests to the Hub only


@contextmanager
def hub_for(monkeypatch: pytest.MonkeyPatch, folder: Path, token: str | None = TOKEN) -> Iterator[Hub]:
    """Start a Hub that this process' client talks to."""
    disable_progress_bars()
    with Hub() as hub:
        hub.users = {TOKEN: ("me", "write"), "hf_reader": ("reader", "read")}
        use(monkeypatch, hub.url, folder, token)
        yield hub
        huggingface_hub.close_session()


def use(monkeypatch: pytest.MonkeyPatch, url: str, folder: Path, token: str | None = TOKEN) -> None:
    """Set the client's address, token and cache, and allow requests."""
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hf-cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))
    if not (folder / "harnesses.json").exists():
        (folder / "harnesses.json").write_text("{}")  # else the client requests it from huggingface.co
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(folder / "harnesses.json"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    # 10 s by default; then it retries, or asks the cache
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        monkeypatch.setattr(constants, name, PATIENCE)
    monkeypatch.setattr(client, "SILENCE", PATIENCE)
    monkeypatch.setattr("time.sleep", _shorter)  # the client waits whole seconds between tries
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)


def _shorter(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
    sleep(min(seconds, 0.02))


def clear(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Use an empty cache, as on another machine."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "another-hf-cache"))


def asked(hub: Hub) -> list[str]:
    """The requests to the Hub, `METHOD /path`."""
    return [request.line for request in hub.requests]


def checked_versions(hub: Hub, name: str) -> list[str]:
    """The versions of a name, after comparing every file that kvq.json names with its digest."""
    repo = hub.repos[f"org/{name}"]
    tree = repo.at("main").tree
    if hub_index.FILE not in tree:
        assert not [path for path in tree if path.startswith("versions/")]
        return []
    index = hub_index.from_bytes(hub.content(repo, tree[hub_index.FILE]), name, "test")
    for version in index.state.versions.values():
        files = {"kvq.safetensors": {"sha256": version.sha256, "size": version.size}} | dict(version.files)
        for file, entry in files.items():
            data = hub.content(repo, tree[f"versions/{version.version}/{file}"])
            assert (sha256(data).hexdigest(), len(data)) == (entry["sha256"], entry["size"])
    return list(index.state.versions)


def tidy(hub: Hub) -> list[str]:
    """`checked_versions` of NAME, which must have no folders of other versions."""
    tree, versions = hub.repos[REPO].at("main").tree, checked_versions(hub, NAME)
    assert {path.split("/")[1] for path in tree if path.startswith("versions/")} == set(versions)
    return versions
