"""Keep artifacts in a folder: see `tree`. Unfinished files are in its folder tmp/.

A file is written to tmp/, fsynced, and gets its name by a rename, or, where the name must be new, by a hard link. It is
read-only from then on, blobs among them, and a blob is on the disk before an event names it.
Only temporary files and unnamed blobs are ever removed, and only if they are older than a grace period. Links are never
followed to what is removed.
"""

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

from kvq_runtime.artifact import header
from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry.events import Version
from kvq_runtime.registry.place import Finding
from kvq_runtime.registry.reference import ARTIFACT_FILE
from kvq_runtime.registry.tree import BLOBS, TreeRegistry


class LocalRegistry(TreeRegistry):
    """A registry in a folder, `root`, which the first publish creates."""

    def __init__(self, root: Path | str):
        self.root = Path(root).absolute()
        self._tmp = self.root / "tmp"

    @property
    def url(self) -> str:
        """Its address, file:///..."""
        return self.root.as_uri()

    def at(self, path: str) -> Path:
        """The file's own path."""
        return self.root / path

    def address(self, path: str) -> str:
        """A path as messages name it."""
        return str(self.root / path)

    def entries(self, folder: str) -> list[str]:
        """The names right below a folder, in order; NotADirectoryError for a link on the way that leads nowhere."""
        path = self.root / folder
        try:
            return sorted(os.listdir(path))
        except NotADirectoryError:
            self._check_is_folder()
            raise
        except FileNotFoundError:
            for one in (path, *path.parents[: len(PurePath(folder).parts) - 1]):
                if one.is_symlink() and not one.exists():
                    raise NotADirectoryError(f"{one}: a link that leads nowhere") from None
            return []

    def has(self, path: str) -> bool:
        """True if a file is there."""
        return (self.root / path).exists()

    def content(self, path: str, limit: int) -> bytes:
        """All of a file."""
        return files.read(self.root / path, limit)

    def put(self, path: str, data: bytes) -> None:
        """Write a file, replacing one that is there."""
        files.replace(self._in_its_folder(path), data, self._tmp)

    def claim(self, path: str, data: bytes) -> bool:
        """Write a file that is not there; False, and nothing is written, if it is."""
        return files.claim(self._in_its_folder(path), data, self._tmp)

    def _in_its_folder(self, path: str) -> Path:
        target = self.root / path
        for folder in (target.parent, self._tmp):
            files.make_folder(folder)
        return target

    def changed(self) -> dict[str, float | None]:
        """{name: time of its last change} of all that is among blobs; None for what is no regular file."""
        found = dict[str, float | None]()
        for name in self.entries(BLOBS):
            with suppress(FileNotFoundError):  # removed meanwhile
                found[name] = _changed(self.root / BLOBS / name)
        return found

    def finish(self, name: str, version: Version | None = None, content: Mapping[str, bytes] | None = None) -> None:
        """Sync the events, whose process may have died before; write blobs again that gc took before their event."""
        if version is None:
            files.sync(self.events_folder(name))
        super().finish(name, version, content)

    def check_writable(self) -> None:
        """Raise RuntimeError if folder or nearest existing parent is read-only, ArtifactError if that is a file."""
        self._check_is_folder()
        if not os.access(self._nearest(), os.W_OK):
            raise RuntimeError(f"the registry {self.root} cannot be written to; choose another with --registry")

    def _nearest(self) -> Path:
        return next(folder for folder in (self.root, *self.root.parents) if folder.exists())

    def _check_is_folder(self) -> None:
        if not (nearest := self._nearest()).is_dir():
            raise ArtifactError(f"the registry {self.root}: {nearest} is a file; name a folder, which may be new")

    def hint(self, name: str) -> str:
        """Return the end of the message about a missing name, or about a folder that is missing itself."""
        missing = "there is no such folder yet; kvq-calibrate publishes artifacts, and makes it"
        return super().hint(name) if self.root.is_dir() else missing

    def fetch(self, name: str, version: Version, file: str = ARTIFACT_FILE) -> Path:
        """The path of a file's blob."""
        return self.blob(version.content[file][0])

    fetch_verified = fetch  # whoever reads it checks its digest

    def about(self, name: str, version: Version) -> dict[str, Any]:
        """Recipe, model and corpus of a version, from its file's header."""
        return header.summary(header.describe(self.blob(version.sha256)))

    # ---- upkeep

    def remove_drafts(self, named: set[str], before: float, dry_run: bool) -> list[str]:
        """Remove temporary files that were not changed since `before`; returns their paths."""
        for folder in ("blobs", BLOBS, "tmp"):
            if (self.root / folder).is_symlink():
                text = "a link, and gc removes nothing outside the registry; put the folder itself there"
                raise ArtifactError(f"{self.root / folder}: {text}")
        drafts = [path for path in sorted(self._tmp.glob(".*.tmp")) if _older(path, before)]
        for path in [] if dry_run else drafts:
            sha256 = path.name[1 : -len(".tmp")]
            if sha256 in named and not self.blob(sha256).exists():  # a gc was killed after moving it aside
                path.rename(self.blob(sha256))
            path.unlink(missing_ok=True)
            files.fault_point("gc.draft")
        return list(map(str, drafts))

    def remove_blobs(self, orphans: list[str], before: float) -> list[str]:
        """Remove these blobs, except those that were written since `before` or named meanwhile; returns the removed."""
        return [sha256 for sha256 in orphans if _older(self.blob(sha256), before) and self._remove(sha256, before)]

    def _remove(self, sha256: str, before: float) -> bool:
        """Move a blob aside, check it again, and only then delete it.

        A publish rewrites its blob before its event, so a young blob may be about to be named: restore it. An old one
        was not written by a running publish; but if a publish that stalled past the grace period has named it, restore
        it.
        """
        path, aside = self.blob(sha256), self._tmp / f".{sha256}.tmp"
        aside.parent.mkdir(exist_ok=True)
        path.rename(aside)
        files.fault_point("gc.aside")
        if not _older(aside, before) or sha256 in self.named():
            aside.rename(path)
            return False
        aside.unlink()
        files.fault_point("gc.blob")
        return True

    def examine(self) -> list[Finding]:
        """Everything wrong with events, blobs (by content) and records; unfinished and unnamed files as notes."""
        advice = "left by a killed process, or being written now; kvq gc removes it when it is old"
        drafts = [Finding("note", "temporary file", str(path), advice) for path in sorted(self._tmp.glob("*"))]
        return super().examine() + drafts


def _changed(path: Path) -> float | None:
    """The time at which a regular file was last changed; None for anything else that is there."""
    status = path.lstat()
    return status.st_mtime if stat.S_ISREG(status.st_mode) else None


def _older(path: Path, before: float) -> bool:
    """True if a path is a regular file, not changed since `before`."""
    try:
        changed = _changed(path)
    except FileNotFoundError:
        return False
    return changed is not None and changed <= before
