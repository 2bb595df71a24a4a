"""Read files without being led astray, and write them so that a crash leaves the old state or the new one.

Reading: a regular file, opened once, its last path component no symbolic link. Whoever reads checks what was read, not
the path again. Writing: a temporary file on the same file system, fsynced; then one atomic step gives it its name; then
the folder is fsynced. `claim` is that step for names that must be new, `replace` for names that may exist.
"""

import errno
import hashlib
import io
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvq_runtime import faults
from kvq_runtime.errors import ArtifactError, NotFound

_DRAFT = re.compile(r"\.([1-9][0-9]{0,8})-[0-9a-f]{16}\.tmp")
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # NONBLOCK: a pipe must not hold us at open


@contextmanager
def opened(path: Path) -> Iterator[tuple[io.BufferedReader, int]]:
    """The open file and its size; a link, a pipe, a folder or a device is an ArtifactError."""
    try:
        descriptor = os.open(path, _READ)
    except FileNotFoundError:
        raise NotFound(f"{path}: no such file") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise ArtifactError(f"{path}: a symbolic link, which is not followed; give the file itself") from None
        if error.errno in (errno.ENXIO, errno.EISDIR, errno.ENOTDIR):
            raise ArtifactError(f"{path}: not a regular file") from None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise ArtifactError(f"{path}: not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        yield file, status.st_size


def read(path: Path, limit: int) -> bytes:
    """The bytes of a regular file of at most `limit` bytes."""
    with opened(path) as (file, size):
        if size > limit:
            raise ArtifactError(f"{path}: {size} bytes; at most {limit} are allowed here")
        return file.read(limit)


def digest(path: Path) -> tuple[str, int]:
    """sha256 and size of a regular file."""
    with opened(path) as (file, _):
        found = hashlib.file_digest(file, "sha256").hexdigest()
        return found, file.tell()


def claim(path: Path, data: bytes, temporary: Path) -> bool:
    """Write a file that must be new, read-only; False, and nothing changed, if the name is taken.

    temporary   a folder on the same file system. Of several processes that claim one name, exactly one gets True.
    """
    sync(path.parent)  # of two names the first must not be the one that is lost
    draft, claimed = _draft(data, temporary), True
    try:
        faults.point("claim.drafted")
        os.link(draft, path)
        faults.point("claim.linked")
    except FileExistsError:
        claimed = False
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK):
            raise RuntimeError(f"{path.parent}: the file system has no hard links; use a registry elsewhere") from error
        raise
    finally:
        draft.unlink()
    faults.point("claim.unlinked")
    sync(path.parent)  # where another claimed it, too: it may have died before this
    faults.point("claim.synced")
    return claimed


def replace(path: Path, data: bytes, temporary: Path, mode: int = 0o444) -> None:
    """Write a file, in place of whatever has the name; readers see the old bytes or the new ones."""
    draft = _draft(data, temporary, mode)
    try:
        faults.point("replace.drafted")
        os.replace(draft, path)
    except BaseException:
        draft.unlink()
        raise
    faults.point("replace.renamed")
    sync(path.parent)
    faults.point("replace.synced")


def save(path: Path, data: bytes) -> None:
    """`replace` in a folder of the user's: drafts lie beside the file, and those of processes that died are removed."""
    for draft in path.parent.glob(".*.tmp"):
        written_by = _DRAFT.fullmatch(draft.name)
        if written_by and not _is_alive(int(written_by[1])):
            draft.unlink(missing_ok=True)
    replace(path, data, path.parent, mode=0o644)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _draft(data: bytes, temporary: Path, mode: int = 0o444) -> Path:
    faults.point("draft.begun")
    draft = temporary / f".{os.getpid()}-{secrets.token_hex(8)}.tmp"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            faults.point("draft.opened")
            file.write(data)
            file.flush()
            faults.point("draft.written")
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
    except BaseException:
        with suppress(FileNotFoundError):
            draft.unlink()
        raise
    return draft


def make_folder(path: Path) -> None:
    """Create a folder and its parents, and make them last; one that is there, too: its maker may have died before."""
    if path.is_dir():
        with suppress(PermissionError):  # who may not open the parent has not made the folder
            sync(path.parent)
        return
    make_folder(path.parent)
    faults.point("folder.begun")
    path.mkdir(exist_ok=True)
    faults.point("folder.made")
    sync(path.parent)
    faults.point("folder.synced")


def sync(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
