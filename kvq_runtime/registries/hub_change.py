"""Make one change on a Hub: one commit, whose parent is what was read.

look → decide → commit → done
                refused, another came first → look again; a promote or rollback stops and asks
                no answer, or a fault that passes → look: is the event there? else again, a few times
"""

import random
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kvq_runtime import faults
from kvq_runtime.errors import Conflict
from kvq_runtime.registries import card, hub_api, hub_index
from kvq_runtime.registries.events import Change, Event, Promote, Publish, Rollback, State
from kvq_runtime.registries.hub_index import Index, Seen, folder

if TYPE_CHECKING:
    from kvq_runtime.registries.hub import HubRegistry

TRIES = 100
_NEW = {".gitattributes", "README.md", "LICENSE"}  # what the Hub's own form for a new repository makes


def change(
    registry: "HubRegistry",
    name: str,
    decide: Callable[[State], Change | None],
    content: Mapping[str, bytes],
    about: Mapping[str, Any],
) -> Seen:
    """Commit what `decide` says; returns main with the change in it.

    content, about   of a publish: its files, and what kvq.json says of it
    """
    repo, sent, refused, failed = registry.repo(name), [], False, 0
    for _ in range(TRIES):
        with hub_api.asking(repo):
            seen = registry.look(name)
        if any(event in seen.index.state.events for event in sent):  # an answer was lost, the commit was not
            return seen
        wanted = decide(seen.index.state)
        if wanted is None:
            return seen
        if refused and isinstance(wanted, (Promote, Rollback)):
            raise Conflict(f"{repo}: somebody changed {name} first; look at kvq history {name}, then say it again")
        if seen.commit is None:
            _create(repo, registry.private)
            continue
        if not seen.index.state.events:
            _check_ours(repo, seen.commit)
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = Event(len(seen.index.state.events) + 1, name, at, wanted)
        try:
            return _commit(repo, seen, event, content, about)
        except Exception as error:
            wait = hub_api.passing(error)
            if hub_api.status(error) in (409, 412):
                refused = True
                time.sleep(random.uniform(0.05, 0.5))
            elif wait is not None and wait <= hub_api.LONGEST and failed < hub_api.TRIES - 1:
                sent.append(event)
                hub_api.pause(failed, wait)
                failed += 1
            else:
                with hub_api.asking(repo):
                    raise
    raise Conflict(f"{repo}: {TRIES} other changes came first; try again")


def _create(repo: str, private: bool | None) -> None:
    with hub_api.asking(repo):
        hub_api.patiently(lambda: hub_api.api().create_repo(repo, private=private, exist_ok=True))
    faults.point("hub.created")


def _check_ours(repo: str, commit: str) -> None:
    """Conflict for a repository without kvq.json that holds anything but what a new one may hold."""
    with hub_api.asking(repo):
        tree = hub_api.patiently(lambda: list(hub_api.api().list_repo_tree(repo, recursive=True, revision=commit)))
    other = sorted(file.path for file in tree if file.path not in _NEW)
    if other:
        raise Conflict(
            f"{repo} has no kvq.json, but {other[0]} and {len(other) - 1} other files: it is somebody else's, or its "
            "kvq.json was deleted; restore that, or choose another name"
        )


def _commit(repo: str, seen: Seen, event: Event, content: Mapping[str, bytes], about: Mapping[str, Any]) -> Seen:
    from huggingface_hub import CommitOperationAdd

    index = Index(seen.index.state.apply(event), dict(seen.index.about))
    added: dict[str, bytes] = {}
    if isinstance(event.change, Publish):
        place = folder(event.change.version)
        index = Index(index.state, {**index.about, event.change.version: about})
        added |= {f"{place}/{file}": data for file, data in content.items()}
        text = content.get("README.md", f"# {event.name}\n".encode()).decode(errors="replace")
        added["README.md"] = card.on_hub(text, content, place).encode()
    added[hub_index.FILE] = hub_index.to_bytes(index)
    operations = [CommitOperationAdd(path, data) for path, data in added.items()]
    alias = f"{event.change.alias} " if isinstance(event.change, (Promote, Rollback)) else ""
    title = f"{event.change.kind} {alias}{event.change.version}"
    api = hub_api.api()
    api.preupload_lfs_files(repo, operations, free_memory=False)
    faults.point("hub.uploaded")
    done = api.create_commit(repo, operations, commit_message=title, parent_commit=seen.commit)
    faults.point("hub.committed")
    return Seen(done.oid, index)
