"""Refuse a folder that is named as a registry to read and is not there. Imports nothing that takes long."""

import os
from argparse import Namespace

from kvq_runtime.errors import NotFound
from kvq_runtime.registry import reference


def check_named(args: Namespace) -> None:
    """Check the registry that a command or $KVQ_REGISTRY names; the default one may be missing: it is empty."""
    named = getattr(args, "where", None) or getattr(args, "registry", None) or os.environ.get("KVQ_REGISTRY")
    if named is not None:
        check(named)


def check(url: str) -> None:
    """Raise NotFound for the address of a folder that is not there."""
    if reference.hub_org(url) is None and not (root := reference.local_root(url)).is_dir():
        raise NotFound(f"no registry {url}: there is no folder {root}; what publishes into it makes it")
