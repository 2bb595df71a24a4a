"""The temporary server of a run: several at once share nothing, strangers get nothing, none is left at the end."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from patience import lives, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("prefect")]
RUN = """
import sys
from kvq_calib.flow import server
server.apply_settings()
with server.temporary_server() as url:
    print(url, flush=True)
    sys.stdin.read()
"""


def test_two_at_once_share_nothing_and_leave_nothing(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    runs = [subprocess.Popen([sys.executable, "-c", RUN], env=environment, **pipes) for _ in range(2)]
    addresses = [run.stdout.readline().strip() for run in runs]
    servers = [child for run in runs for child in psutil.Process(run.pid).children()]
    assert len(set(addresses)) == len(servers) == len(list(tmp_path.glob("kvq-prefect-*"))) == 2
    for address in addresses:
        assert address.startswith("http://127.0.0.1:")
        assert httpx.post(f"{address}/flows/filter", json={}, trust_env=False).status_code == 401
    for run in runs:
        run.communicate()  # its input ends, and so does it
        assert run.returncode == 0
    until(lambda: not any(map(lives, servers)) and not list(tmp_path.glob("kvq-prefect-*")))
