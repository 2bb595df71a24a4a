"""Point this process at a `hub_server.Hub`, with a cache of its own and a token."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import pytest
from hub_server import Hub
from huggingface_hub import constants
from huggingface_hub.utils import disable_progress_bars

TOKEN = "hf_" + "canary" * 5  # never to be seen outside a request to the Hub itself


@contextmanager
def hub_for(monkeypatch: pytest.MonkeyPatch, folder: Path, token: str | None = TOKEN) -> Iterator[Hub]:
    """A running Hub that this process' client talks to."""
    disable_progress_bars()
    with Hub() as hub:
        hub.users = {TOKEN: ("me", "write"), "hf_reader": ("reader", "read")}
        use(monkeypatch, hub.url, folder, token)
        yield hub
        huggingface_hub.close_session()


def use(monkeypatch: pytest.MonkeyPatch, url: str, folder: Path, token: str | None = TOKEN) -> None:
    """Set what the client reads: address, token, cache, and that it may use the network."""
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hf-cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))
    (folder / "harnesses.json").write_text("{}")  # else the client asks huggingface.co who calls
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(folder / "harnesses.json"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("time.sleep", _shorter)  # the client waits whole seconds between tries
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)


def _shorter(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
    sleep(min(seconds, 0.02))


def clear(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Forget what was downloaded: another machine."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "another-hf-cache"))


def asked(hub: Hub) -> list[str]:
    """What the Hub was asked."""
    return [request.line for request in hub.requests]
