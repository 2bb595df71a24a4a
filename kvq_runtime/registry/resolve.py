"""Resolve a reference to a file, and load it, from whatever registry it is in.

resolve("qwen2.5-7b-aqua-2bit")                   production, else the newest version that is not yanked
resolve("qwen2.5-7b-aqua-2bit@1.2.0")             this version
resolve("qwen2.5-7b-aqua-2bit", lock="kvq.lock")  the file it was when the lock file was written
resolve("hf://org/qwen2.5-7b-aqua-2bit@1.2.0")    in that registry, whatever the default is; org/name is the same
resolve("./kvq.safetensors")                      a file
resolve("artifact")                               the file kvq.safetensors of the folder, if there is one here

As in Hugging Face libraries, a folder that is there has precedence over a name; but not where `registry` says where the
name is, or a lock file pins this very text.
"""

import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError, NotFound, check_type
from kvq_runtime.registry.events import State, Version
from kvq_runtime.registry.hub.client import Access, using
from kvq_runtime.registry.hub.registry import HubRegistry
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.lock import Lock, enforce, read_lock
from kvq_runtime.registry.reference import (
    ARTIFACT_FILE,
    HUB,
    PRODUCTION,
    Reference,
    at_revision,
    kind_and_root,
    parse,
    registry_url,
)
from kvq_runtime.registry.registry import Registry

