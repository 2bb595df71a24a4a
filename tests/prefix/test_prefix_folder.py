"""A folder of prefixes that processes share: its owner, its budget, its writers."""

import os
import shutil
import signal
import stat
import time

import forked
import pytest
import torch
from feeding import GEOMETRY
from kept_blocks import contents, decoded, files, ids, rows, store

from kvq_runtime.errors import ArtifactError
from kvq_runtime.prefix.folder import SLACK, Folder, all_blocks, parse_budget


def test_files_are_the_user_s_alone(tmp_path):
    old = os.umask(0)
    try:
        store(tmp_path / "new" / "root").put(ids(16), *rows(16))
    finally:
        os.umask(old)
    for path in (tmp_path / "new" / "root").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ArtifactError, match="chmod go-w"):
        store(shared)
    (tmp_path / "link").symlink_to(tmp_path / "new" / "root")
    with pytest.raises(ArtifactError, match="a link"):
        store(tmp_path / "link")


def test_the_budget_holds_and_the_oldest_goes_first(tmp_path):
    kept, (keys, values) = store(tmp_path / "size"), rows(32)
    kept.put(ids(32), keys, values)
    two = sum(block.size for block in all_blocks(tmp_path / "size"))
    kept = store(tmp_path / "root", budget=2 * two + 100)
    texts = [ids(32, first=first) for first in (1, 2, 3)]
    kept.put(texts[0], keys, values)
    kept.put(texts[1], keys, values)
    assert [kept.longest(text) for text in texts] == [32, 32, 0]
    kept.load(texts[0])  # used: the other one is older now
    kept.put(texts[2], keys, values)
    assert [kept.longest(text) for text in texts] == [32, 0, 32]
    newest = [block.path.stem for block in all_blocks(tmp_path / "root")][-2:]
    assert newest == kept.names(texts[2])[::-1]  # ends of prefixes go before their beginnings
    long = store(tmp_path / "long", budget=4 * kept.codec.largest)
    assert long.put(ids(96), *rows(96)) == long.longest(ids(96)) == 64  # the blocks that surely fit
    with pytest.raises(ValueError, match="one block of rtn-2bit"):
        store(tmp_path, budget=100)


def test_blocks_of_a_time_to_come_go_first(tmp_path):
    """A clock was a year ahead; what is used again is as new as it is."""
    kept, (keys, values) = store(tmp_path / "size"), rows(32)
    kept.put(ids(32), keys, values)
    two = sum(block.size for block in all_blocks(tmp_path / "size"))
    kept = store(tmp_path / "root", budget=2 * two + 100)
    texts = [ids(32, first=first) for first in (1, 2, 3)]
    for text in texts[:2]:
        kept.put(text, keys, values)
    for path in files(tmp_path / "root"):
        os.utime(path, (time.time() + 365 * 86400,) * 2)
    kept.load(texts[0])
    kept.put(texts[2], keys, values)
    assert [kept.longest(text) for text in texts] == [32, 0, 32]


def test_one_process_keeps_a_folder_within_its_budget(tmp_path):
    """At every moment, also where a sixteenth of the budget is several files and the folder is nearly full."""
    folder, sizes = Folder(tmp_path, "0" * 64, 1600), []
    for number in range(60):
        folder.put(f"{number:064x}", bytes(30))
        sizes.append(sum(block.size for block in all_blocks(tmp_path)))
    assert max(sizes) <= 1600 and sizes[-1] > 1600 - 1600 // SLACK - 30


def test_nothing_is_removed_through_a_link(tmp_path):
    """Somebody's model is not a set of blocks, whatever leads to it."""
    root, model = tmp_path / "root", tmp_path / "model"
    kept = store(root)
    kept.put(ids(16), *rows(16))
    model.mkdir()
    theirs = [model / f"{'b' * 64}.safetensors", model / "model.safetensors"]
    for path in theirs:
        path.write_bytes(b"{}" * 100)
    (root / ("a" * 64)).symlink_to(model)
    (root / ("c" * 64)).mkdir()
    (root / ("c" * 64) / f"{'d' * 64}.safetensors").symlink_to(model / "model.safetensors")
    assert [block.path for block in all_blocks(root)] == files(kept.folder.blocks)
    small = store(root, budget=kept.codec.largest)
    small.put(ids(16, first=2), *rows(16))  # which makes room
    assert small.longest(ids(16)) == 0 and all(path.exists() for path in theirs)


