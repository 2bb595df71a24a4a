"""Check a registry in a bucket, and remove blobs that no event names."""

import time
from pathlib import PurePosixPath

from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry.bucket.registry import BucketRegistry
from kvq_runtime.registry.events import Version
from kvq_runtime.registry.place import GRACE, Finding
from kvq_runtime.registry.reference import ARTIFACT_FILE, BUCKET, is_sha256


def _named(registry: BucketRegistry) -> dict[str, tuple[str, Version, str]]:
    """{sha256: (name, version, file)} of every blob that an event names; ArtifactError for a damaged event."""
    found = {}
    for name in registry.names():
        for version in registry.state(name).versions.values():
            for file in (ARTIFACT_FILE, *version.files):
                found[version.file(file)[0]] = name, version, file
    return found


def collect(registry: BucketRegistry, grace: float = GRACE, dry_run: bool = False) -> list[str]:
    """Remove blobs that no event names, older than `grace` seconds; returns their keys.

    A publish writes its blobs anew before its event, so that those of a running one are young; events, and then ages,
    are read again before any is removed. Raises ArtifactError, and removes nothing, if an event is damaged: it may name
    any blob.
    """
    before, blobs = time.time() - grace, f"{registry.root}/blobs/sha256"
    named = _named(registry)
    old = [key for key, _, changed in registry.details(blobs) if _is_blob(key) and changed <= before]
    orphans = [key for key in old if PurePosixPath(key).name not in named]
    if dry_run or not orphans:
        return [f"{BUCKET}{key}" for key in orphans]
    named = _named(
        registry
    )  # a publish writes its blobs anew, then its event: what was published since is in one of two
    young = {key for key, _, changed in registry.details(blobs) if changed > before}
    orphans = [key for key in orphans if PurePosixPath(key).name not in named and key not in young]
    for key in orphans:
        registry.remove(key)
    return [f"{BUCKET}{key}" for key in orphans]


def _is_blob(key: str) -> bool:
    return is_sha256(PurePosixPath(key).name)


def examine(registry: BucketRegistry) -> list[Finding]:
    """Everything wrong with events and blobs, whose contents are fetched; blobs that no event names as notes."""
    try:
        named = _named(registry)
    except ArtifactError as error:
        what, _, _ = str(error).partition("; kvq doctor")
        return [Finding("fault", what, registry.url, "restore the event from a version of the bucket, or a copy")]
    findings = []
    keys = [key for key, _, _ in registry.details(f"{registry.root}/blobs/sha256")]
    blobs = {PurePosixPath(key).name for key in keys if _is_blob(key)}
    advice = "publish the same bytes again, or copy the blob from elsewhere; until then yank the version"
    for sha256, (name, version, file) in sorted(named.items()):
        place = f"{BUCKET}{registry.blob(sha256)}"
        if sha256 not in blobs:
            findings.append(Finding("fault", "blob is missing", place, advice))
            continue
        try:
            if files.digest(registry.fetch_verified(name, version, file))[0] != sha256:
                raise ArtifactError("sha256: the cached file was changed")
        except ArtifactError as error:
            findings.append(Finding("fault", str(error).removeprefix(f"{place}: "), place, advice))
    advice = "kvq gc removes it when it is old"
    findings += [Finding("note", "not a blob", f"{BUCKET}{key}", "remove it") for key in keys if not _is_blob(key)]
    return findings + [
        Finding("note", "no event names it", f"{BUCKET}{registry.blob(one)}", advice)
        for one in sorted(blobs - set(named))
    ]
