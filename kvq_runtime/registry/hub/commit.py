"""Make one change on a Hub as one commit whose parent is the commit that was read.

look → decide → commit → done
                refused, another commit came first → look again; a promote or rollback ends in a Conflict
                no answer, or a transient fault → look: if the event is there, done; else try again, a few times
"""

import random
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from kvq_runtime.disk import faults
from kvq_runtime.errors import Conflict
from kvq_runtime.registry import card
from kvq_runtime.registry.events import Change, Event, Promote, Publish, Rollback, State
from kvq_runtime.registry.hub import ask, client, index
from kvq_runtime.registry.hub.index import Index, folder
from kvq_runtime.registry.hub.snapshot import Snapshot

TRIES = 100
_INITIAL_FILES = {".gitattributes", "README.md", "LICENSE"}  # the Hub's form for a new repository may create these


def commit_change(
    repo: str,
    look: Callable[[], Snapshot],
    decide: Callable[[State], Change | None],
    content: Mapping[str, bytes],
    about: Mapping[str, Any],
    private: bool | None = None,
) -> Snapshot:
    """Commit the change that `decide` returns; returns main with the change in it.

    look      reads main, from the Hub
    decide    as in Registry.change
    content   of a publish: its files by name
    about     of a publish: its entry in kvq.json
    private   whether a repository that has to be created is private; None is the Hub's default
    Raises Conflict if the change contradicts another one that came first, and the errors of `client.translate_errors`.
    """
    name, unanswered, refused, failures = repo.rpartition("/")[2], [], False, 0
    for _ in range(TRIES):
        with client.translate_errors(repo):
            head = look()
        if any(event in head.state.events for event in unanswered):  # the answer was lost, the commit was not
            return head
        change = decide(head.state)
        if change is None:
            return head
        if refused and isinstance(change, (Promote, Rollback)):
            raise Conflict(f"{repo}: somebody changed {name} first; look at kvq history {name}, then retry")
        if head.commit is None:
            _create(repo, private)
            continue
        if not head.state.events:
            _check_unused(repo, head.commit)
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = Event(len(head.state.events) + 1, name, at, change)
        try:
            return _commit(repo, head, event, content, about)
        except Exception as error:
            delay = client.retry_delay(error)
            if client.http_status(error) in (409, 412):
                refused = True
                time.sleep(random.uniform(0.05, 0.5))
            elif delay is not None and delay <= client.MAX_WAIT and failures < client.TRIES - 1:
                unanswered.append(event)
                client.back_off(failures, delay)
                failures += 1
            else:
                with client.translate_errors(repo):
                    raise
    raise Conflict(f"{repo}: {TRIES} other changes came first; try again")


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


def _commit(
    repo: str, head: Snapshot, event: Event, content: Mapping[str, bytes], about: Mapping[str, Any]
) -> Snapshot:
    from huggingface_hub import CommitOperationAdd

    after = Index(head.state.apply(event), dict(head.index.about))
    added: dict[str, bytes] = {}
    if isinstance(event.change, Publish):
        place = folder(event.change.version)
        after = Index(after.state, {**after.about, event.change.version: about})
        added |= {f"{place}/{file}": data for file, data in content.items()}
        text = content.get("README.md", f"# {event.name}\n".encode()).decode(errors="replace")
        added["README.md"] = card.for_repository(text, content, place).encode()
    added[index.FILE] = index.to_bytes(after)
    operations = [CommitOperationAdd(path, data) for path, data in added.items()]
    alias = f"{event.change.alias} " if isinstance(event.change, (Promote, Rollback)) else ""
    title = f"{event.change.kind} {alias}{event.change.version}"
    api = client.api()
    api.preupload_lfs_files(repo, operations, free_memory=False)
    faults.point("hub.uploaded")
    commit = api.create_commit(repo, operations, commit_message=title, parent_commit=head.commit)
    faults.point("hub.committed")
    return Snapshot(ask.check_commit(commit.oid), after)
