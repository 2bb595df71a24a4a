"""Read files without being led astray, and write them so that a crash leaves the old state or the new one.

Reading: a regular file, opened once, its last path component no symbolic link. Whoever reads checks what was read, not
the path again. Writing: a temporary file on the same file system, fsynced; then one atomic step gives it its name; then
the folder is fsynced. `claim` is that step for names that must be new, `replace` for names that may exist.
"""

import errno
import hashlib
import io
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvq_runtime.errors import ArtifactError, NotFound

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
    draft = _draft(data, temporary)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK):
            raise RuntimeError(f"{path.parent}: the file system has no hard links; use a registry elsewhere") from error
        raise
    finally:
        draft.unlink()
    sync(path.parent)
    return True


def replace(path: Path, data: bytes, temporary: Path, mode: int = 0o444) -> None:
    """Write a file, in place of whatever has the name; readers see the old bytes or the new ones."""
    draft = _draft(data, temporary, mode)
    try:
        os.replace(draft, path)
    except BaseException:
        draft.unlink()
        raise
    sync(path.parent)


def _draft(data: bytes, temporary: Path, mode: int = 0o444) -> Path:
    draft = temporary / f".{os.getpid()}-{secrets.token_hex(8)}.tmp"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
    except BaseException:
        with suppress(FileNotFoundError):
            draft.unlink()
        raise
    return draft


def make_folder(path: Path) -> None:
    """Create a folder and its parents, and make them last."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def sync(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
