"""Ask a Hub what it has: the head of main, files of a commit, tags, commits, names; answers are checked for form."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

from kvq_runtime.registry.hub import client, receive

_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class File:
    """A file of a commit: `sha256` of a large one, else None; `at`, if asked, is when it last changed, in seconds."""

    size: int
    sha256: str | None
    at: float


def check_commit(commit: Any) -> str:
    """The commit, if it is 40 hex digits; else a ValueError."""
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise ValueError(f"commit {commit!r:.80}; expected 40 digits of 0-9 a-f")
    return commit


def head(repo: str) -> str:
    """The commit at the head of main."""
    from huggingface_hub import constants

    limit = constants.HF_HUB_ETAG_TIMEOUT  # seconds; a small answer, which every other request waits for
    found = receive.answer(f"/api/models/{repo}", {"expand": "sha"}, limit)
    with _formed(repo):
        return check_commit(found["sha"])


def tree(repo: str, commit: str, folder: str = "", times: bool = False) -> dict[str, File]:
    """{path: file} of all files of a commit, or of those in a folder.

    times   ask when each was last changed
    """
    path = f"/api/models/{repo}/tree/{commit}{'/' + quote(folder) if folder else ''}"
    found = {}
    for row in receive.pages(path, {"recursive": "true", **({"expand": "true"} if times else {})}):
        with _formed(repo):
            if row["type"] == "file":
                at = datetime.fromisoformat(row["lastCommit"]["date"]).timestamp() if times else 0.0
                found[str(row["path"])] = File(int(row["size"]), (row.get("lfs") or {}).get("oid"), at)
    return found


def tags(repo: str) -> dict[str, str]:
    """{tag: the commit it points to}."""
    found = receive.answer(f"/api/models/{repo}/refs")
    with _formed(repo):
        return {str(tag["name"]): check_commit(tag["targetCommit"]) for tag in found["tags"]}


def commits(repo: str) -> Iterator[tuple[str, str]]:
    """(commit, title) of main, the newest first."""
    for row in receive.pages(f"/api/models/{repo}/commits/main"):
        with _formed(repo):
            yield check_commit(row["id"]), str(row["title"])


def names(org: str) -> list[str]:
    """Every model of an organization whose card has the tag kvq, as the Hub's search lists them now."""
    found = []
    for row in receive.pages("/api/models", {"author": org, "filter": "kvq"}):
        with _formed(f"{org}/*"):
            owner, _, name = row["id"].partition("/")
            found += [name] if owner == org else []
    return found


def check_writable(org: str) -> None:
    """Raise PermissionError if the token may not write to an organization; fine-grained tokens are not checked."""
    from huggingface_hub import get_token

    if client.is_offline():
        raise RuntimeError(
            f"hf://{org}: offline (HF_HUB_OFFLINE), nothing can be published; go online, or name a folder"
        )
    token = client.token()
    if token is False or not (token if isinstance(token, str) else get_token()):
        raise PermissionError(f"hf://{org}: no token to write with: `hf auth login`, or set HF_TOKEN")
    with client.translate_errors(f"{org}/*"):
        me = receive.answer("/api/whoami-v2")
    with _formed(org):
        role = me.get("auth", {}).get("accessToken", {}).get("role")
        owners = [me.get("name"), *(group.get("name") for group in me.get("orgs", []))]
    if role == "read":
        raise PermissionError(f"hf://{org}: the token is read-only; create one with write access at {client.place()}")
    if org not in owners:
        raise PermissionError(f"hf://{org}: {owners[0]} is not a member of it; ask to be added, or push elsewhere")


@contextmanager
def _formed(what: str) -> Iterator[None]:
    """Turn what comes of an answer of another form into a RuntimeError."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        text = f"{what}: the Hub at {client.place()} gave an answer of another form ({client.redacted(error)})"
        raise RuntimeError(f"{text}; check HF_ENDPOINT") from None
