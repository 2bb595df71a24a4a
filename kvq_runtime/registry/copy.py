"""Copy versions between a folder and a Hub: bytes, number, attachments, records and yanks, but no aliases.

A copy can be repeated and resumes: equal content is left alone, other content under the same number is a Conflict.
"""

import re
from typing import Any

from kvq_runtime.artifact import artifact, folder
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.errors import Conflict
from kvq_runtime.registry.events import Version
from kvq_runtime.registry.hub import HubRegistry
from kvq_runtime.registry.reference import HUB, Reference, parse
from kvq_runtime.registry.registry import Kind, Registry


def copy_version(source: Registry, name: str, version: Version, target: Registry) -> dict[str, Any]:
    """Copy one version under its number, with its records and yank; return the outcome as a row.

    Raises Conflict if the target has other bytes under this number, or these bytes under another one; ArtifactError if
    the source is damaged.
    """
    there = target.state(name).with_digest(version.sha256)
    if there is not None and there.version != version.version:
        raise Conflict(
            f"{target.url} has these bytes of {name} as {there.version}, not {version.version}; use that version"
        )
    if there is None:
        data = artifact.read(source.fetch(name, version), version.sha256, version.size)
        attachments = source.attachments(name, version)
        if "README.md" in attachments:
            text = addressed(attachments["README.md"].decode(), target.url, name, version.version)
            attachments["README.md"] = text.encode()
        target.publish(name, data, version.version, attachments)
    kinds: tuple[Kind, ...] = ("evaluations", "signatures")
    for kind in kinds:
        present = {data for _, data in target.records(kind, version.sha256, name)}
        for _, data in source.records(kind, version.sha256, name):
            if data not in present:
                target.add_record(kind, version.sha256, data, name)
    if version.yanked is not None and (there is None or there.yanked is None):
        target.yank(name, version.version, version.yanked)
    result = "published" if there is None else "was there already"
    return {"name": name, "version": version.version, "result": result}


def push_to_hub(made: Artifact, repo_id: str, *, version: str | None = None, private: bool | None = None) -> str:
    """Publish an artifact as a version of "org/name", with a card; returns "org/name@1.2.0".

    made      what `load_artifact` returned
    repo_id   a model repository, created if it does not exist; one with foreign content is rejected
    version   its number; None is the next
    private   whether a created repository is private; None is the Hub's default
    The same bytes are published once: their version is returned again. No alias is moved: `kvq promote` does that.
    Raises ValueError for another repo_id, Conflict for a number that is taken or a repository with foreign content,
    PermissionError or RuntimeError if the Hub refuses or does not answer.
    """
    target = parse(repo_id)
    if not isinstance(target, Reference) or target.by != "default" or not target.registry.startswith(HUB):
        raise ValueError(f"push_to_hub to {repo_id!r:.160}; use ORG/NAME, as in my-org/qwen2.5-7b-aqua-2bit")
    org, data = target.registry.removeprefix(HUB), artifact.to_bytes(made)
    attachments = {folder.CARD: folder.card(made, f"{HUB}{org}/{target.name}")}
    published = HubRegistry(org, private).publish(target.name, data, version, attachments)
    return f"{org}/{target.name}@{published.version}"


def addressed(text: str, url: str, name: str, version: str | None = None) -> str:
    """Return the card with a snippet that loads the artifact, or one version of it, from the registry at `url`."""
    reference = (f"{url}/{name}" if url.startswith("hf://") else name) + (f"@{version}" if version else "")
    call = rf'KVQCache\.from_pretrained\("(?:hf://[^/"]+/)?{re.escape(name)}(?:@[^"]*)?"'
    return re.sub(call, f'KVQCache.from_pretrained("{reference}"', text)
