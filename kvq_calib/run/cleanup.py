"""List the run folders under a folder, and delete those that are published or old.

A plan that is run again, as every night, goes on from its folder: without it, it fits and measures once more.
"""

import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvq_calib.run import checkpoint
from kvq_runtime.artifact.header import ARTIFACT_FILE


@dataclass(frozen=True)
class RunFolder:
    """A run folder: its model, whether all its artifacts are published, seconds since a file changed, its bytes."""

    path: Path
    model: str
    published: bool
    unused: float
    bytes: int


def run_folders(root: Path) -> list[RunFolder]:
    """Describe every run folder, the one that was used last at first."""
    found = [_describe(path) for path in root.glob("*") if path.is_dir()]
    return sorted(found, key=lambda folder: folder.unused)


def _describe(path: Path) -> RunFolder:
    status = [path.stat()]
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):  # its run is at work
                status.append(Path(folder, name).lstat())
    try:
        plan = json.loads((path / "plan.json").read_text())
    except (OSError, ValueError):  # its run was killed at the beginning
        plan = {}
    artifacts = list(path.glob("artifacts/*"))  # which keep the file itself only if it was not published
    published = 0 < len(artifacts) == len(plan.get("recipes", ()))
    published = published and not any((artifact / ARTIFACT_FILE).exists() for artifact in artifacts)
    unused = time.time() - max(one.st_mtime for one in status)
    return RunFolder(path, plan.get("model", ""), published, unused, sum(one.st_size for one in status))


def delete(path: Path) -> None:
    """Delete a run folder; raise AlreadyRunning if a process works in it. If killed, a folder .NAME is left."""
    gone = path.with_name(f".{path.name.removeprefix('.')}")
    with checkpoint.claimed(path):
        path.rename(gone)  # a new run of the plan gets a folder of its own
    shutil.rmtree(gone)
