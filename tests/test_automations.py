"""What the automations of `flows.yaml` do on a real server: a webhook on loopback hears them, the dead are found.

Their periods, 36 hours and 90 seconds, are shortened; all else is as it is deployed.
"""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
from webhook import free_port, listening, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("prefect")]
SHORT = timedelta(seconds=15)
SLEEPER = "import time; from prefect import flow; flow(name='sleeper')(lambda: time.sleep(600))()"


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A server as `make flows-up` starts it: its address, and the environment of its clients."""
    from kvq_calib import flow_server
    from pipelines import service

    folder, port = tmp_path_factory.mktemp("flows"), free_port()
    url = f"http://127.0.0.1:{port}/api"
    environment = service._environment(folder, url)
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "server.log").open("w") as log:
        running = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            assert flow_server.wait(url, lambda: running.poll() is None), (folder / "server.log").read_text()
            yield url, environment
        finally:
            running.terminate()
            running.wait(30)


@pytest.fixture
def server(started):
    """That server, in use; the environment of its clients.

    Prefect sends all events of a process to the server of the first: its senders end with each server's use. Else those
    of later flows wait for one that is gone, until the process ends.
    """
    from prefect.events.worker import EventsWorker

    from kvq_calib import flow

    url, environment = started
    EventsWorker.drain_all(timeout=60)
    with flow.temporary_settings({flow.PREFECT_API_URL: url}):
        yield environment
        EventsWorker.drain_all(timeout=60)


def ends(name: str, state) -> None:
    """Run a flow of this name that ends in this state."""
    from prefect import flow

    flow(name=name)(lambda: state)(return_state=True)


def test_failed_gates_and_drift_are_told_and_nothing_else(server):
    from prefect.states import Failed

    from kvq_calib.flow import GATE_FAILED
    from pipelines import automations
    from pipelines.drift import DRIFTED

    with listening() as (address, heard):
        assert len(automations.define(address)) == 4
        ends("other", Failed(message="is nobody's affair"))
        ends("drift", Failed(name=DRIFTED, message='demo@1.0.0 has drifted. "KL" 2'))
        ends("kvq-calibrate", Failed(name=GATE_FAILED, message="demo was not published"))
        until(lambda: len(heard) == 2)
    first, second = sorted(heard)
    assert first.startswith("kvq, drift ") and first.endswith(': demo@1.0.0 has drifted. "KL" 2')
    assert second.startswith("kvq, kvq-calibrate ") and second.endswith(": demo was not published")


def test_silence_is_told_and_a_success_is_no_silence(server):
    from prefect.states import Completed, Failed

    from pipelines import automations

    with listening() as (address, heard):
        automations._replace(automations.silent(automations._webhook(address), SHORT))
        begun = time.monotonic()
        while time.monotonic() - begun < 2 * SHORT.total_seconds():
            ends("kvq-calibrate", Completed())
            time.sleep(1)
        assert not heard
        ends("kvq-calibrate", Failed(message="is no success"))
        ends("other", Completed())
        until(lambda: heard)
    assert heard[0] == "kvq: no calibration has succeeded for 36 hours"


def test_the_dead_are_found_by_their_heartbeat(server):
    from prefect.client.orchestration import get_client

    from pipelines import automations

    automations._replace(automations.dead(SHORT))
    sleeper = subprocess.Popen(
        [sys.executable, "-c", SLEEPER], env={**server, "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
    )
    try:
        with get_client(sync_client=True) as client:
            (running,) = until(lambda: [one for one in client.read_flow_runs() if one.state_name == "Running"])
            time.sleep(3)  # its first heartbeat is on its way
            os.kill(sleeper.pid, signal.SIGKILL)
            crashed = until(lambda: (one := client.read_flow_run(running.id)).state.is_crashed() and one)
    finally:
        sleeper.kill()
        sleeper.wait()
    assert "No heartbeat" in crashed.state.message
