"""Parse what users write: names, versions, aliases, references, registry addresses and lock files.

    reference   name · name@1.2.0 · name@production · name@sha256:<64 hex digits> · path/to/file.safetensors
                hf://org/name@...: the same, in the registry hf://org
    registry    file:///path, a folder, or hf://org: an organization or user of a Hugging Face Hub

Every name is checked here before any path is joined.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from kvq_runtime import files, strict_json
from kvq_runtime.errors import ArtifactError, NotFound

SUFFIX = ".safetensors"
PRODUCTION = "production"
HUB = "hf://"
POLICY = {"key", "lowest", "follow"}
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}")
_VERSION = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})")
_ALIAS = re.compile(r"[a-z][a-z0-9-]{0,31}")
_ORG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"([0-9a-f]{40})?")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def is_name(given: str) -> bool:
    """Whether a series of versions may be called this."""
    return isinstance(given, str) and bool(_NAME.fullmatch(given)) and not given.endswith(SUFFIX)


def check_name(given: str) -> str:
    """The name of a series of versions, or a ValueError."""
    if not is_name(given):
        raise ValueError(
            f"name {given!r:.120}; use 1 to 96 of a-z 0-9 . _ -, the first a letter or digit, not ending in {SUFFIX}"
        )
    return given


def check_version(given: str) -> str:
    """A version, or a ValueError."""
    if not isinstance(given, str) or not _VERSION.fullmatch(given):
        raise ValueError(f"version {given!r:.80}; use three numbers, as in 1.2.0")
    return given


def check_alias(given: str) -> str:
    """An alias, or a ValueError."""
    if not isinstance(given, str) or not _ALIAS.fullmatch(given) or given == "sha256":
        raise ValueError(f"alias {given!r:.80}; use 1 to 32 of a-z 0-9 -, the first a letter, as in production")
    return given


def check_sha256(given: str) -> str:
    """A digest, or a ValueError."""
    if not isinstance(given, str) or not _SHA256.fullmatch(given):
        raise ValueError(f"sha256 {given!r:.80}; use 64 digits of 0-9 a-f")
    return given


def check_file(given: str) -> str:
    """The name of a file beside a version, or a ValueError."""
    if not isinstance(given, str) or not _FILE.fullmatch(given) or given.endswith(SUFFIX):
        raise ValueError(f"file name {given!r:.120}; use 1 to 96 of A-Z a-z 0-9 . _ -, and no folder")
    return given


def order(version: str) -> tuple[int, ...]:
    """What versions are sorted by."""
    return tuple(int(part) for part in version.split("."))


@dataclass(frozen=True)
class Reference:
    """A name and, at most, one way to choose among its versions; `registry` where the reference says it."""

    name: str
    by: Literal["default", "version", "alias", "sha256"] = "default"
    value: str = ""
    registry: str = ""


def parse(given: str | Path) -> Reference | Path:
    """What a user means; ValueError for text that is neither a reference nor a path to a .safetensors file."""
    if isinstance(given, str) and given.startswith(HUB):
        org, _, rest = given.removeprefix(HUB).partition("/")
        found = parse(rest) if rest else None
        if not isinstance(found, Reference) or rest.startswith(HUB):
            raise ValueError(f"reference {given!r:.160}; use hf://org/name, hf://org/name@1.2.0 or hf://org/name@alias")
        return replace(found, registry=f"{HUB}{check_org(org)}")
    if isinstance(given, Path) or given.endswith(SUFFIX):
        return Path(given)
    name, at, value = given.partition("@")
    check_name(name)
    if not at:
        return Reference(name)
    if value.startswith("sha256:"):
        return Reference(name, "sha256", check_sha256(value.removeprefix("sha256:")))
    if value[:1].isdigit():
        return Reference(name, "version", check_version(value))
    return Reference(name, "alias", check_alias(value))


def registry_url(given: str | Path | None = None) -> str:
    """The registry in use: given, else $KVQ_REGISTRY, else $KVQ_HOME/registry, else ~/.kvq/registry."""
    home = Path(os.environ.get("KVQ_HOME") or Path.home() / ".kvq")
    return str(given or os.environ.get("KVQ_REGISTRY") or (home / "registry").absolute().as_uri())


def check_org(given: str) -> str:
    """An organization or user of a Hub, or a ValueError."""
    if not _ORG.fullmatch(given):
        raise ValueError(f"organization {given!r:.120}; use 1 to 96 of A-Z a-z 0-9 . _ -, as in hf://my-org")
    return given


def hub_org(url: str) -> str | None:
    """The organization of an hf:// registry; None for another kind of address."""
    return check_org(url.removeprefix(HUB).rstrip("/")) if url.startswith(HUB) else None


def local_root(url: str) -> Path:
    """The folder of a file:// registry, or a ValueError."""
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return Path(unquote(parts.path))
    if "://" not in url:
        return Path(url).absolute()
    raise ValueError(f"registry {url}; use file:///folder, with three slashes, a folder, or hf://org")


@dataclass(frozen=True)
class Lock:
    """What a reference meant when it was pulled: one file, pinned by its digest.

    commit      of a Hub
    policy      what is demanded of the file beside its digest, and whether the reference is followed: see `signing`
    signature   the one that the policy accepted, so that a pinned file is checked without asking anybody
    """

    reference: str
    registry: str
    name: str
    version: str
    sha256: str
    size: int
    commit: str = ""
    policy: Mapping[str, Any] | None = None
    signature: Mapping[str, Any] | None = None


_OPTIONAL = {"commit", "policy", "signature"}


def write_lock(path: Path, lock: Lock) -> None:
    """Write a lock file; what is not there is left out."""
    given = {name: value for name, value in asdict(lock).items() if value or name not in _OPTIONAL}
    files.save(path, (strict_json.dumps(given) + "\n").encode())


def read_lock(path: Path | str) -> Lock:
    """Read a lock file; ArtifactError names what is wrong in it."""
    what = f"lock: {path}"
    try:
        data = files.read(Path(path), 1 << 16)
    except NotFound:
        raise NotFound(f"{what}: no such file; kvq pull REFERENCE --lock {path} writes it") from None
    given = strict_json.loads(data, what, depth=32)
    there = _OPTIONAL & set(given) if isinstance(given, dict) else set()
    strict_json.keys(given, set(Lock.__dataclass_fields__) - _OPTIONAL | there, what)
    try:
        lock = Lock(**given)
        for check, given in ((check_name, lock.name), (check_version, lock.version), (check_sha256, lock.sha256)):
            check(given)
        if type(lock.size) is not int or not isinstance(lock.reference, str) or not isinstance(lock.registry, str):
            raise ValueError("size must be a whole number, reference and registry text")
        if not isinstance(lock.commit, str) or not _COMMIT.fullmatch(lock.commit):
            raise ValueError(f"commit {lock.commit!r:.80}; 40 digits of 0-9 a-f are meant")
        _check_demands(lock)
    except ValueError as error:
        raise ArtifactError(f"{what}: {error}; pull again") from None
    return lock


def _check_demands(lock: Lock) -> None:
    """ValueError for a policy that is none."""
    if lock.policy is None:
        return
    strict_json.keys(lock.policy, POLICY, "policy")
    if not isinstance(lock.policy["key"], str) or not isinstance(lock.policy["follow"], bool):
        raise ValueError("policy: key must be a public key in PEM, follow true or false")
    if lock.policy["lowest"] != "":
        check_version(lock.policy["lowest"])
    if lock.signature is not None and not isinstance(lock.signature, dict):
        raise ValueError("signature must be an object")
