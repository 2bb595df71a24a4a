"""Point this process' huggingface_hub at a `hub_server.Hub`, with a cache of its own and a token."""

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

from kvq_runtime.disk import strict_json
from kvq_runtime.registry import events, hub_client

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
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))
    if not (folder / "harnesses.json").exists():
        (folder / "harnesses.json").write_text("{}")  # else the client requests it from huggingface.co
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(folder / "harnesses.json"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(hub_client, "SILENCE", PATIENCE)
    monkeypatch.setattr("time.sleep", _shorter)  # the client waits whole seconds between tries
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", hub_client.TOKEN_FILE):
        monkeypatch.delenv(name, raising=False)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)


def _shorter(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
    sleep(min(seconds, 0.02))


def clear(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Use an empty cache, as on another machine."""
    monkeypatch.setenv("KVQ_HOME", str(folder / "another-home"))


def asked(hub: Hub) -> list[str]:
    """The requests to the Hub, `METHOD /path`."""
    return [request.line for request in hub.requests]


def whole_versions(hub: Hub, name: str = NAME) -> list[str]:
    """The versions of a name, after comparing every file that kvq.json names with its digest."""
    files = hub.repos[f"org/{name}"].files
    index = strict_json.loads(files.get("kvq.json", b'{"events":[]}'), "test")
    state = events.fold(name, (events.from_json(event, n, name) for n, event in enumerate(index["events"], 1)))
    for version in state.versions.values():
        for file, (digest, size) in version.content.items():
            data = files[f"versions/{version.version}/{file}"]
            assert (sha256(data).hexdigest(), len(data)) == (digest, size)
    assert {path.split("/")[1] for path in files if path.startswith("versions/")} == set(state.versions)
    return list(state.versions)
