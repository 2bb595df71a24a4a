"""Exceptions about artifacts and registries; `kvq_runtime.cli.exit_codes` maps each to an exit code."""


class ArtifactError(ValueError):
    """An artifact, event, lock file or model failed a check. The message names the file and begins with the check."""


class NotFound(ArtifactError):
    """What is named is not there: an artifact, version, alias, registry, recipe, model, corpus or file."""


class Conflict(ArtifactError):
    """A change came second to somebody else's, or contradicts the present state."""
