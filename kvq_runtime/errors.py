"""Exceptions about artifacts and registries; `kvq_runtime.cli.exit_codes` maps each to an exit code."""

from collections.abc import Iterator
from contextlib import contextmanager


def extra(name: str) -> str:
    """Return the command that installs an extra from source: on an index anybody may take the name."""
    return f"the extra `{name}` of kvq brings it: pip install -e '.[{name}]' in a checkout"


class ArtifactError(ValueError):
    """An artifact, event, lock file or model failed a check. The message names the file and begins with the check."""


class NotFound(ArtifactError):
    """Something named does not exist: an artifact, version, alias, registry, recipe, model, corpus or file."""


class Conflict(ArtifactError):
    """Another change came first, or a change contradicts the present state."""


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
        raise OSError(f"{what}: {error}") from error
