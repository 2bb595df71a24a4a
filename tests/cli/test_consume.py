"""docs/consume.md, as it is written, where nothing but the base install and the extra `sign` is there."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_artifact as tiny
from hub_client import TOKEN, asked
from hub_server import Hub
from lean import BLOCKED
from patience import PATIENCE

from kvq_runtime.registry.hub import HubRegistry

ROOT = Path(__file__).parents[2]
NAME = "demo-aqua-2bit"
UNBLOCKED = "import sys\n"  # one section is about the extra sign
pytestmark = pytest.mark.skipif(not all(map(shutil.which, ("git", "openssl"))), reason="the page uses git and openssl")


def sections() -> dict[str, list[tuple[str, str]]]:
    """{heading: [(language, block)]} of docs/consume.md."""
    found, text = {}, (ROOT / "docs" / "consume.md").read_text()
    for part in text.split("\n## ")[1:]:
        blocks = re.findall(r"```(\w+)\n(.*?)```", part, re.DOTALL)
        found[part.partition("\n")[0]] = blocks
    return found


@pytest.fixture
def team(tmp_path, monkeypatch):
    """Run a section's blocks as the team would: in its folder, with its environment; the output of each command."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "KVQ_HOME": str(tmp_path / "kvq"),
                   "HF_HOME": str(tmp_path / "hf"), "KVQ_REGISTRY": "hf://my-org", "PYTHONPATH": str(ROOT),
                   "OMP_NUM_THREADS": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_AUTHOR_NAME": "team",
                   "GIT_AUTHOR_EMAIL": "team@localhost", "GIT_COMMITTER_NAME": "team",
                   "GIT_COMMITTER_EMAIL": "team@localhost"}  # fmt: skip
    folder = tmp_path / "service"
    subprocess.run(["git", "init", "-q", str(folder)], check=True)

    def run(heading: str, blocked: str = BLOCKED, **more: str) -> list[str]:
        said = []
        for language, block in sections()[heading]:
            for line in block.splitlines() if language == "sh" else [block]:
                line = line.replace("/mnt/copy", str(tmp_path / "copy"))
                words = shlex.split(line) if language == "sh" else []
                body = "from kvq_runtime.cli.main import main; sys.exit(main())" if language == "sh" else block
                command = (
                    words
                    if words[0:1] in (["openssl"], ["git"])
                    else [sys.executable, "-c", blocked + body, *words[1:]]
                )
                done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**environment, **more})
                assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
                said.append(done.stdout)
        return said

    with Hub("my-org") as hub:
        hub.users = {TOKEN: ("me", "write"), "hf_team": ("team", "write")}
        environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_team"}
        environment |= dict.fromkeys(("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"), str(PATIENCE))
        run.hub, run.folder = hub, folder
        yield run


@pytest.fixture
def publisher(team, tmp_path, monkeypatch) -> HubRegistry:
    from hub_client import use

    use(monkeypatch, team.hub.url, tmp_path)
    return HubRegistry("my-org")


@pytest.mark.slow
def test_the_day(team, publisher, tmp_path):
    hub, lock = team.hub, team.folder / "kvq.lock"
    pinned = lambda: json.loads(lock.read_text())["version"]  # noqa: E731
    publisher.publish(NAME, tiny.data(0), attachments={"README.md": b"# card"})
    publisher.promote(NAME, "1.0.0", force=True)
    listed, shown = team("Look")
    assert NAME in listed and "tiny-model" in shown
    team("Lock")
    assert pinned() == "1.0.0" and (team.folder / "artifact" / "kvq.safetensors").read_bytes() == tiny.data(0)

    publisher.publish(NAME, tiny.data(1, corpus="b" * 64))
    publisher.promote(NAME, "1.1.0", force=True)  # the alias moves, the lock does not
    team("In CI")
    assert (team.folder / "artifact" / "kvq.safetensors").read_bytes() == tiny.data(0)
    hub.requests.clear()
    (said,) = team("Load, offline", HF_HUB_OFFLINE="1")
    assert said.startswith("tiny ") and asked(hub) == []
    assert team("Load, offline") == [said] and asked(hub) == []  # nor where it might ask

    history, shown, *_ = team("Upgrade")
    assert "promote" in history and "1.1.0" in shown and pinned() == "1.1.0"
    hub.requests.clear()
    team("Roll back")
    assert pinned() == "1.0.0" and not [line for line in asked(hub) if "GET /lfs" in line]
    team("A copy")
    (again,) = team("Load, offline", KVQ_REGISTRY=f"file://{tmp_path}/copy", HF_ENDPOINT="http://127.0.0.1:9")
    assert again == said


@pytest.mark.slow
def test_the_day_with_signatures(team, publisher):
    pytest.importorskip("model_signing")
    publisher.publish(NAME, tiny.data(0))
    publisher.publish(NAME, tiny.data(1, corpus="b" * 64))
    publisher.promote(NAME, "1.1.0", force=True)
    team("Demand a signature", blocked=UNBLOCKED)
    lock = json.loads((team.folder / "kvq.lock").read_text())
    assert lock["version"] == "1.1.0" and lock["signature"] and "PUBLIC KEY" in lock["key"]
