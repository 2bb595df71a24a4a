"""Copy versions from one registry to another, of whatever kind: bytes, number, attachments and records.

A copy can be repeated and resumes: equal content is left alone, other content under the same number is a Conflict.
"""

from collections.abc import Iterator
from typing import Any

from kvq_runtime.artifact import artifact, folder
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.errors import Conflict
from kvq_runtime.registry import card
from kvq_runtime.registry.events import State, Version
from kvq_runtime.registry.hub.client import Access, using
from kvq_runtime.registry.hub.registry import HubRegistry
from kvq_runtime.registry.reference import HUB, Reference, parse
from kvq_runtime.registry.registry import Kind, Registry
from kvq_runtime.registry.sound import sound


def copy(source: Registry, name: str, version: Version, target: Registry, dry_run: bool = False) -> dict[str, Any]:
    """Copy one version under its number; returns what was done as a row, or with `dry_run` what would be done.

    Raises Conflict if the target has other bytes under this number, or these bytes under another one; ArtifactError if
    the source is damaged.
    """
    state = target.current_state(name)
    _check_number(state, version, target.url)
    exists = state.with_digest(version.sha256) is not None
    evaluations = source.evaluations(version.sha256, name)
    row = {"name": name, "version": version.version, "sha256": version.sha256, "size": version.size}
    row |= {"from": source.url, "to": target.url, "files": sorted(version.files), "evaluations": len(evaluations)}
    if dry_run:
        target.check_writable()
        return row | {"result": "is there already" if exists else "would be published"}
    if exists:
        target.finish(name, version)
    else:
        data = artifact.read(source.fetch_verified(name, version), version.sha256, version.size)
        attachments = source.attachments(name, version)
        if "README.md" in attachments:
            text = card.addressed(attachments["README.md"].decode(), target.url, name, version.version)
            attachments["README.md"] = card.with_results(text, name, sound(evaluations)).encode()
        target.publish(name, data, version.version, attachments)
    kinds: tuple[Kind, ...] = ("evaluations", "signatures")
    for kind in kinds:
        known = [data for _, data in target.records(kind, version.sha256, name)]
        for _, data in source.records(kind, version.sha256, name):
            if data not in known:
                target.add_record(kind, version.sha256, data, name)
    return row | {"result": "was there already" if exists else "published"}


def mirror(source: Registry, name: str, target: Registry, dry_run: bool = False) -> Iterator[dict[str, Any]]:
    """Copy every version of a name, then give its aliases and yanks the state they have in the source.

    Yields a row for each thing done, or with `dry_run` that would be done. A version that an alias of the target points
    to is not yanked there, which its row says.
    """
    state = source.existing(name)
    for version in state.versions.values():
        yield copy(source, name, version, target, dry_run)
    before = target.current_state(name)
    after = {alias: before.at(alias) for alias in before.aliases}
    for alias in state.aliases:  # before yanks: a yanked version may be an alias' old one
        pointed = state.at(alias)
        if pointed is not None and before.at(alias) != pointed:
            if not dry_run:
                target.promote(name, pointed, alias, before.at(alias) or "none", force=True)
            after[alias] = pointed
            yield _row(name, pointed, source, target, f"is {alias}", dry_run)
    for version in state.versions.values():
        there = before.versions.get(version.version)
        if version.yanked is None or (there is not None and there.yanked is not None):
            continue
        what, pointing = "yanked", [alias for alias, at in after.items() if at == version.version]
        if pointing:
            what = f"not yanked: {' and '.join(pointing)} points to it"
        elif not dry_run:
            target.yank(name, version.version, version.yanked)
        yield _row(name, version.version, source, target, what, dry_run)


def push_to_hub(
    made: Artifact,
    repo_id: str,
    *,
    version: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
) -> str:
    """Publish an artifact as a version of "org/name", with a card and kvq_config.json; returns "org/name@1.2.0".

    made      what `load_artifact` returned
    repo_id   a model repository, which is made if there is none; one that holds other things is refused
    version   its number; None is the next
    private   whether a repository that is made is private; None is the Hub's default
    token     of the Hub; None is that of huggingface_hub
    The same bytes are published once: their version is returned again. No alias is moved: `kvq promote` does that.
    Raises ValueError for other text, Conflict for a number that is taken or a repository that is used otherwise,
    PermissionError or RuntimeError if the Hub refuses or does not answer.
    """
    target = parse(repo_id)
    if not isinstance(target, Reference) or target.by != "default" or not target.registry.startswith(HUB):
        raise ValueError(f"push_to_hub to {repo_id!r:.160}; use ORG/NAME, as in my-org/qwen2.5-7b-aqua-2bit")
    org, data = target.registry.removeprefix(HUB), artifact.to_bytes(made)
    place = f"{org}/{target.name}"
    files = folder.beside(made, data, f"{HUB}{place}")
    with using(Access(token)):
        published = HubRegistry(org, private).publish(target.name, data, version, files)
    return f"{place}@{published.version}"


def _row(name: str, version: str, source: Registry, target: Registry, what: str, dry_run: bool) -> dict[str, Any]:
    result = f"would be: {what}" if dry_run else what
    return {"name": name, "version": version, "from": source.url, "to": target.url, "result": result}


def _check_number(state: State, version: Version, url: str) -> None:
    same_bytes = state.with_digest(version.sha256)
    if same_bytes is not None and same_bytes.version != version.version:
        raise Conflict(
            f"{url} has these bytes of {state.name} as {same_bytes.version}, not {version.version}; use that version"
        )
    same_number = state.versions.get(version.version)
    if same_number is not None and same_number.sha256 != version.sha256:
        raise Conflict(
            f"{url} has other bytes as {state.name} {version.version} (sha256 {same_number.sha256[:12]}); a version "
            "never changes: publish these under another number (kvq-calibrate --artifact-version)"
        )
