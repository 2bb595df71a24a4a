"""Resolve a reference to a file, and load it, from whatever registry it is in.

`load_artifact` lists the forms of references. An existing folder has precedence over a name, as in Hugging Face
libraries, unless a registry is given or a lock file pins this very text.
"""

import logging
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError, NotFound, check_type
from kvq_runtime.registry.events import State, Version
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.lock import find_signature, read_lock
from kvq_runtime.registry.reference import ARTIFACT_FILE, HUB, PRODUCTION, Reference, kind_and_root, parse, registry_url
from kvq_runtime.registry.registry import Registry

if TYPE_CHECKING:  # kvq list and promote must not import torch
    from kvq_runtime.artifact.artifact import Artifact

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resolved:
    """The file that a reference resolves to.

    name, version   of a registry's artifact; of a path its stem and ""
    chosen_because  the reason for this version, as text
    registry        the address of the registry; "" for a path
    yanked          the reason if it was withdrawn, else None
    """

    name: str
    version: str
    sha256: str
    size: int
    path: Path
    chosen_because: str
    registry: str = ""
    yanked: str | None = None


def open_registry(url: str | Path | None = None) -> Registry:
    """Open the registry at file:///folder, a folder, or hf://org; None: $KVQ_REGISTRY, else $KVQ_HOME/registry.

    Nothing is read or created. Raises ValueError for another kind of address.
    """
    kind, root = kind_and_root(registry_url(url))
    if kind != HUB:
        return LocalRegistry(root)
    from kvq_runtime.registry.hub import HubRegistry

    return HubRegistry(root)


def choose(state: State, reference: Reference) -> tuple[Version, str]:
    """Return the version of a name that a reference means, and why; NotFound lists the alternatives."""
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
        aliases = ", ".join(state.aliases) or "none"
        raise NotFound(f"{state.name} has no alias {alias} (aliases: {aliases}); kvq promote sets one")
    newest = state.newest()
    if newest is None:
        raise NotFound(f"every version of {state.name} is yanked; a yanked version can still be asked for by number")
    return newest, f"newest of {len(state.versions)} not yanked; no version is {PRODUCTION}"


def resolve(reference: str | Path, registry: str | Path | None = None, lock: str | Path | None = None) -> Resolved:
    """Find the file that a reference means, and fetch it; arguments and errors are those of `load_artifact`."""
    check_type("reference", reference, (str, Path), "the name of an artifact, or a path")
    pinned = lock is not None and read_lock(lock).reference == reference
    in_registry = registry is not None and isinstance(reference, str) and "/" not in reference
    if not pinned and not in_registry:
        reference = _file_in_folder(reference) or reference
    return resolve_name(reference, registry, lock)


def _file_in_folder(path: str | Path) -> Path | None:
    """Return the artifact's file in a folder, or None if there is no such folder, or none with the file of that name.

    Raises NotFound for the path of a folder without the file: a Hub is asked for no path that exists.
    """
    folder = Path(path)
    if not folder.is_dir():
        return None
    if (folder / ARTIFACT_FILE).exists():
        return folder / ARTIFACT_FILE
    if isinstance(path, Path) or "/" in path:
        text = f"{path}: a folder without {ARTIFACT_FILE}, which kvq pull -o and save_pretrained write"
        raise NotFound(f"{text}; write it again, or give {HUB}ORG/NAME for that of a Hub")
    return None


def resolve_name(reference: str | Path, registry: str | Path | None = None, lock: str | Path | None = None) -> Resolved:
    """Resolve a reference as `resolve`, but never as a folder."""
    target = parse(reference)
    on_hub = isinstance(target, Reference) and target.registry and not str(reference).startswith(HUB)
    if on_hub and registry is not None:
        raise ValueError(f"name {reference!r:.160} is one of a Hub, but registry is {registry}: use the name alone")
    if lock is not None:
        return _resolve_pinned(reference, target, registry, lock)
    if isinstance(target, Path):
        return Resolved(target.stem, "", *files.digest(target), target, "asked for by path")
    return _find(open_registry(target.registry or registry), target)


