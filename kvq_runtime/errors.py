"""Name what can go wrong with a file or a registry; the command line maps each class to an exit code."""


class ArtifactError(ValueError):
    """A file, an event or a model is not what it must be. The message begins with the check that failed."""


class NotFound(ArtifactError):
    """No such name, version, alias or file."""


class Conflict(ArtifactError):
    """Somebody else's change came first, or the change contradicts what is already there."""
