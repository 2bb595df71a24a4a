"""Write one event on a Hub as one commit whose parent is the commit that was read.

A refusal means that another commit came first. No answer, or a transient fault, leaves open whether it was made: main
is read again before anything else is tried.
"""

import random
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvq_runtime.disk import faults
from kvq_runtime.errors import Conflict
from kvq_runtime.registry import card
from kvq_runtime.registry.events import Event, Promote, Publish, Rollback, State
from kvq_runtime.registry.hub import ask, client, index
from kvq_runtime.registry.hub.index import folder
from kvq_runtime.registry.place import Head

_INITIAL_FILES = {".gitattributes", "README.md", "LICENSE"}  # the Hub's form for a new repository may create these


def write(
    repo: str,
    head: Head,
    after: State,
    content: Mapping[str, bytes],
    about: Mapping[str, Any],
    unanswered: list[Event],
    private: bool | None,
) -> Head | None:
    """`Place.write`; `private` is of a repository that has to be created, None the Hub's default."""
    if head.commit is None:
        return _create(repo, private)
    if not head.state.events:
        _check_unused(repo, head.commit)
    event = after.events[-1]
    try:
        return _commit(repo, head, after, content, about)
    except Exception as error:
        delay = client.retry_delay(error)
        if client.http_status(error) in (409, 412):
            time.sleep(random.uniform(0.05, 0.5))
        elif delay is not None and delay <= client.MAX_WAIT and len(unanswered) < client.TRIES - 1:
            client.back_off(len(unanswered), delay)
            unanswered.append(event)
        else:
            with client.translate_errors(repo):
                raise
    return None


def _create(repo: str, private: bool | None) -> None:
    with client.translate_errors(repo):
        client.retry(lambda: client.api().create_repo(repo, private=private, exist_ok=True))
    faults.point("hub.created")


def _check_unused(repo: str, commit: str) -> None:
    """Raise Conflict for a repository without kvq.json that holds anything but a new repository's files."""
    with client.translate_errors(repo):
        others = sorted(ask.tree(repo, commit).keys() - _INITIAL_FILES)
    if others:
        raise Conflict(
            f"{repo} has no kvq.json, but {others[0]} and {len(others) - 1} other files: it is somebody else's, or its "
            "kvq.json was deleted; restore that, or choose another name"
        )


def _commit(repo: str, head: Head, after: State, content: Mapping[str, bytes], about: Mapping[str, Any]) -> Head:
    from huggingface_hub import CommitOperationAdd

    event, written = after.events[-1], replace(head, state=after)
    added: dict[str, bytes] = {}
    if isinstance(event.change, Publish):
        place = folder(event.change.version)
        written = replace(written, about={**head.about, event.change.version: about})
        added |= {f"{place}/{file}": data for file, data in content.items()}
        text = content.get("README.md", f"# {event.name}\n".encode()).decode(errors="replace")
        added["README.md"] = card.for_repository(text, content, place).encode()
    added[index.FILE] = index.to_bytes(written)
    operations = [CommitOperationAdd(path, data) for path, data in added.items()]
    alias = f"{event.change.alias} " if isinstance(event.change, (Promote, Rollback)) else ""
    title = f"{event.change.kind} {alias}{event.change.version}"
    api = client.api()
    api.preupload_lfs_files(repo, operations, free_memory=False)
    faults.point("hub.uploaded")
    commit = api.create_commit(repo, operations, commit_message=title, parent_commit=head.commit)
    faults.point("hub.committed")
    return replace(written, commit=ask.check_commit(commit.oid))
