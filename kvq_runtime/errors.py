"""Exceptions about artifacts and registries; `kvq_runtime.cli.exit_codes` maps each to an exit code."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

_T = TypeVar("_T")

_PATHS = {  # what to do about a path that the system refuses
    errno.ENOENT: "there is no such file or folder; make it, or name another one",
    errno.EISDIR: "is a folder, and a file is wanted; name a file",
    errno.ENOTDIR: "leads through a file, or is one, where a folder is wanted; name another one",
    errno.EEXIST: "is there already; name another one",
    errno.EBUSY: "is mounted by itself, and nothing can take its place; mount its folder, or name another path",
    errno.EACCES: "may not be read, or not be written, by this user; change its permissions, or name another one",
    errno.EPERM: "may not be changed by this user; name another one",
    errno.EROFS: "is in a file system that cannot be written to; name another one",
}


def extra(name: str) -> str:
    """Return the command that installs an extra from source: on an index anybody may take the name."""
    return f"the extra `{name}` of kvq brings it: pip install -e '.[{name}]' in a checkout"


class ArtifactError(ValueError):
    """An artifact, event, lock file or model failed a check. The message names the file and begins with the check."""


class NotFound(ArtifactError):
    """Something named does not exist: an artifact, version, alias, registry, recipe, model, corpus or file."""


class Conflict(ArtifactError):
    """Another change came first, or a change contradicts the present state."""


class Unanswered(RuntimeError):
    """A Hub or a network failed, and whether a request was carried out is unknown."""


def spoken(error: BaseException) -> str:
    """Say an error in words: of what the system refuses the path, what it is and what to do, without its number."""
    if not isinstance(error, OSError) or error.errno is None or not error.strerror:  # a library's, in words already
        return str(error)
    path = error.filename if error.filename2 is None or error.errno == errno.ENOENT else error.filename2
    if path is None:
        return error.strerror
    return f"{path}: {_PATHS.get(error.errno, error.strerror)}"


def counted(number: int, what: str) -> str:
    """A number of things, in words: "1 token", "2 tokens"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def check_type(what: str, value: Any, types: type[_T] | tuple[type[_T], ...], give: str) -> _T:
    """An argument of one of these types; TypeError, in words, for another."""
    if not isinstance(value, types):
        raise TypeError(f"{what} is of type {type(value).__name__}; give {give}")
    return value


@contextmanager
def named(what: str) -> Iterator[None]:
    """Begin messages of errors with what was asked for."""
    try:
        yield
    except UnicodeError as error:  # whose text is of its parts
        raise ValueError(f"{what}: {error}") from error
    except (ValueError, RuntimeError) as error:
        error.args = (f"{what}: {error}",)
        raise
    except OSError as error:  # whose text is of its number and file, whatever its args
        kind = type(error) if type(error).__module__ == "builtins" else OSError  # a library's may want more than a text
        raise kind(f"{what}: {spoken(error)}") from error