if TYPE_CHECKING:  # kvq list and promote should not wait for torch
    from kvq_runtime.artifact.artifact import Artifact

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resolved:
    """The file that a reference resolves to.

    name, version   of a registry's artifact; of a path its stem and ""
    chosen_because  why it is this version, for people
    registry        the address of the registry it is in; "" for a path
    yanked          the reason if it was withdrawn, else None
    commit          of a Hub, in which the registry was read; else ""
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
    """The registry at file:///folder, a folder, or hf://org.

    None is $KVQ_REGISTRY, else $KVQ_HOME/registry. Nothing is read or created. Raises ValueError for another kind of
    address.
    """
    kind, root = kind_and_root(registry_url(url))
    return HubRegistry(root) if kind == HUB else LocalRegistry(root)


def choose(state: State, reference: Reference) -> tuple[Version, str]:
    """The version of a name that a reference means, and why; NotFound lists what there is instead."""
    if reference.by == "version":
        return state.get(reference.value), "asked for by number"
    if reference.by == "sha256":
        version = state.with_digest(reference.value)
        if version is None:
            text = f"{state.name} has no version with sha256 {reference.value}"
            raise NotFound(f"{text}; kvq history {state.name} lists them")
        return version, "asked for by digest"
    alias = reference.value or PRODUCTION
    number = state.at(alias)
    if number is not None:
        return state.versions[number], f"{alias} points to it"
    if reference.by == "alias":
        known = ", ".join(state.aliases) or "none"
        raise NotFound(f"{state.name} has no alias {alias} (aliases: {known}); kvq promote sets one")
    newest = state.newest()
    if newest is None:
        raise NotFound(f"every version of {state.name} is yanked; a yanked version can still be asked for by number")
    return newest, f"newest of {len(state.versions)} not yanked; no version is {PRODUCTION}"


def resolve(
    reference: str | Path,
    registry: str | Path | None = None,
    lock: str | Path | None = None,
    revision: str | None = None,
) -> Resolved:
    """Find the file that a reference means, and fetch it; its content is checked by `load_artifact`.

    reference   a reference, or the path of a .safetensors file or of a folder with kvq.safetensors
    registry    address of the registry; None is $KVQ_REGISTRY, else the lock's, else $KVQ_HOME/registry
    lock        a lock file: the reference resolves to the file it did when the lock was written. If the lock's policy
                has `follow`, it resolves to what it means now, which must be signed and not too old
    revision    what would stand after @, see `reference.at_revision`
    Raises ValueError for text that is no reference, NotFound, or ArtifactError if the registry or lock is damaged, if
    the file is not the pinned one, or if the policy does not accept it.
    """
    check_type("reference", reference, (str, Path), "the name of an artifact, or a path")
    pinned = lock is not None and read_lock(lock).reference == reference
    named = registry is not None and isinstance(reference, str) and "/" not in reference
    if not pinned and not named:
        reference = _in_folder(reference) or reference
    return resolve_name(reference, registry, lock, revision)


def _in_folder(place: str | Path) -> Path | None:
    """The artifact's file in a folder; None where there is no such folder, or a folder of this name has no such file.

    Raises NotFound for a folder without the file, where the text can only be a path.
    """
    folder = Path(place)
    if not folder.is_dir():
        return None
    if (folder / ARTIFACT_FILE).exists():
        return folder / ARTIFACT_FILE
    if isinstance(place, Path) or place.endswith("/") or place.count("/") > 1 or place.startswith((".", "/")):
        raise NotFound(f"{place}: a folder without {ARTIFACT_FILE}, which kvq pull -o and save_pretrained write")
    return None


def resolve_name(
    reference: str | Path,
    registry: str | Path | None = None,
    lock: str | Path | None = None,
    revision: str | None = None,
) -> Resolved:
    """`resolve` without a look for folders: a name is one of a registry, whatever folders are here."""
    target = parse(reference)
    if isinstance(target, Path) and revision is not None:
        raise ValueError(f"revision={revision!r:.80} of {reference}: a file has none; drop it")
    if isinstance(target, Reference):
        target = at_revision(target, revision)
        if registry is not None and target.registry and not str(reference).startswith(HUB):
            raise ValueError(
                f"name {reference!r:.160} is one of {target.registry}, but registry is {registry}: use the name alone"
            )
    if lock is None:
        return _at(target) if isinstance(target, Path) else _find(open_registry(target.registry or registry), target)
    pinned = read_lock(lock)
    policy, follow = pinned.policy or {}, bool(pinned.policy and pinned.policy["follow"])
    if policy and not follow:
        stored = strict_json.dumps(pinned.signature).encode()
        enforce(policy, [stored], pinned.name, pinned.version, pinned.sha256)
    if isinstance(target, Path):
        if follow:
            raise ArtifactError(f"lock: {lock} follows a reference, and {target} is a path; pull without --follow")
        return _check_pinned(_at(target), pinned, lock)
    if revision is not None or str(reference) != pinned.reference:
        text = f"{lock} pins {pinned.reference}, not {reference}{f' at {revision}' if revision else ''}"
        raise ArtifactError(f"lock: {text}; pull {reference} with a lock file of its own")
    source = open_registry(target.registry or registry or os.environ.get("KVQ_REGISTRY") or pinned.registry)
    if follow:
        found = _find(source, target)
        accepted(source, found, policy)
        return replace(found, chosen_because=f"{found.chosen_because}; signed, as the lock file demands")
    path = source.pinned_file(pinned)
    if path is not None:
        fields = pinned.name, pinned.version, pinned.sha256, pinned.size, path, f"pinned by {lock}", source.url
        return Resolved(*fields, commit=pinned.commit)
    return _check_pinned(_find(source, Reference(pinned.name, "sha256", pinned.sha256)), pinned, lock)


def _at(path: Path) -> Resolved:
    return Resolved(path.stem, "", *files.digest(path), path, "asked for by path")


def _find(registry: Registry, reference: Reference) -> Resolved:
    name = reference.name
    try:
        if reference.by == "commit":
            state = registry.state_at(name, reference.value)
            version, why = choose(state, Reference(name))
            why = f"{why} at commit {reference.value[:12]}"
        else:
            version, why = choose(registry.existing(name), reference)
    except NotFound as error:
        raise NotFound(f"{error}{_if_recipe(name)}") from None
    path, commit = registry.fetch(name, version), registry.last_commit(name)
    fields = name, version.version, version.sha256, version.size, path, why, registry.url, version.yanked, commit
    return Resolved(*fields)


def _if_recipe(name: str) -> str:
    """Return the addition to the message about a missing name that is a recipe's."""
    from kvq_runtime.recipe import is_preset, preset

    if not is_preset(name):
        return ""
    if preset(name).fitted:
        return f". {name} is a recipe, which has to be fitted to a model: kvq-calibrate --recipe {name}"
    return f'. {name} is a recipe that needs no artifact: KVQCache.from_recipe("{name}", model)'


