"""A folder of prefixes that processes share: its budget, its writers, and the commands that keep it in order."""

import os
import shutil
import stat
import threading

import forked
import pytest
import torch
from feeding import GEOMETRY
from kept_blocks import files, ids, rows, size_of, store

from kvq_runtime.disk import files as block_files
from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.prefix import maintenance
from kvq_runtime.prefix.block_folder import SLACK, Folder, Memory, all_blocks, parse_bytes

# ---- one folder, many processes


def test_files_are_the_user_s_alone(tmp_path):
    old = os.umask(0)
    try:
        kept, (keys, values) = store(tmp_path / "new" / "root"), rows(16)
        kept.put(ids(16), keys, values)
    finally:
        os.umask(old)
    for path in (tmp_path / "new" / "root").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ArtifactError, match="chmod go-w"):
        store(shared)


def test_the_budget_holds_and_the_oldest_goes_first(tmp_path):
    two = size_of(32)
    kept = store(tmp_path, budget=2 * two + 100)
    texts = [ids(32, first=first) for first in (1, 2, 3)]
    keys, values = rows(32)
    kept.put(texts[0], keys, values)
    kept.put(texts[1], keys, values)
    assert [kept.longest(text) for text in texts] == [32, 32, 0]
    kept.load(texts[0])  # used: the other one is older now
    kept.put(texts[2], keys, values)
    assert [kept.longest(text) for text in texts] == [32, 0, 32]
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 2 * two + 100
    long, (keys, values) = store(tmp_path, budget=4 * kept.format.largest), rows(96)
    assert long.put(ids(96, first=9), keys, values) == 64  # the blocks that surely fit, from the first on
    assert long.longest(ids(96, first=9)) == 64


def test_of_one_prefix_the_end_goes_first(tmp_path):
    kept, (keys, values) = store(tmp_path), rows(64)
    kept.put(ids(64), keys, values)
    maintenance.collect(tmp_path, budget=size_of(32) + 100)
    assert kept.longest(ids(64)) == 32 == 16 * len(files(tmp_path))


def test_memory_holds_its_budget():
    shelf = Memory(100)
    for name in ("a", "b", "c"):
        shelf.put(name, bytes(40))
    assert (shelf.has("a"), shelf.has("b"), shelf.size) == (False, True, 80)
    shelf.used(["b"])
    shelf.put("d", bytes(40))
    assert shelf.has("b") and not shelf.has("c")
    shelf.drop("b")
    assert shelf.size == 40


def test_a_name_put_twice_is_held_once():
    """It takes its own place: what else is held stays, and its bytes are counted once."""
    shelf = Memory(100)
    for name, size in (("a", 40), ("b", 40), ("b", 60)):
        shelf.put(name, bytes(size))
    assert (shelf.has("a"), shelf.size) == (True, 100) and shelf.get("b", 100) == bytes(60)
    shelf.drop("b")
    assert (shelf.has("a"), shelf.size) == (True, 40)


def test_one_process_keeps_a_folder_within_its_budget(tmp_path):
    """At every moment, also where a sixteenth of the budget is several files and the folder is nearly full."""
    shelf, kept = Folder(tmp_path, {}, "0" * 64, 1600), []
    for number in range(60):
        shelf.put(f"{number:064x}", bytes(30))
        kept.append(sum(one.size for one in all_blocks(tmp_path)))
    assert max(kept) <= 1600 and kept[-1] > 1600 - 1600 // SLACK - 30


@pytest.mark.parametrize("text, size", [("20GB", 20 * 10**9), ("1.5 MiB", 3 << 19), (7, 7), ("512kb", 512000)])
def test_a_budget_in_words(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "20", "GB", "-1GB", "20 parsecs", 0, True])
def test_what_is_no_budget_is_refused(text):
    with pytest.raises(ValueError, match="budget"):
        parse_bytes(text)


def test_a_budget_below_one_block_is_refused():
    with pytest.raises(ValueError, match="one block of rtn-2bit"):
        store(budget=100)


