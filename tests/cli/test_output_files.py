"""Files that a user names for output: whole, with their own mode, beside what is not ours; and streams that fail."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvq_runtime.cli import options
from kvq_runtime.disk import files
from kvq_runtime.errors import NotFound, spoken

DRAFT = ".999998-00112233445566ff.tmp"  # as of a process that is dead here, or alive on another machine
PROGRAM = "from kvq_runtime.cli.main import program; program()"


@pytest.fixture(autouse=True)
def _umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_keeps_its_mode_and_a_new_one_gets_that_of_new_files(tmp_path):
    path = tmp_path / "table.json"
    options.write_output(path, b"old")
    assert mode(path) == 0o640
    path.chmod(0o600)
    options.write_output(path, b"new")
    assert mode(path) == 0o600 and path.read_bytes() == b"new"


def test_drafts_in_a_folder_of_the_users_are_left(tmp_path):
    (tmp_path / DRAFT).write_bytes(b"of somebody")
    options.write_output(tmp_path / "page.html", b"page")
    assert sorted(path.name for path in tmp_path.iterdir()) == [DRAFT, "page.html"]


def test_links_are_followed_before_and_after_the_work(tmp_path):
    (tmp_path / "link").symlink_to("there")
    options.check_output("--out", tmp_path / "link")
    options.write_output(tmp_path / "link", b"page")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there").read_bytes() == b"page"
    (tmp_path / "astray").symlink_to("missing/there")
    with pytest.raises(NotFound, match="there is no folder"):
        options.check_output("--out", tmp_path / "astray")


def test_a_link_of_somebody_else_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to("victim")
    (tmp_path / "victim").write_bytes(b"kept")
    owner = (tmp_path / "link").lstat().st_uid
    if owner == 0:
        os.lchown(tmp_path / "link", 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match="a link of another user's"):
        options.write_output(tmp_path / "link", b"page")
    assert (tmp_path / "victim").read_bytes() == b"kept"


def test_standard_output_is_written_into_where_it_is(tmp_path):
    code = (
        "from pathlib import Path; from kvq_runtime.cli import options\n"
        "print('before'); options.write_output(Path('/dev/stdout'), b'data\\n'); print('after')"
    )
    with (tmp_path / "log").open("w") as log:
        subprocess.run([sys.executable, "-c", code], stdout=log, check=True)
    assert (tmp_path / "log").read_text() == "before\ndata\nafter\n"


def test_a_file_that_is_a_mount_of_its_own_is_written_into(tmp_path, monkeypatch):
    """As in a container: the system lets nothing take its place."""

    def busy(draft: Path, name: Path):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(draft), None, str(name))

    monkeypatch.setattr(os, "replace", busy)
    (path := tmp_path / "page.html").write_bytes(b"the old one, which is longer")
    options.write_output(path, b"page")
    assert path.read_bytes() == b"page" and [*tmp_path.iterdir()] == [path]
    with pytest.raises(OSError) as refused:  # what must be whole, or as before
        files.save(path, b"lock")
    assert spoken(refused.value).startswith(f"{path}: is mounted by itself") and path.read_bytes() == b"page"


def test_a_reader_that_goes_too_soon_is_told(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["head", "-c", "10", tmp_path / "pipe"], stdout=subprocess.DEVNULL)
    with reader, pytest.raises(RuntimeError, match="its reader went before all was written"):
        options.write_output(tmp_path / "pipe", b"x" * (1 << 22))


@pytest.mark.parametrize("given", [["--help"], ["recipes", "--help"], ["--version"], ["recipes"]], ids=" ".join)
@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_full_disk_under_standard_output_is_told(given, buffered):
    command, env = [sys.executable, "-c", PROGRAM, *given], os.environ | {"PYTHONUNBUFFERED": buffered}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=env, check=False)
    assert done.returncode == 1 and done.stderr.endswith("No space left on device\n") and done.stderr.count("\n") == 1
    assert buffered or "standard output: " in done.stderr


def test_a_full_device_is_named():
    with pytest.raises(OSError, match="/dev/full"):
        options.write_output(Path("/dev/full"), b"page")


def test_a_full_disk_under_standard_error_ends_no_command():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", PROGRAM, "recipes", "aqua-9bit"], stderr=full, check=False)
    assert done.returncode == 3