def accepted(registry: Registry, resolved: Resolved, policy: Mapping[str, Any]) -> dict[str, Any]:
    """The signature of a version that satisfies a policy; else ArtifactError."""
    records = registry.signatures(resolved.sha256, resolved.name)
    return enforce(policy, records, resolved.name, resolved.version, resolved.sha256)


def _check_pinned(resolved: Resolved, pinned: Lock, lock: str | Path) -> Resolved:
    """Raise ArtifactError unless the file is the one that the lock pins."""
    if (resolved.sha256, resolved.size) != (pinned.sha256, pinned.size):
        raise ArtifactError(
            f"lock: {resolved.path} has sha256 {resolved.sha256}, {resolved.size} bytes; {lock} pins {pinned.name} "
            f"{pinned.version}, sha256 {pinned.sha256}, {pinned.size} bytes. A pull that was interrupted leaves the "
            f"new file beside the old lock: pull again with --lock {lock}, or the pinned version with --locked {lock}"
        )
    if resolved.version not in ("", pinned.version):
        raise ArtifactError(
            f"lock: {lock} pins version {pinned.version}, but the registry has these bytes as {resolved.version}"
        )
    return replace(resolved, chosen_because=f"pinned by {lock}")


def load_artifact(
    reference: str | Path,
    registry: str | Path | None = None,
    lock: str | Path | None = None,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> "Artifact":
    """Find the artifact that a reference means, and load it with every check.

    reference          "name", "name@1.2.0", "name@production", "name@sha256:<hex>", each also as "org/name" or
                       "hf://org/name" of a Hub; or the path of a .safetensors file, or of a folder that holds
                       kvq.safetensors. A name alone means production, else the newest version that is not yanked
    registry           "file:///folder", a folder or "hf://org"; None is $KVQ_REGISTRY, else $KVQ_HOME/registry
    lock               path of a lock file written by `kvq pull --lock`, which pins the reference
    revision           what would stand after @: "1.2.0" or its tag "v1.2.0", an alias, or a commit of a Hub; None or
                       "main": the name alone
    cache_dir          where files of a Hub are kept; None is that of huggingface_hub
    token              of a Hub; None is that of huggingface_hub, False is none
    local_files_only   make no request: use what the cache has
    A folder that is there has precedence over a name, unless `registry` is given or the lock pins this text. Artifacts
    are loaded once a process: while one is in use, all who ask for the same content get the same object.
    Returns the artifact, its tensors on the CPU. The log names the version that was chosen; a yanked one warns.
    Raises ValueError for text that is no reference, NotFound, ArtifactError if a check fails (its message begins with
    the file and the check), PermissionError or RuntimeError if a Hub refuses or does not answer.
    """
    from kvq_runtime.artifact import artifact

    with using(Access(token, cache_dir, local_files_only)):
        resolved = resolve(reference, registry, lock, revision)
    found, known = artifact.load_once(resolved.path, resolved.sha256, resolved.size)
    where = f"{resolved.version} from {resolved.registry}" if resolved.registry else f"from {resolved.path}"
    _log.info(
        "%s: %s %s, %s, sha256 %s%s", reference, resolved.name, where, resolved.chosen_because, resolved.sha256[:12],
        ", in memory already" if known else "",
    )  # fmt: skip
    if resolved.yanked is not None:
        warnings.warn(f"{resolved.name} {resolved.version} is yanked: {resolved.yanked}", stacklevel=2)
    return found
