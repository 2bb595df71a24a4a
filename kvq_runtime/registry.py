"""Turn a reference into a file, whatever registry it lives in.

resolve("qwen2.5-7b-aqua-2bit")                   production, else the newest version that is not yanked
resolve("qwen2.5-7b-aqua-2bit@1.2.0")             this version
resolve("qwen2.5-7b-aqua-2bit", lock="kvq.lock")  what it was when the lock file was written
resolve("hf://org/qwen2.5-7b-aqua-2bit@1.2.0")    in that registry, whatever the default is
resolve("./kvq.safetensors")                      a file
"""

import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvq_runtime import artifact, files, reference, strict_json
from kvq_runtime.artifact import Artifact
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.reference import PRODUCTION, Lock, Reference
from kvq_runtime.registries import signing
from kvq_runtime.registries.changes import Registry
from kvq_runtime.registries.events import State, Version
from kvq_runtime.registries.hub import HubRegistry
from kvq_runtime.registries.local import LocalRegistry

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resolved:
    """The file that a reference means.

    name, version   of a registry's artifact; for a path its stem and ""
    chosen_because  why it is this version, for people
    registry        the address of the registry it is in; "" for a path
    yanked          the reason, if it was withdrawn
    commit          of a Hub, in which the registry said so
    """

    name: str
    version: str
    sha256: str
    size: int
    path: Path
    chosen_because: str
    registry: str = ""
    yanked: str | None = None
    commit: str = ""


def open_registry(url: str | Path | None = None) -> Registry:
    """The registry at file:///folder, a folder or hf://org; None is $KVQ_REGISTRY, else $KVQ_HOME/registry."""
    address = reference.registry_url(url)
    org = reference.hub_org(address)
    return LocalRegistry(reference.local_root(address)) if org is None else HubRegistry(org)


def choose(state: State, given: Reference) -> tuple[Version, str]:
    """The version of a name that a reference means, and why; NotFound says what there is."""
    if given.by == "version":
        return state.get(given.value), "asked for by number"
    if given.by == "sha256":
        for version in state.versions.values():
            if version.sha256 == given.value:
                return version, "asked for by digest"
        raise NotFound(f"{state.name} has no version with sha256 {given.value}; kvq history {state.name} lists them")
    wanted = given.value or PRODUCTION
    at = state.at(wanted)
    if at is not None:
        return state.versions[at], f"{wanted} points to it"
    if given.by == "alias":
        known = ", ".join(state.aliases) or "none"
        raise NotFound(f"{state.name} has no alias {wanted} (aliases: {known}); kvq promote sets one")
    newest = state.newest()
    if newest is None:
        raise NotFound(f"every version of {state.name} is yanked; ask for one by number to have it all the same")
    return newest, f"newest of {len(state.versions)} not yanked; no version is {PRODUCTION}"


def resolve(given: str | Path, registry: str | Path | None = None, lock: str | Path | None = None) -> Resolved:
    """Find the file a reference means; nothing in it is checked yet, see `load_artifact`.

    registry   its address; else $KVQ_REGISTRY, else the lock's, else the default
    lock       a lock file: the reference then means what it meant when the lock was written, or it is an error; where
               its policy says `follow`, what it means now, if that is signed and not too old
    Raises ValueError for text that is no reference, NotFound, or ArtifactError for a damaged registry or lock.
    """
    pinned = reference.read_lock(lock) if lock is not None else None
    wanted = reference.parse(given)
    policy = pinned.policy if pinned is not None else None
    if pinned is not None and policy is not None and not policy["follow"]:
        own = strict_json.dumps(pinned.signature).encode()
        signing.enforce(policy, [own], pinned.name, pinned.version, pinned.sha256)
    if isinstance(wanted, Path):
        if policy is not None and policy["follow"]:
            raise ArtifactError(f"lock: {lock} follows a reference, and {wanted} is a path; pull without --follow")
        sha256, size = files.digest(wanted)
        found = Resolved(wanted.stem, "", sha256, size, wanted, "asked for by path")
        return found if pinned is None else _same_bytes(found, pinned, lock)
    where = wanted.registry or registry
    if pinned is None:
        return _find(open_registry(where), wanted)
    if str(given) != pinned.reference:
        raise ArtifactError(f"lock: {lock} pins {pinned.reference}, not {given}; pull {given} with its own --lock")
    kept = open_registry(where or os.environ.get("KVQ_REGISTRY") or pinned.registry)
    if policy is not None and policy["follow"]:
        return _accepted(_find(kept, wanted), policy, kept)
    held, why = kept.held(pinned), f"pinned by {lock}"
    if held is not None:
        return Resolved(
            pinned.name, pinned.version, pinned.sha256, pinned.size, held, why, kept.url, None, pinned.commit
        )
    return _same_bytes(_find(kept, Reference(pinned.name, "sha256", pinned.sha256)), pinned, lock)


def _find(registry: Registry, wanted: Reference) -> Resolved:
    name = wanted.name
    found, why = choose(registry.existing(name), wanted)
    path, commit = registry.fetch(name, found), registry.commit(name)
    return Resolved(name, found.version, found.sha256, found.size, path, why, registry.url, found.yanked, commit)


def _accepted(found: Resolved, policy: Mapping[str, Any], registry: Registry) -> Resolved:
    """What a followed reference means now, if the lock's policy accepts it."""
    records = registry.signatures(found.sha256, found.name)
    signing.enforce(policy, records, found.name, found.version, found.sha256)
    return replace(found, chosen_because=f"{found.chosen_because}; signed, as the lock file demands")


def _same_bytes(found: Resolved, pinned: Lock, lock: str | Path | None) -> Resolved:
    if (found.sha256, found.size) != (pinned.sha256, pinned.size):
        raise ArtifactError(
            f"lock: {found.path} has sha256 {found.sha256}, {found.size} bytes; {lock} pins {pinned.name} "
            f"{pinned.version}, sha256 {pinned.sha256}, {pinned.size} bytes"
        )
    if found.version not in ("", pinned.version):
        raise ArtifactError(
            f"lock: {lock} pins version {pinned.version}; the registry calls these bytes {found.version}"
        )
    return replace(found, chosen_because=f"pinned by {lock}")


def load_artifact(given: str | Path, registry: str | Path | None = None, lock: str | Path | None = None) -> Artifact:
    """Find and load what a reference means, with every check; the log says which version, a yanked one warns."""
    found = resolve(given, registry, lock)
    _log.info("%s: %s %s, %s", given, found.name, found.version, found.chosen_because)
    if found.yanked is not None:
        warnings.warn(f"{found.name} {found.version} is yanked: {found.yanked}", stacklevel=2)
    return artifact.load(found.path, found.sha256, found.size)
