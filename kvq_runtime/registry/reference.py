"""Parse and check names, versions, aliases, references and registry addresses.

    reference   name · name@1.2.0 · name@production · name@sha256:<64 hex digits> · path/to/file.safetensors
                hf://org/name@..., or org/name@...: the same, in the registry hf://org
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
_NAME = re.compile(r"(?!.*(?:--|\.\.|\.git$|\.ipynb$|\.safetensors$))[a-z0-9](?:[a-z0-9._-]{0,94}[a-z0-9_])?")
_VERSION = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})")
_ALIAS = re.compile(r"(?!sha256$)[a-z][a-z0-9-]{0,31}")
_ORG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_WORD = re.compile(r"[\w-]+")  # no folder as people write them, with a slash or a dot
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SECRET = re.compile(r"(?<=//)[^/\s]*@|\bhf_[A-Za-z0-9]{8,}")
_FILE = re.compile(r"README\.md|[a-z0-9][a-z0-9._-]{0,91}\.(png|svg)")


def _check(pattern: re.Pattern[str], text: Any, what: str, use: str) -> str:
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise ValueError(f"{what} {text!r:.120}; use {use}")
    return text


def is_name(name: str) -> bool:
    """Return True for a valid name of an artifact."""
    return bool(_NAME.fullmatch(name))


def check_name(name: str) -> str:
    """Return a valid name of an artifact, which a Hub takes as that of a repository; raise ValueError for another."""
    use = "1 to 96 of a-z 0-9 . _ -, the first a letter or digit, the last no . or -, without .. and --, and not "
    return _check(_NAME, name, "name", f"{use}ending in {SUFFIX}, .git or .ipynb")


def check_version(version: str) -> str:
    """Return a valid version; raise ValueError for another."""
    return _check(_VERSION, version, "version", "three numbers, as in 1.2.0")


def check_alias(alias: str) -> str:
    """Return a valid alias; raise ValueError for another."""
    return _check(_ALIAS, alias, "alias", "1 to 32 of a-z 0-9 -, the first a letter, as in production")


def is_sha256(text: Any) -> bool:
    """Return True for a digest as kvq writes it."""
    return isinstance(text, str) and bool(_SHA256.fullmatch(text))


def check_sha256(sha256: str) -> str:
    """Return a valid digest; raise ValueError for another."""
    length = f", not {len(sha256)} characters" if isinstance(sha256, str) else ""
    return _check(_SHA256, sha256, "sha256", f"64 digits of 0-9 a-f{length}; kvq history NAME prints its versions' own")


def check_commit(commit: Any) -> str:
    """Return a valid commit of a Hub; raise ValueError for another."""
    return _check(_COMMIT, commit, "commit", "40 digits of 0-9 a-f")


def check_file(file: str) -> str:
    """Return a valid name of an attachment; raise ValueError for another."""
    return _check(_FILE, file, "file name", "README.md, or a picture.png or .svg of a-z 0-9 . _ -")


def check_org(org: str) -> str:
    """Return a valid organization or user of a Hub; raise ValueError for another."""
    _check(_ORG, without_secrets(org), "organization", "1 to 96 of A-Z a-z 0-9 . _ -, as in hf://my-org")
    return org


def order(version: str) -> tuple[int, ...]:
    """Return a version's numbers, by which versions are sorted."""
    return tuple(int(part) for part in version.split("."))


@dataclass(frozen=True)
class Reference:
    """A name and how to choose among its versions.

    by         "default": production, else the newest version; else by version, alias or sha256
    value      the version, alias or digest; "" by default
    registry   hf://org if the reference begins with it, else ""
    """

    name: str
    by: Literal["default", "version", "alias", "sha256"] = "default"
    value: str = ""
    registry: str = ""


def parse(text: str | Path) -> Reference | Path:
    """Parse a reference, or the path of a .safetensors file; raise ValueError for any other text."""
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
    if not slash:
        return _parse_version(check_name(name), at, value)
    if not _ORG.fullmatch(org) or not is_name(rest) or Path(text).is_file():
        there = f"a folder without {ARTIFACT_FILE}" if Path(text).is_dir() else "there is no such folder"
        raise ValueError(
            f"name {name!r:.120}: {f'a file, but no {SUFFIX}' if Path(text).is_file() else there}; use the path of a "
            f"folder that holds {ARTIFACT_FILE}, of a {SUFFIX} file, or ORG/NAME of a Hub"
        )
    return replace(_parse_version(rest, at, value), registry=f"{HUB}{org}")


def _parse_version(name: str, at: str, value: str) -> Reference:
    """Parse what follows the @ of a reference."""
    if not at:
        return Reference(name)
    if value.startswith("sha256:"):
        return Reference(name, "sha256", check_sha256(value.removeprefix("sha256:")))
    if value[:1].isdigit():
        return Reference(name, "version", check_version(value))
    return Reference(name, "alias", check_alias(value))


def home() -> Path:
    """Return the folder of registry, runs, flows and cache: $KVQ_HOME, else ~/.kvq."""
    return Path(os.environ.get("KVQ_HOME") or Path.home() / ".kvq")


def registry_url(url: str | Path | None = None) -> str:
    """Return the address of the registry in use: `url`, else $KVQ_REGISTRY, else $KVQ_HOME/registry."""
    return str(url or os.environ.get("KVQ_REGISTRY") or (home() / "registry").absolute().as_uri())


def without_secrets(text: str) -> str:
    """Return a text without user, password or a token of the Hub, as messages may quote it."""
    return _SECRET.sub("***", text)


def kind_and_root(url: str) -> tuple[str, str]:
    """Split a registry's address into FOLDER or HUB, and the path or organization; raise ValueError for another.

    A single word that is no folder yet is rejected: it may be the name of an organization.
    """
    if url.startswith(HUB):
        return HUB, check_org(url.removeprefix(HUB).rstrip("/"))
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return FOLDER, unquote(parts.path).rstrip("/") or "/"
    if _WORD.fullmatch(url) and not Path(url).exists():
        raise ValueError(f"registry {url}; use hf://{url} for that organization of the Hub, ./{url} for a new folder")
    if "://" not in url:
        return FOLDER, str(Path(url).absolute())
    text = "use file:///folder, a folder or hf://org; a token belongs in `hf auth login` or HF_TOKEN"
    raise ValueError(f"registry {without_secrets(url)}; {text}")
