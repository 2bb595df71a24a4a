"""A name that is claimed after another process died is lasting, and so is every name before it.

Several processes follow each other on one disk, which loses at a power cut what was not synced: see `traced.Disk`.
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


def test_a_name_that_a_rival_took_and_died_with_is_lasting_when_the_loser_knows(tmp_path):
    """The rival links it between the loser's first look and its own link, and ends before it syncs the folder."""
    folder = folders(tmp_path)

    def overtaken(folder: Path) -> int:
        point = files.fault_point

        def rival(name: str) -> None:
            point(name)
            if name == "claim.drafted":
                draft = folder / "tmp" / ".2-0000000000000000.tmp"
                draft.write_bytes(b"{}")
                descriptor = os.open(draft, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
                os.link(draft, folder / "events" / "1.json")

        files.fault_point = rival  # in a child of the test
        return claim(folder, 1)

    lost = run(overtaken, folder)
    assert lost.code == 3, lost.output
    assert ["link", f"{folder}/tmp/.2-0000000000000000.tmp", f"{folder}/events/1.json"] in lost.steps
    # of two attempts to link, the loser's changed nothing
    own = [step for step in lost.steps if step[0] == "link" and ".2-" not in step[1]]
    assert len(own) == 1
    Disk().play([step for step in lost.steps if step is not own[0]])
