"""Read only regular files, and write so that a crash leaves either the old state or the new one.

Reading: the file is opened once, and is not a symbolic link; checks are made on the bytes that were read, never on the
path again. Writing: a temporary file on the same file system (a draft) is fsynced, gets its name in one atomic step,
and the folder is fsynced. `claim` is that step for a name that must be new, `replace` for a name that may exist.

There is a fault point between any two steps that change a disk, where tests see what a crash or a full disk leaves
behind: tests/registry/test_faults.py visits each of them.
"""

import errno
import fcntl
import hashlib
import io
import json
import os
import secrets
import signal
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from kvq_runtime.errors import ArtifactError, NotFound

FULL = (errno.ENOSPC, errno.EDQUOT)
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # NONBLOCK: opening a pipe does not wait
_passed: Counter[str] = Counter()  # how often a fault point that $KVQ_FAULT names


@contextmanager
def opened(path: Path) -> Iterator[tuple[io.BufferedReader, int]]:
    """Open a regular file; yields it with its size.

    Raises NotFound, or ArtifactError for a link, a pipe, a folder or a device.
    """
    try:
        descriptor = os.open(path, _READ)
    except FileNotFoundError:
        raise NotFound(f"{path}: no such file") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise ArtifactError(
                f"{path}: a symbolic link, which is not followed; use the path of the file itself"
            ) from None
        if error.errno in (errno.ENXIO, errno.EISDIR, errno.ENOTDIR):
            raise ArtifactError(f"{path}: not a regular file; use the path of one") from None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise ArtifactError(f"{path}: not a regular file; use the path of one")
    with os.fdopen(descriptor, "rb") as file:
        yield file, status.st_size


def read(path: Path, limit: int) -> bytes:
    """Return the content of a regular file; raises ArtifactError if it has more than `limit` bytes."""
    with opened(path) as (file, size):
        if size > limit:
            raise ArtifactError(f"{path}: {size} bytes; at most {limit} are allowed")
        return file.read(limit)


def json_object(path: Path, limit: int = 1 << 26) -> dict[str, Any]:
    """Read the JSON object in a file of a model, following links; raises ArtifactError for anything else."""
    data = read(path.resolve(), limit)
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: invalid JSON: {error}; download it again") from None
    if not isinstance(value, dict):
        raise ArtifactError(f"{path}: expected an object, got {value!r:.80}; download it again")
    return value


def digest(path: Path) -> tuple[str, int]:
    """Return sha256, as hex digits, and size of a regular file."""
    with opened(path) as (file, _):
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return sha256, file.tell()


def claim(path: Path, data: bytes, temporary: Path) -> bool:
    """Write a read-only file if its name is free; else change nothing and return False.

    temporary   a folder on the same file system, for the draft
    Of several processes that claim one name, exactly one gets True. Raises RuntimeError without hard links.
    """
    sync(path.parent)  # an earlier name in this folder must be durable before this one
    with draft(temporary) as (drafted, file):
        file.write(data)
        _finish(file)
        try:
            fault_point("claim.drafted")
            os.link(drafted, path)
            fault_point("claim.linked")
            claimed = True
        except FileExistsError:
            claimed = False
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK):
                text = f"{path.parent}: the file system has no hard links; use a registry elsewhere"
                raise RuntimeError(text) from error
            raise
    fault_point("claim.unlinked")
    sync(path.parent)  # also if another process claimed it: it may have died before this
    fault_point("claim.synced")
    return claimed


def replace(path: Path, data: bytes, temporary: Path, mode: int = 0o444) -> None:
    """Write a file, replacing one of that name; readers see the old bytes or the new ones."""
    with draft(temporary) as (drafted, file):
        file.write(data)
        settle(drafted, file, path, mode)


def save(path: Path, data: bytes) -> None:
    """Write a file as `replace`, with the draft beside it."""
    replace(path, data, path.parent, mode=0o644)


def orphans(folder: Path) -> list[Path]:
    """List drafts whose processes died: each is locked by its process, on whatever machine that is."""
    drafts = []
    for path in sorted(folder.glob(".kvq-*.tmp")):
        with suppress(OSError):  # locked; or it has its name by now, or is another user's
            descriptor = os.open(path, _READ)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                drafts.append(path)
            finally:
                os.close(descriptor)
    return drafts


@contextmanager
def draft(folder: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Create a file in a folder, to write and read; it is removed at the end unless `settle` named it.

    Drafts of dead processes in that folder are removed.
    """
    fault_point("draft.begun")
    for orphan in orphans(folder):
        with suppress(PermissionError):  # another user's
            orphan.unlink(missing_ok=True)
    path, descriptor = _locked_draft(folder)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            fault_point("draft.opened")
            yield path, file
    except OSError as error:
        if error.errno in FULL and error.filename is None:  # a write does not say where
            error.filename = str(folder)
        raise
    finally:
        path.unlink(missing_ok=True)


def _locked_draft(folder: Path) -> tuple[Path, int]:
    """Create an empty draft, locked until it is closed; a file system without locks keeps drafts of the dead."""
    while True:
        path = folder / f".kvq-{secrets.token_hex(8)}.tmp"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:  # of the folder, which is what somebody named
            raise OSError(error.errno, error.strerror, str(folder)) from None
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)  # another process took it for an orphan before it was locked


def settle(path: Path, file: BinaryIO, name: Path, mode: int = 0o444) -> None:
    """Give a draft its final name on the same file system, replacing a file of that name."""
    _finish(file, mode)
    fault_point("replace.drafted")
    os.replace(path, name)
    fault_point("replace.renamed")
    sync(name.parent)
    fault_point("replace.synced")


def _finish(file: BinaryIO, mode: int = 0o444) -> None:
    file.flush()
    fault_point("draft.written")
    os.fchmod(file.fileno(), mode)
    os.fsync(file.fileno())


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder and its parents durably; an existing one is synced, as its creator may have died before that."""
    if path.is_dir():
        with suppress(PermissionError):  # without access to the parent, this process did not create the folder
            sync(path.parent)
        return
    make_folder(path.parent)
    fault_point("folder.begun")
    path.mkdir(mode, exist_ok=True)
    fault_point("folder.made")
    sync(path.parent)
    fault_point("folder.synced")


def lock(path: Path, wait: bool = True) -> AbstractContextManager[Any]:
    """Lock a file until the returned context ends, or this process; without `wait` raises Timeout if another has it.

    Raises RuntimeError where the file system has no locks.
    """
    from filelock import FileLock, Timeout

    try:
        return FileLock(path).acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise
    except OSError as error:
        if error.filename is not None:  # the file cannot be created
            raise
        text = f"{path.parent}: the file system has no locks ({error.strerror})"
        raise RuntimeError(f"{text}; use a folder on another one, as on a local disk") from error


def sync(path: Path) -> None:
    """Fsync a folder, so that the names in it are durable, or a file, so that its bytes are."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fault_point(name: str) -> None:
    """Do nothing unless $KVQ_FAULT names this point.

    KVQ_FAULT=claim.linked:2         kill -9 of this process when it passes the point claim.linked for the second time
    KVQ_FAULT=claim.linked:2:full    an OSError there instead: no space left on device
    """
    setting = os.environ.get("KVQ_FAULT")
    if setting is None:
        return
    target, number, *how = setting.split(":")
    _passed[name] += target == name
    if target != name or _passed[name] != int(number):
        return
    if how == ["full"]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
    os.kill(os.getpid(), signal.SIGKILL)
