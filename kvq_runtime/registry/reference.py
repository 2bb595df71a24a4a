"""Parse and check what users write: names, versions, aliases, references and registry addresses.

    reference   name · name@1.2.0 · name@production · name@sha256:<64 hex digits> · path/to/file.safetensors
                hf://org/name@..., or org/name@...: the same, in the registry hf://org
    revision    1.2.0 · v1.2.0 · production · main · a commit of a Hub: what stands after @, as an argument of its own
    registry    file:///path, a folder, or hf://org: an organization or user of a Hugging Face Hub

Every name is checked here before it becomes part of a path.
"""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from kvq_runtime.artifact.header import ARTIFACT_FILE as ARTIFACT_FILE
from kvq_runtime.errors import check_type

SUFFIX = ".safetensors"
PRODUCTION = "production"
FOLDER, HUB = "file://", "hf://"  # kinds of registries
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}")
_VERSION = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})")
_ALIAS = re.compile(r"[a-z][a-z0-9-]{0,31}")
_ORG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_WORD = re.compile(r"[\w-]+")  # no folder as people write them, with a slash or a dot
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIGEST_LIKE = re.compile(r"[0-9][0-9a-fA-F]{7,}|[0-9a-fA-F]{33,}|SHA256:.*")  # and no version or alias
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NOT_ON_A_HUB = re.compile(r"--|\.\.|[-.]$|\.git$|\.ipynb$")
_SECRET = re.compile(r"(?<=//)[^/\s]*@|\bhf_[A-Za-z0-9]{8,}")
GRACE = 24 * 3600.0  # seconds: `kvq gc` leaves younger files alone, since a publish may be about to name them
FILES = ("README.md", "kvq_config.json")  # that may stand beside an artifact, and pictures
_PICTURE = re.compile(r"[a-z0-9][a-z0-9._-]{0,91}\.(png|svg)")


def is_name(name: str) -> bool:
    """True if an artifact may have this name."""
    return _is(_NAME, name) and not name.endswith(SUFFIX)


def check_name(name: str) -> str:
    """The name of an artifact, if it is valid; else a ValueError."""
    use = f"1 to 96 of a-z 0-9 . _ -, the first a letter or digit, not ending in {SUFFIX}"
    return _checked(name, is_name(name), "name", use)


def check_hub_name(name: str) -> str:
    """The name of an artifact, if a Hub accepts it as the name of a repository, too; else a ValueError."""
    if _NOT_ON_A_HUB.search(check_name(name)):
        raise ValueError(
            f"name {name!r}: a Hub refuses -- and .. in it, and - . .git .ipynb at its end; use another name"
        )
    return name


def _checked(text: Any, valid: bool, what: str, use: str) -> str:
    if not valid:
        raise ValueError(f"{what} {text!r:.120}; use {use}")
    return text


def _is(pattern: re.Pattern[str], text: Any) -> bool:
    return isinstance(text, str) and bool(pattern.fullmatch(text))


def check_version(version: str) -> str:
    """The version, if it is valid; else a ValueError."""
    return _checked(version, _is(_VERSION, version), "version", "three numbers, as in 1.2.0")


def check_alias(alias: str) -> str:
    """The alias, if it is valid; else a ValueError."""
    valid = _is(_ALIAS, alias) and alias != "sha256"
    return _checked(alias, valid, "alias", "1 to 32 of a-z 0-9 -, the first a letter, as in production")


def is_sha256(text: Any) -> bool:
    """True if a value is a digest as kvq writes it."""
    return _is(_SHA256, text)


def check_sha256(sha256: str) -> str:
    """The digest, if it is valid; else a ValueError."""
    given = f", not {len(sha256)} characters" if isinstance(sha256, str) else ""
    use = f"64 digits of 0-9 a-f{given}; kvq history NAME prints those of its versions"
    return _checked(sha256, is_sha256(sha256), "sha256", use)


def check_commit(commit: Any) -> str:
    """The commit of a Hub, if it is valid; else a ValueError."""
    return _checked(commit, _is(_COMMIT, commit), "commit", "40 digits of 0-9 a-f")


def check_file(file: str) -> str:
    """The name of an attachment, if it is valid; else a ValueError."""
    use = f"{', '.join(FILES)}, or a picture.png or .svg of a-z 0-9 . _ -"
    return _checked(file, file in FILES or _is(_PICTURE, file), "file name", use)


def check_org(org: str) -> str:
    """The organization or user of a Hub, if it is valid; else a ValueError."""
    use = "1 to 96 of A-Z a-z 0-9 . _ -, as in hf://my-org"
    _checked(without_secrets(org), _is(_ORG, org), "organization", use)
    return org


def order(version: str) -> tuple[int, ...]:
    """Sort key of a version: its numbers."""
    return tuple(int(part) for part in version.split("."))


