"""Keep the git tag v1.2.0 at the commit that published 1.2.0: for people and `hf download`; no load depends on it.

A tag that is missing is made again; one that points elsewhere is an error, since somebody moved it.
"""

import warnings
from typing import TYPE_CHECKING

from kvq_runtime.errors import ArtifactError, Conflict
from kvq_runtime.registries import hub_api
from kvq_runtime.registries.events import Publish, Version
from kvq_runtime.registries.hub_index import Seen

if TYPE_CHECKING:
    from kvq_runtime.registries.hub import HubRegistry


def mend(registry: "HubRegistry", name: str, version: Version, seen: Seen) -> None:
    """Make the tag of a version that main has, or check where it points. `seen`: main, after the publication."""
    repo, tag = registry.repo(name), f"v{version.version}"
    api = hub_api.api()
    try:
        there = hub_api.patiently(lambda: {one.name: one.target_commit for one in api.list_repo_refs(repo).tags})
        if tag not in there:
            commit = seen.commit if _published(seen, version) else commit_of(registry, name, version)
            if commit is None:
                raise ArtifactError(f"{repo}: no commit on main published {version.version}; its history was rewritten")
            api.create_tag(repo, tag=tag, revision=commit, exist_ok=True)
            return
    except ArtifactError:
        raise
    except Exception as error:  # the version is there; a tag alone is not worth a failure
        warnings.warn(f"{repo}: {tag} was not set ({hub_api.redacted(error)}); publish again sets it", stacklevel=4)
        return
    check(registry, name, version, there[tag])


def check(registry: "HubRegistry", name: str, version: Version, target: str) -> None:
    """Conflict if a tag does not point to the commit that published its version."""
    if not published_by(registry, name, version, target):
        repo, tag = registry.repo(name), f"v{version.version}"
        raise Conflict(
            f"{repo}: tag {tag} was moved to {target[:12]}, which did not publish {version.version}. kvq.json on main "
            f"counts, and is unharmed; find out who moved it, then `hf repo tag delete {repo} {tag}` and publish again"
        )


def commit_of(registry: "HubRegistry", name: str, version: Version) -> str | None:
    """The commit of main that published a version."""
    title = f"publish {version.version}"
    for commit in hub_api.patiently(lambda: hub_api.api().list_repo_commits(registry.repo(name))):
        if commit.title == title and published_by(registry, name, version, commit.commit_id):
            return commit.commit_id
    return None


def published_by(registry: "HubRegistry", name: str, version: Version, commit: str) -> bool:
    """Whether the last event of kvq.json at a commit is this publication."""
    return _published(registry.at(name, commit), version)


def _published(seen: Seen, version: Version) -> bool:
    events = seen.index.state.events
    change = events[-1].change if events else None
    return isinstance(change, Publish) and (change.version, change.sha256) == (version.version, version.sha256)