def test_drafts_of_dead_processes_are_removed(tmp_path):
    drafts = store(tmp_path).folder.drafts
    dead = forked.process(forked.leave_draft, drafts)
    dead.start()
    dead.join()
    assert len([*drafts.iterdir()]) == 1
    store(tmp_path).put(ids(16), *rows(16))
    assert not [*drafts.iterdir()]


def test_a_budget_is_a_number_or_text():
    assert [parse_budget(text) for text in ("20GB", "1.5 MiB", 7)] == [20 * 10**9, 3 << 19, 7]
    for text in ("", "20", "-1GB", "20 parsecs", 0, True):
        with pytest.raises(ValueError, match="budget"):
            parse_budget(text)


def test_writers_of_one_prefix_and_readers(tmp_path):
    """Processes put the same and their own prefixes while others load and evict: every block that is found is whole."""
    keys, values = rows(64)
    budget = 20 * store(tmp_path).codec.largest

    def work(seed: int) -> int:
        kept, found = store(tmp_path, budget=budget), 0
        for turn in range(8):
            tokens = [*ids(32), *ids(32, first=10 * seed + turn)]
            kept.put(tokens, keys, values)
            blocks = kept.load(tokens)
            for k, _ in decoded(kept, blocks).values() if blocks else ():
                assert bool(torch.isfinite(k).all())
                found += 1
        assert found >= GEOMETRY.layers, "nothing that was put was ever found"
        return 0

    children = [forked.process(work, seed) for seed in (1, 2)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0]
    assert not [*tmp_path.rglob("*.tmp")]
    assert sum(block.size for block in all_blocks(tmp_path)) <= budget + 2 * budget // SLACK


POINTS = ["draft.opened:2", "draft.written:2", "replace.drafted:2", "replace.renamed:2", "prefix.removed:1"]


@pytest.mark.parametrize("point", POINTS)
def test_a_writer_that_is_killed_leaves_whole_blocks(point, tmp_path, monkeypatch):
    """Those before, and one more at most; the next writer removes its draft, and the room it took is given back."""
    kept, (keys, values) = store(tmp_path), rows(64)
    kept.put(ids(32, first=3), *rows(32, seed=1))
    small = store(tmp_path, budget=3 * kept.codec.largest)
    monkeypatch.setenv("KVQ_FAULT", point)
    child = forked.process(lambda: small.put(ids(64), keys, values) and 0)
    child.start()
    child.join(60)
    monkeypatch.delenv("KVQ_FAULT")
    assert child.exitcode == -signal.SIGKILL
    again = store(tmp_path, budget=6 * kept.codec.largest)
    assert 16 * len(again.load(ids(64))) == again.longest(ids(64)) <= 32
    assert again.put(ids(64), keys, values) == 64 == 16 * len(again.load(ids(64)))
    assert not [*tmp_path.rglob("*.tmp")]
    whole = store(tmp_path / "other")
    whole.put(ids(64), keys, values)
    assert contents(tmp_path / "other").items() <= contents(tmp_path).items()


def test_a_disk_that_refuses_in_the_middle_leaves_what_was_kept(tmp_path, monkeypatch):
    kept, (keys, values) = store(tmp_path), rows(100)
    monkeypatch.setenv("KVQ_FAULT", "replace.drafted:3:full")
    with pytest.raises(OSError, match="No space left"):
        kept.put(ids(100), keys, values)
    assert kept.longest(ids(100)) == 32 and not [*tmp_path.rglob("*.tmp")]
    monkeypatch.delenv("KVQ_FAULT")
    assert kept.put(ids(100), keys, values) == 96 == 16 * len(kept.load(ids(100)))


def test_a_folder_that_is_removed_is_made_again(tmp_path, caplog):
    kept, (keys, values) = store(tmp_path / "root"), rows(32)
    kept.put(ids(32), keys, values)
    shutil.rmtree(tmp_path / "root")
    assert kept.longest(ids(32)) == 0 and not kept.load(ids(32))
    assert kept.put(ids(32), keys, values) == 32 == 16 * len(kept.load(ids(32)))
    assert caplog.text.count("is made again") == 1 and store(tmp_path / "root").longest(ids(32)) == 32
    shutil.rmtree(tmp_path / "root")
    (tmp_path / "root").mkdir()
    (tmp_path / "root").chmod(0o777)  # somebody else's
    with pytest.raises(ArtifactError, match="others can write to it"):
        kept.put(ids(32), keys, values)
    assert not [*(tmp_path / "root").iterdir()]