@dataclass(frozen=True)
class Reference:
    """A name and how to choose among its versions.

    by         "default": production, else the newest version; else by version, alias or sha256; "commit": default as
               the registry was at a commit of its Hub
    value      the version, alias, digest or commit; "" by default
    registry   hf://org if the reference begins with it, else ""
    """

    name: str
    by: Literal["default", "version", "alias", "sha256", "commit"] = "default"
    value: str = ""
    registry: str = ""


def parse(text: str | Path) -> Reference | Path:
    """A reference, or the path of a .safetensors file; ValueError for any other text."""
    check_type("reference", text, (str, Path), "the name of an artifact, or a path")
    if isinstance(text, str) and text.startswith(HUB):
        org, _, rest = text.removeprefix(HUB).partition("/")
        inner = parse(rest) if org and rest else None
        if not isinstance(inner, Reference) or inner.registry:
            use = "hf://org/name, hf://org/name@1.2.0 or hf://org/name@alias"
            raise ValueError(f"reference {without_secrets(text)!r:.160}; use {use}")
        return replace(inner, registry=f"{HUB}{check_org(org)}")
    if isinstance(text, Path) or text.endswith(SUFFIX):
        return Path(text)
    if text.startswith(FOLDER):
        raise ValueError(f"reference {text!r:.160}: the address of a folder; give it as the registry, and here a name")
    name, at, value = text.partition("@")
    org, slash, rest = name.partition("/")
    if slash:
        if not _ORG.fullmatch(org) or not is_name(rest):
            found = "there is no such folder"
            if Path(text).is_file():
                found = f"a file, but no {SUFFIX}"
            elif Path(text).is_dir():
                found = f"a folder without {ARTIFACT_FILE}"
            raise ValueError(
                f"name {name!r:.120}: {found}; use the path of a folder that holds {ARTIFACT_FILE}, of a {SUFFIX} "
                "file, or ORG/NAME of a Hub"
            )
        return replace(_among_versions(rest, at, value), registry=f"{HUB}{org}")
    return _among_versions(check_name(name), at, value)


def _among_versions(name: str, at: str, value: str) -> Reference:
    if not at:
        return Reference(name)
    if value.startswith("sha256:"):
        return Reference(name, "sha256", check_sha256(value.removeprefix("sha256:")))
    if _DIGEST_LIKE.fullmatch(value):
        raise ValueError(
            f"{name}@{value:.80}: a digest is written {name}@sha256: and 64 digits of 0-9 a-f, a version {name}@1.2.0"
        )
    if value[:1].isdigit():
        return Reference(name, "version", check_version(value))
    return Reference(name, "alias", check_alias(value))


def at_revision(reference: Reference, revision: str | None) -> Reference:
    """The reference with what stands after @ as an argument of its own, as in Hugging Face libraries.

    revision   None or "main": unchanged; a version, also as its tag v1.2.0; an alias; 40 hex digits: a commit of a Hub
    Raises ValueError if the reference has an @ of its own, or for text that is none of these.
    """
    if revision is None or revision == "main":
        return reference
    if reference.by != "default":
        raise ValueError(f"revision={revision!r:.80}, but {reference.name}@{reference.value} has one: drop one of them")
    if _COMMIT.fullmatch(revision):
        return replace(reference, by="commit", value=revision)
    number = revision.removeprefix("v")
    if _VERSION.fullmatch(number):
        return replace(reference, by="version", value=number)
    return replace(reference, by="alias", value=check_alias(revision))


def home() -> Path:
    """The folder of registry, runs and flows: $KVQ_HOME, else ~/.kvq."""
    return Path(os.environ.get("KVQ_HOME") or Path.home() / ".kvq")


def registry_url(url: str | Path | None = None) -> str:
    """The address of the registry in use: `url`, else $KVQ_REGISTRY, else $KVQ_HOME/registry, else ~/.kvq/registry."""
    return str(url or os.environ.get("KVQ_REGISTRY") or (home() / "registry").absolute().as_uri())


def without_secrets(text: str) -> str:
    """A text as messages may quote it: without a user and password, or a token of the Hub, that stand in it."""
    return _SECRET.sub("***", text)


def kind_and_root(url: str) -> tuple[str, str]:
    """Split a registry's address: its kind, FOLDER or HUB, and the rest; ValueError if it is none.

    The rest is a path, an organization. A single word that is no folder yet is
    refused: it may be the name of an organization.
    """
    kind = HUB if url.startswith(HUB) else FOLDER
    root = url.removeprefix(kind).rstrip("/")
    if kind == HUB:
        check_org(root)
    return kind, str(_folder(url)) if kind == FOLDER else root


def _folder(url: str) -> Path:
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return Path(unquote(parts.path))
    if _WORD.fullmatch(url) and not Path(url).exists():
        raise ValueError(f"registry {url}; use hf://{url} for that organization of the Hub, ./{url} for a new folder")
    if "://" not in url:
        return Path(url).absolute()
    text = (
        "use file:///folder, with three slashes, a folder or hf://org; a token belongs in `hf auth login` or HF_TOKEN"
    )
    raise ValueError(f"registry {without_secrets(url)}; {text}")
