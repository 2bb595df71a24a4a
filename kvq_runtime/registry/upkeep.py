"""Shared upkeep of every kind of registry: the report of a problem, and the least age of garbage."""

from dataclasses import dataclass

GRACE = 24 * 3600.0  # seconds: `kvq gc` leaves younger files alone, since a publish may be about to name them


@dataclass(frozen=True)
class Finding:
    """One line of `kvq doctor`.

    level    "fault", or "note" for what is harmless
    what     the problem
    path     of the file, or the repository
    advice   what to do
    """

    level: str
    what: str
    path: str
    advice: str
