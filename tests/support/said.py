"""A name of which something is said: its registries are fixtures of tests/registry/conftest.py."""

from hashlib import sha256

from kvq_runtime.registry import resolve

NAME = "tiny-2bit"
FOLDER = sha256(NAME.encode()).hexdigest()
GOOD = {"schema": 1, "name": NAME, "at": "2026-01-31T12:00:00Z", "by": "eve", "replaces": []}  # what every remark has


def production() -> str:
    """What a cache that is made now is made of."""
    return resolve.resolve(f"{NAME}@production").version
