"""Keep the git tag v1.2.0 at the commit that published 1.2.0: for people and `hf download`; no load depends on it.

A missing tag is created again. A tag that points to another commit has been moved, and is an error.
"""

import warnings

from kvq_runtime.errors import ArtifactError, Conflict
from kvq_runtime.registry.events import Publish, Version
from kvq_runtime.registry.hub import ask, client, index
from kvq_runtime.registry.place import Head


def name_of(version: Version) -> str:
    """The tag of a version."""
    return f"v{version.version}"


def ensure(repo: str, version: Version, head: Head) -> None:
    """Create the tag of a published version if it is missing, else `check` it.

    head   main after the publication
    Warns if the tag cannot be set, since the version is published without it. Raises Conflict for a tag that points
    elsewhere, ArtifactError if no commit of main published the version.
    """
    tag = name_of(version)
    try:
        target = ask.tags(repo).get(tag)
        if target is None:
            commit = head.commit if _ends_with(head, version) else publishing_commit(repo, version)
            if commit is None:
                text = f"no commit on main published {version.version}; the history of the repository was rewritten"
                raise ArtifactError(f"{repo}: {text}")
            client.api().create_tag(repo, tag=tag, revision=commit, exist_ok=True)
            return
    except ArtifactError:
        raise
    except Exception as error:
        text = f"{tag} was not set ({client.redacted(error)}); publish the same bytes again to set it"
        warnings.warn(f"{repo}: {text}", stacklevel=4)
        return
    check(repo, version, target)


def check(repo: str, version: Version, target: str) -> None:
    """Raise Conflict unless `target`, the commit a tag points to, published the version."""
    if not published_by(repo, version, target):
        tag = name_of(version)
        raise Conflict(
            f"{repo}: tag {tag} was moved to {target[:12]}, which did not publish {version.version}. kvq.json on main "
            f"is unaffected and is what kvq reads; find out who moved the tag, then `hf repo tag delete {repo} {tag}` "
            "and publish again"
        )


def publishing_commit(repo: str, version: Version) -> str | None:
    """The commit of main that published a version; None if there is none."""
    published = f"publish {version.version}"
    found = (commit for commit, title in ask.commits(repo) if title == published)
    return next((commit for commit in found if published_by(repo, version, commit)), None)


def published_by(repo: str, version: Version, commit: str) -> bool:
    """True if the last event of kvq.json at a commit is this publication."""
    return _ends_with(index.at(repo, commit), version)


def _ends_with(head: Head, version: Version) -> bool:
    events = head.state.events
    change = events[-1].change if events else None
    return isinstance(change, Publish) and (change.version, change.sha256) == (version.version, version.sha256)