def test_two_writers_of_one_prefix_and_a_reader(tmp_path):
    """Processes put the same and their own prefixes while others load and evict: every block that is found is whole."""
    keys, values = rows(64)
    budget = 20 * store().format.largest

    def work(seed: int) -> int:
        kept, decoded = store(tmp_path, budget=budget), 0
        for turn in range(12):
            tokens = [*ids(32), *ids(32, first=10 * seed + turn)]
            kept.put(tokens, keys, values)
            found = kept.load(tokens)
            for _, k, _ in kept.decode(found) if found else ():
                assert bool(torch.isfinite(k).all())
                decoded += 1
        assert decoded >= GEOMETRY.layers, "nothing that was put was ever found"
        return 0

    children = [forked.process(work, seed) for seed in (1, 2, 3)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert not [*maintenance.damaged(tmp_path)] and not [*tmp_path.rglob("*.tmp")]
    assert sum(one.size for one in all_blocks(tmp_path)) <= budget + 3 * budget // SLACK


def test_threads_share_a_store_in_memory():
    kept, (keys, values), failed = store(), rows(64), []

    def work(seed: int) -> None:
        try:
            kept.put(ids(64, first=seed), keys, values)
            assert len(kept.load(ids(64, first=seed))) == 4
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_folder_that_is_removed_is_made_again_once(tmp_path, caplog):
    kept, (keys, values) = store(tmp_path / "root"), rows(32)
    kept.put(ids(32), keys, values)
    other = store(tmp_path / "root")
    shutil.rmtree(tmp_path / "root")
    assert kept.longest(ids(32)) == 0 and not kept.load(ids(32))
    assert kept.put(ids(32), keys, values) == other.put(ids(32), keys, values) == 32
    assert other.put(ids(32, first=2), keys, values) == 32 and other.checked(ids(32)) == 32
    assert caplog.text.count("is made again") == 1
    assert store(tmp_path / "root").longest(ids(32)) == 32 and [*maintenance.listed(tmp_path / "root")]


def test_a_folder_that_is_somebody_else_s_now_is_not_written_to(tmp_path):
    kept, (keys, values) = store(tmp_path / "root"), rows(16)
    shutil.rmtree(tmp_path / "root")
    (tmp_path / "root").mkdir()
    (tmp_path / "root").chmod(0o777)
    with pytest.raises(OSError, match="others can write to it"):
        kept.put(ids(16), keys, values)
    assert not [*(tmp_path / "root").iterdir()]


# ---- the command


def test_list_verify_and_gc(tmp_path, kvq, as_json):
    kept, (keys, values) = store(tmp_path, salt="secret"), rows(48)
    kept.put(ids(48), keys, values)
    (row,) = as_json("prefix", "list", tmp_path)
    size = sum(path.stat().st_size for path in files(tmp_path))
    assert (row["recipe"], row["blocks"], row["tokens"], row["bytes"]) == ("rtn-2bit", 3, 48, size)
    assert row["idle_seconds"] < 60 and "secret" not in "".join(map(str, tmp_path.rglob("*")))
    assert as_json("prefix", "verify", tmp_path)["blocks"] == 3
    path = files(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-1])
    code, out, _ = kvq("prefix", "verify", tmp_path)
    assert code == 1 and str(path) in out and "truncated" in out
    assert [one["path"] for one in as_json("prefix", "gc", tmp_path, "--damaged", "--dry-run")] == [str(path)]
    assert path.exists()
    kvq("prefix", "gc", tmp_path, "--damaged")
    assert not path.exists() and kvq("prefix", "verify", tmp_path)[0] == 0
    drafts = path.parent / "tmp"
    with block_files.draft(drafts) as (own, _):
        dead = forked.process(forked.leave_draft, drafts)
        dead.start()
        dead.join()
        (theirs := drafts / f".{dead.pid}-{'a' * 16}.tmp").write_bytes(b"half")
        assert [one["bytes"] for one in as_json("prefix", "gc", tmp_path)] == [4]
        assert {*drafts.iterdir()} == {own, theirs}  # another machine's, too young
        assert as_json("prefix", "gc", tmp_path, "--grace", "0s")[0]["path"] == str(theirs)
        assert {*drafts.iterdir()} == {own}
    kvq("prefix", "gc", tmp_path, "--budget", "1B")
    assert not files(tmp_path)
    assert kvq("prefix", "list", tmp_path / "nowhere")[0] == 3
    assert kvq("prefix", "gc", tmp_path, "--budget", "some")[0] == 2


def test_nothing_is_removed_through_a_link(tmp_path, kvq):
    """Somebody's model is not a set of blocks, whatever leads to it."""
    root, model = tmp_path / "root", tmp_path / "model"
    kept, (keys, values) = store(root), rows(16)
    kept.put(ids(16), keys, values)
    (model / "tmp").mkdir(parents=True)
    dead = forked.process(lambda: None)
    dead.start()
    dead.join()
    theirs = [
        model / name for name in (f"{'b' * 64}.safetensors", "model.safetensors", f"tmp/.{dead.pid}-{'a' * 16}.tmp")
    ]
    for path in [*theirs, model / "about.json"]:
        path.write_bytes(b"{}")
    (root / ("a" * 64)).symlink_to(model)
    (root / ("c" * 64)).mkdir()
    (root / ("c" * 64) / "about.json").write_bytes(b"{}")
    (root / ("c" * 64) / "tmp").symlink_to(model / "tmp")
    (root / ("c" * 64) / f"{'d' * 64}.safetensors").symlink_to(model / "model.safetensors")
    assert kvq("prefix", "gc", root, "--budget", "1B", "--damaged", "--grace", "0s")[0] == 0
    assert not files(root / kept.shelf.place.name) and all(path.exists() for path in theirs)  # type: ignore[attr-defined]
    store(root, budget=kept.format.largest).put(ids(16), keys, values)  # which makes room, too
    assert all(path.exists() for path in theirs)
    (tmp_path / "linked").symlink_to(root)
    root.chmod(0o777)
    for place in (tmp_path / "linked", root):
        for action in ("list", "verify", "gc"):
            assert kvq("prefix", action, place)[0] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 10**11, "kv_heads": 1, "head_size": 16},
        {"layers": 2, "kv_heads": 10**12, "head_size": 1 << 40},
    ],
    ids=["layers", "width"],
)
def test_a_set_of_a_model_that_cannot_be_is_a_fault(change, tmp_path, kvq):
    kept, (keys, values) = store(tmp_path), rows(16)
    kept.put(ids(16), keys, values)
    (about,) = tmp_path.glob("*/about.json")
    about.write_text(strict_json.dumps(strict_json.loads(about.read_bytes(), "about") | {"geometry": change}))
    code, out, _ = kvq("prefix", "verify", tmp_path)
    assert code == 1 and "at most 4096 layers and 1048576 channels" in " ".join(out.split())
    assert "cannot be read" in kvq("prefix", "list", tmp_path)[1]


def test_a_damaged_about_is_a_fault(tmp_path, kvq):
    kept, (keys, values) = store(tmp_path), rows(16)
    kept.put(ids(16), keys, values)
    (about,) = tmp_path.glob("*/about.json")
    about.write_text(about.read_text().replace('"m"', '"n"'))
    assert "folder's name" in kvq("prefix", "verify", tmp_path)[1]
    about.write_text("{")
    assert kvq("prefix", "verify", tmp_path)[0] == 1 and "cannot be read" in kvq("prefix", "list", tmp_path)[1]
