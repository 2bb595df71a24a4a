"""A name that is claimed after another process died is lasting, and so is every name before it.

Several processes follow each other on one disk, which loses at a power cut what was not synced: see `chaos.Disk`.
"""

import os
from pathlib import Path

from chaos import Disk, run

from kvq_runtime.disk import files


def claim(folder: Path, number: int) -> int:
    """A process that claims a name in a log of events; 0 if it got it, else 3."""
    got = files.claim(folder / "events" / f"{number}.json", b"{}", folder / "tmp")
    return 0 if got else 3


def folders(root: Path) -> Path:
    folder = root / "registry"
    for name in ("events", "tmp"):
        (folder / name).mkdir(parents=True)
    return folder


def test_a_name_left_by_a_dead_process_is_lasting_before_the_next_name(tmp_path):
    """Else a power cut could take the first event of two and leave the second."""
    folder = folders(tmp_path)
    died = run(lambda folder: claim(folder, 1), folder, fault="claim.linked:1")
    after = run(lambda folder: claim(folder, 2), folder)
    assert (died.code, after.code) == (-9, 0)
    assert sorted(os.listdir(folder / "events")) == ["1.json", "2.json"]
    Disk().play(died.steps + after.steps)


def test_a_name_that_another_process_claimed_is_made_durable_too(tmp_path, monkeypatch):
    """Its process may have died between the link and the synchronisation of the folder."""
    assert files.claim(tmp_path / "name", b"first", tmp_path)
    synced = list[Path]()
    monkeypatch.setattr(files, "sync", synced.append)
    assert not files.claim(tmp_path / "name", b"second", tmp_path)
    assert synced[-1] == tmp_path and len(synced) == 2
