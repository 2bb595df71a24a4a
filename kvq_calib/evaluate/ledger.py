"""Keep finished units of an evaluation, so that one that was stopped goes on where it was, and repeats nothing.

A unit is named by the digest of all that its result depends on: weights, recipe, tokens, settings, environment, and the
code itself. So a folder may serve any number of evaluations, and what one has found another need not find again.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import kvq_calib
import kvq_runtime
from kvq_runtime.disk import files


@dataclass(frozen=True)
class Ledger:
    """A folder of small JSON files, one a unit, each written whole or not at all.

    folder   None: nothing is kept
    about    what all its units depend on beside their own names
    """

    folder: Path | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def within(self, **about: Any) -> "Ledger":
        """The same folder, for units that depend on this too."""
        return replace(self, about={**self.about, **about})

    def read(self, **unit: Any) -> Any | None:
        """Return the result of a unit, or None. PermissionError: it is to be found, and could not be kept then."""
        path = self._path(unit)
        if path is None:
            return None
        if not path.is_file():
            if path.parent.is_dir() and not os.access(path.parent, os.W_OK | os.X_OK):
                raise PermissionError(
                    f"{path.parent} may not be written by this user, and has only a part of what is asked for; "
                    "name another folder: --run DIR, or $KVQ_HOME"
                )
            return None
        try:
            found = json.loads(path.read_text())["found"]
        except (ValueError, KeyError):
            raise RuntimeError(f"{path} is damaged; delete it, and what it held is measured again") from None
        files.sync(path.parent)  # who wrote it may have died before it was sure to last
        return found

    def write(self, found: Any, **unit: Any) -> None:
        """Keep what was found for a unit: JSON."""
        path = self._path(unit)
        if path is not None:
            files.make_folder(path.parent)
            text = json.dumps({"unit": {**self.about, **unit}, "found": found})
            files.save(path, text.encode())

    def kept(self, find: Callable[[], Any], **unit: Any) -> Any:
        """Return the result of a unit: the one that is kept, or what `find` gives, which is kept from then on."""
        found = self.read(**unit)
        if found is None:
            found = find()
            self.write(found, **unit)
        return found

    def _path(self, unit: Mapping[str, Any]) -> Path | None:
        if self.folder is None:
            return None
        return self.folder / f"{digest_of({**self.about, **unit})}.json"


NOWHERE = Ledger()


def digest_of(value: Any) -> str:
    """sha256 of what JSON can hold, whatever the order of its names."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@cache
def code() -> str:
    """A digest of both packages' sources: what they found before they were changed is not to be relied on."""
    found = hashlib.sha256()
    for package in (kvq_runtime, kvq_calib):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()
