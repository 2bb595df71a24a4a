"""Exceptions about artifacts and registries; `kvq_runtime.cli.exit_codes` maps each to an exit code."""


def extra(name: str) -> str:
    """What installs an extra: the source does, as no release is on an index, where the name is anybody's."""
    return f"the extra `{name}` of kvq brings it: pip install -e '.[{name}]' in a checkout"


class ArtifactError(ValueError):
    """An artifact, event, lock file or model failed a check. The message names the file and begins with the check."""


class NotFound(ArtifactError):
    """What is named is not there: an artifact, version, alias, registry, recipe, model, corpus or file."""


class Conflict(ArtifactError):
    """A change came second to somebody else's, or contradicts the present state."""
