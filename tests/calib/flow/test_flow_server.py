"""The server that a run starts for itself: several at once, and none left, whatever ends the run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from patience import lives, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("prefect")]
RUN = "import sys; from kvq_calib.flow import server; print(server.address(), flush=True); sys.stdin.read()"
TWO_WRITERS = """
import asyncio
from kvq_calib.flow import server
server.app()
from prefect.server.database import provide_database_interface
from sqlalchemy import text

database = provide_database_interface()

async def add_one():
    async with database.session_context(begin_transaction=True) as session:
        count = (await session.execute(text("SELECT n FROM counted"))).scalar()
        await asyncio.sleep(0.2)
        await session.execute(text("UPDATE counted SET n = :n"), {"n": count + 1})

async def main():
    async with database.session_context(begin_transaction=True) as session:
        await session.execute(text("CREATE TABLE counted AS SELECT 0 AS n"))
    await asyncio.gather(add_one(), add_one(), add_one())
    async with database.session_context() as session:
        print((await session.execute(text("SELECT n FROM counted"))).scalar())

asyncio.run(main())
"""


def gone(servers: list[psutil.Process], folder: Path) -> bool:
    return not any(map(lives, servers)) and not list(folder.glob("kvq-prefect-*"))


def test_two_at_once_share_nothing_and_leave_nothing_when_killed_or_done(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", RUN], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    addresses = [run.stdout.readline().strip() for run in runs]
    servers = [child for run in runs for child in psutil.Process(run.pid).children()]
    assert len(set(addresses)) == len(servers) == len(list(tmp_path.glob("kvq-prefect-*"))) == 2
    assert all(address.startswith("http://127.0.0.1:") for address in addresses)
    os.kill(runs[0].pid, signal.SIGKILL)
    for run in runs:
        run.communicate()  # the second one's input ends, and so does it
    assert runs[1].returncode == 0
    until(lambda: gone(servers, tmp_path))


def test_a_server_that_does_not_start_says_why(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    root = Path(__file__).parents[3]
    (tmp_path / "uvicorn.py").write_text("raise SystemExit('no port for you')")
    code = f"import sys; sys.path.append({str(root)!r}); {RUN}"
    environment["PYTHONPATH"] += os.pathsep + str(root)
    ended = subprocess.run([sys.executable, "-c", code], env=environment, input="", capture_output=True, text=True)
    assert ended.returncode == 1 and "did not start" in ended.stderr and "no port for you" in ended.stderr
    assert not list(tmp_path.glob("kvq-prefect-*"))


def test_who_reads_then_writes_waits_for_another_who_does(tmp_path):
    """Two events are evaluated at a time; where one failed, with "database is locked", a webhook was told twice."""
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run([sys.executable, "-c", TWO_WRITERS], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.split() == ["3"]
