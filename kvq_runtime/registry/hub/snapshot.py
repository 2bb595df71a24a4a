"""Read kvq.json of a Hub repository at a commit, and find the commit at the head of main.

A repository is org/name: its last part is the name of the artifact.
"""

import warnings
from dataclasses import dataclass

from kvq_runtime.disk import files
from kvq_runtime.registry.events import State
from kvq_runtime.registry.hub import ask, cache, client, index
from kvq_runtime.registry.hub.index import Index


@dataclass(frozen=True)
class Snapshot:
    """The index of a repository at a commit of main; `commit` is None if there is no repository yet."""

    commit: str | None
    index: Index

    @property
    def state(self) -> State:
        """Versions, aliases and history at that commit."""
        return self.index.state


def missing(repo: str) -> Snapshot:
    """The snapshot of a repository that does not exist."""
    return Snapshot(None, Index(State(_name(repo))))


def read(repo: str, commit: str) -> Snapshot:
    """The snapshot at a commit; the state is empty if the commit has no kvq.json."""
    from huggingface_hub.errors import RemoteEntryNotFoundError

    data = cache.whole(repo, index.FILE, commit, index.LIMIT)
    try:
        data = data or files.read(cache.download(repo, index.FILE, commit, index.LIMIT), index.LIMIT)
    except RemoteEntryNotFoundError:
        return Snapshot(commit, Index(State(_name(repo))))
    return Snapshot(commit, index.from_bytes(data, _name(repo), f"{repo} at {commit[:12]}"))


def head(repo: str) -> str:
    """The commit at the head of main, asked of the Hub; raises huggingface_hub's error if offline."""
    commit = ask.head(repo)
    cache.note_head(repo, commit)
    return commit


def head_or_last_known(repo: str) -> str:
    """`head`; offline, or with a warning if the Hub does not answer, the head that was last seen."""
    last = cache.last_head(repo)
    if last is not None and client.is_offline():
        return last
    try:
        return head(repo)
    except Exception as error:
        if last is None or client.retry_delay(error) is None:
            raise
        text = "the Hub did not answer; aliases and versions are as of its last answer"
        warnings.warn(f"{repo}: {text} ({client.redacted(error)})", stacklevel=5)
        return last


def _name(repo: str) -> str:
    return repo.rpartition("/")[2]
