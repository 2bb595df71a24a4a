"""Load an artifact once a process: as long as it is in use, a load of the same sha256 returns the same object.

Weak references: with its last user, a cache or a variable, the artifact is dropped and the next call loads it again.
"""

import threading
from pathlib import Path
from weakref import WeakValueDictionary

from kvq_runtime.artifact import artifact
from kvq_runtime.artifact.artifact import Artifact

_lock = threading.Lock()
_loaded: WeakValueDictionary[str, Artifact] = WeakValueDictionary()


def load(path: Path, sha256: str, size: int) -> tuple[Artifact, bool]:
    """The artifact with this digest, and whether it was there already; else `artifact.load` of the file.

    Threads that ask at once load one after the other, the same file once.
    """
    with _lock:
        found = _loaded.get(sha256)
        if found is not None:
            return found, True
        loaded = _loaded[sha256] = artifact.load(path, sha256, size)
        return loaded, False
