"""Save finished units of an evaluation, so that a stopped evaluation resumes and repeats nothing.

The name of a unit is a digest of everything its result depends on: weights, recipe, tokens, settings, environment, and
the code itself. So any number of evaluations can share a folder.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import kvq_calib
import kvq_runtime
from kvq_runtime.disk import files


@dataclass(frozen=True)
class SavedResults:
    """A folder of JSON files, one a unit, each written whole or not at all.

    folder   None: save nothing
    about    common dependencies of all units
    """

    folder: Path | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def within(self, **about: Any) -> "SavedResults":
        """Return the results of units that depend on this, too."""
        return replace(self, about={**self.about, **about})

    def read(self, **unit: Any) -> Any | None:
        """Return the result of a unit, or None."""
        path = self._path(unit)
        if path is None or not path.is_file():
            return None
        try:
            result = json.loads(path.read_text())["found"]
        except (ValueError, KeyError):
            raise RuntimeError(f"{path} is damaged; delete it, and it is measured again") from None
        files.sync(path.parent)  # its writer may have died before it synced
        return result

    def write(self, result: Any, **unit: Any) -> None:
        """Save the result of a unit: JSON."""
        path = self._path(unit)
        if path is not None:
            files.make_folder(path.parent)
            files.save(path, json.dumps({"unit": {**self.about, **unit}, "found": result}).encode())

    def kept(self, compute: Callable[[], Any], **unit: Any) -> Any:
        """Return the saved result of a unit; compute and save it if there is none."""
        result = self.read(**unit)
        if result is None:
            result = compute()
            self.write(result, **unit)
        return result

    def _path(self, unit: Mapping[str, Any]) -> Path | None:
        return None if self.folder is None else self.folder / f"{digest_of({**self.about, **unit})}.json"


NOWHERE = SavedResults()


def digest_of(value: Any) -> str:
    """Return the sha256 of JSON, whatever the order of its names."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@cache
def code() -> str:
    """Return a digest of both packages' sources: results of other code are not reused."""
    digest = hashlib.sha256()
    for package in (kvq_runtime, kvq_calib):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
