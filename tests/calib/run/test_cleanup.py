"""`kvq gc` deletes run folders that are published or old, and no other; it says first what it would free."""

import json
import os
import time

import pytest

from kvq_calib.run import checkpoint

DAY = 86400


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Run folders by name: what was published, what was refused, what was fitted alone, each a day or a year old."""
    monkeypatch.setenv("KVQ_HOME", str(tmp_path))
    kept = {"published": (), "half": ("a",), "refused": ("a", "b"), "fitted": None}
    for age, days in (("new", 1), ("old", 365)):
        for name, artifacts in kept.items():
            folder = tmp_path / "runs" / f"{name}-{age}"
            for artifact in ("a", "b") if artifacts is not None else ():
                if name != "half" or artifact == "a":  # killed between two artifacts
                    (folder / "artifacts" / artifact).mkdir(parents=True)
                    (folder / "artifacts" / artifact / "README.md").write_text("card")
                if name == "refused":
                    (folder / "artifacts" / artifact / "kvq.safetensors").write_bytes(b"x" * 1000)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "plan.json").write_text(json.dumps({"model": "demo", "recipes": ["a", "b"]}))
            for path in (*folder.rglob("*"), folder):
                os.utime(path, (at := time.time() - days * DAY, at))
    return tmp_path / "runs"


def outcomes(rows) -> dict[str, str]:
    return {row["run"]: row["outcome"] for row in rows}


def test_what_is_published_or_old_is_deleted(runs, as_json, kvq):
    before = {path: path.is_file() and path.read_bytes() for path in runs.rglob("*")}
    code, out, _ = kvq("gc")
    assert code == 0 and "would be freed; --delete frees them" in out and "to delete" in out
    assert before == {path: path.is_file() and path.read_bytes() for path in runs.rglob("*")}
    found = as_json("gc", "--published", "2d")
    assert [row["run"] for row in found if row["published"]] == ["published-new", "published-old"]
    old = {name: "to delete" for name in ("published-old", "half-old", "refused-old", "fitted-old")}
    new = {name: "kept" for name in ("published-new", "half-new", "refused-new", "fitted-new")}
    assert outcomes(found) == old | new
    assert outcomes(as_json("gc", "--published", "12h"))["published-new"] == "to delete"
    assert outcomes(as_json("gc", "--delete")) == {name: "deleted" for name in old} | new
    assert {path.name for path in runs.iterdir()} == {*new}


def test_a_run_at_work_stays_and_a_killed_deletion_is_finished(runs, as_json, monkeypatch):
    with checkpoint.claimed(runs / "fitted-old"):
        os.utime(runs / "fitted-old" / "lock", (0, 0))
        assert outcomes(as_json("gc", "--others", "0s", "--delete"))["fitted-old"] == "running"
    assert (runs / "fitted-old" / "plan.json").exists()
    (runs / "again").mkdir()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(checkpoint.shutil, "rmtree", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        checkpoint.delete(runs / "again")
    assert not (runs / "again").exists()
    assert outcomes(as_json("gc", "--delete"))[".again"] == "deleted" and not (runs / ".again").exists()