def _resolve_pinned(
    reference: str | Path, target: Reference | Path, registry: str | Path | None, lock: str | Path
) -> Resolved:
    """Return the file that a lock file pins, of which `target` is a copy or the reference; else ArtifactError."""
    pinned = read_lock(lock)
    if pinned.key:
        stored = strict_json.dumps(pinned.signature).encode()
        find_signature([stored], pinned.name, pinned.version, pinned.sha256, pinned.key)
    if isinstance(target, Path):
        sha256, size = files.digest(target)
        if (sha256, size) != (pinned.sha256, pinned.size):
            raise ArtifactError(
                f"lock: {target} has sha256 {sha256}, {size} bytes; {lock} pins {pinned.name} {pinned.version}, sha256 "
                f"{pinned.sha256}, {pinned.size} bytes. A pull that was interrupted leaves the new file beside the old "
                f"lock: pull again with --lock {lock}, or the pinned version with --locked {lock}"
            )
        return Resolved(target.stem, "", sha256, size, target, f"pinned by {lock}")
    if str(reference) != pinned.reference:
        text = f"{lock} pins {pinned.reference}, not {reference}"
        raise ArtifactError(f"lock: {text}; pull {reference} with a lock file of its own")
    source = open_registry(target.registry or registry or os.environ.get("KVQ_REGISTRY") or pinned.registry)
    path = source.fetch(pinned.name, Version(pinned.version, pinned.sha256, pinned.size))
    return Resolved(pinned.name, pinned.version, pinned.sha256, pinned.size, path, f"pinned by {lock}", source.url)


def _find(registry: Registry, reference: Reference) -> Resolved:
    name = reference.name
    try:
        version, reason = choose(registry.existing(name), reference)
    except NotFound as error:
        raise NotFound(f"{error}{_recipe_hint(name)}") from None
    path = registry.fetch(name, version)
    return Resolved(name, version.version, version.sha256, version.size, path, reason, registry.url, version.yanked)


def _recipe_hint(name: str) -> str:
    """Return what to add to the message about a missing name that is a recipe's."""
    from kvq_runtime.recipe import is_preset, preset

    if not is_preset(name):
        return ""
    if preset(name).fitted:
        return f". {name} is a recipe, which has to be fitted to a model: kvq-calibrate --recipe {name}"
    return f'. {name} is a recipe that needs no artifact: KVQCache.from_recipe("{name}", model)'


def load_artifact(
    reference: str | Path, registry: str | Path | None = None, lock: str | Path | None = None
) -> "Artifact":
    """Find the artifact that a reference means, and load it with every check.

    reference   "name", "name@1.2.0", "name@production", "name@sha256:<hex>", each also as "org/name" or
                "hf://org/name" of a Hub; or the path of a .safetensors file, or of a folder that holds
                kvq.safetensors. A name alone means production, else the newest version that is not yanked
    registry    "file:///folder", a folder or "hf://org"; None is $KVQ_REGISTRY, else $KVQ_HOME/registry
    lock        path of a lock file written by `kvq pull --lock`, which pins the reference
    An existing folder has precedence over a name, unless `registry` is given or the lock pins this text. An artifact in
    use is shared: equal content gives the same object. Returns the artifact, its tensors on the CPU. The log names the
    chosen version; a yanked one warns.
    Raises ValueError for an invalid reference, NotFound, ArtifactError if a check fails (its message begins with the
    file and the check), PermissionError or RuntimeError if a Hub refuses or does not answer.
    """
    from kvq_runtime.artifact import artifact

    resolved = resolve(reference, registry, lock)
    loaded = artifact.load_once(resolved.path, resolved.sha256, resolved.size)
    where = f"{resolved.version} from {resolved.registry}" if resolved.registry else f"from {resolved.path}"
    choice = f"{resolved.name} {where}, {resolved.chosen_because}, sha256 {resolved.sha256[:12]}"
    _log.info("%s: %s", reference, choice)
    if resolved.yanked is not None:
        warnings.warn(f"{resolved.name} {resolved.version} is yanked: {resolved.yanked}", stacklevel=2)
    return loaded
