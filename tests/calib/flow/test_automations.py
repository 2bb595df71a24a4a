"""What the automations of `flows.yaml` do on a real server: a webhook on loopback hears them, the dead are found.

Their periods, 36 hours and 90 seconds, are shortened; all else is as it is deployed.
"""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from uuid import UUID

import pytest
from patience import PATIENCE, until
from webhook import free_port, listening

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("prefect")]
SHORT = timedelta(seconds=15)  # on two quiet cores a flow that does nothing takes one
SLEEPER = "import time; from prefect import flow; flow(name='sleeper')(lambda: time.sleep(600))()"


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A server as `make flows-up` starts it: its address, and the environment of its clients."""
    from pipelines import service

    folder = tmp_path_factory.mktemp("flows")
    (folder / "auth").write_text("kvq:secret")
    with free_port() as port, (folder / "server.log").open("w") as log:
        url, environment = f"http://127.0.0.1:{port}/api", service.server_environment(folder, port)
        command = [sys.executable, "-m", "prefect", *service.server_command(port)]
        running = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            service.wait(url, running)
            yield url, service.client_environment(folder, url)
        finally:
            running.terminate()
            running.wait(PATIENCE)


@pytest.fixture
def server(started):
    """That server, in use; the environment of its clients.

    Prefect sends all events of a process to the server of the first: its senders end with each server's use. Else those
    of later flows wait for one that is gone, until the process ends.
    """
    from prefect.events.worker import EventsWorker
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    url, environment = started
    EventsWorker.drain_all(timeout=PATIENCE)
    secret = environment["PREFECT_API_AUTH_STRING"]
    with temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: secret}):
        yield environment
        EventsWorker.drain_all(timeout=PATIENCE)


def ends(name: str, state) -> str:
    """Run a flow of this name that ends in this state; what its events call it."""
    from prefect import flow

    return f"prefect.flow-run.{flow(name=name)(lambda: state)(return_state=True).state_details.flow_run_id}"


def test_a_page_in_a_browser_gets_nothing_without_the_secret(server):
    """A flow is the first half of a deployment, and a deployment's steps run commands."""
    from base64 import b64encode

    import httpx

    url, secret = server["PREFECT_API_URL"], server["PREFECT_API_AUTH_STRING"]
    evil, own = "https://evil.example", url.removesuffix("/api").replace("127.0.0.1", "localhost")
    with httpx.Client(trust_env=False) as client:
        for more in ({}, {"Origin": evil}, {"Host": "evil.example"}, {"Authorization": "Basic a3ZxOmE="}):
            headers = {"Content-Type": "text/plain"} | more  # what a page may send without asking first
            answer = client.post(f"{url}/flows/", headers=headers, content='{"name": "from-a-page"}')
            assert answer.status_code == 401 and "access-control-allow-origin" not in answer.headers
        known = {"Authorization": f"Basic {b64encode(secret.encode()).decode()}"}
        assert client.post(f"{url}/flows/", headers=known, json={"name": "ours"}).is_success
        assert {one["name"] for one in client.post(f"{url}/flows/filter", headers=known, json={}).json()} == {"ours"}
        for origin, allowed in ((evil, False), ("null", False), (own, True)):
            headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            answer = client.options(f"{url}/deployments/", headers=headers)
            assert (
                answer.is_success == allowed and (answer.headers.get("access-control-allow-origin") == own) == allowed
            )


def test_failed_gates_and_drift_are_told_and_nothing_else(server):
    from prefect.states import Failed

    from kvq_calib.flow.flow import GATE_FAILED
    from pipelines import automations
    from pipelines.flows import DRIFTED

    with listening() as (address, heard):
        automations.define(address)
        ends("other", Failed(message="is nobody's affair"))
        ends("drift", Failed(name=DRIFTED, message='demo@1.0.0 has drifted. "KL" 2'))
        ends("kvq-calibrate", Failed(name=GATE_FAILED, message="demo was not published"))
        until(lambda: len(heard) >= 2)
    first, second = sorted(heard)
    assert first.startswith("kvq, drift ") and first.endswith(': demo@1.0.0 has drifted. "KL" 2')
    assert second.startswith("kvq, kvq-calibrate ") and second.endswith(": demo was not published")


def test_silence_is_told_and_a_success_is_no_silence(server):
    from prefect.states import Completed, Failed

    from pipelines import automations

    for period in (SHORT, 4 * SHORT, 16 * SHORT):
        with listening() as (address, heard):
            automations.create(automations.report_silence(automations.save_webhook(address), period))
            begun, longest = time.monotonic(), 0.0
            while (last := time.monotonic()) - begun < 2 * period.total_seconds():
                ends("kvq-calibrate", Completed())
                time.sleep(1)
                longest = max(longest, time.monotonic() - last)
            if heard and longest > period.total_seconds() / 4:
                continue  # on so slow a machine it was silent indeed
            assert not heard, f"a success every {longest} s"
            ends("kvq-calibrate", Failed(message="is no success"))
            ends("other", Completed())
            until(lambda: heard)
            break
    else:
        pytest.fail("the machine is too slow to tell a pause from silence")
    assert heard[0] == "kvq: no calibration has succeeded for 36 hours"


def test_the_dead_are_found_by_their_heartbeat(server):
    from prefect.client.orchestration import get_client
    from prefect.events.filters import EventFilter, EventNameFilter

    from pipelines import automations

    heartbeats = lambda: EventFilter(event=EventNameFilter(name=["prefect.flow-run.heartbeat"]))  # noqa: E731
    automations.create(automations.find_dead(SHORT))
    sleeper = subprocess.Popen(
        [sys.executable, "-c", SLEEPER], env={**server, "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
    )
    try:
        with get_client(sync_client=True) as client:
            newest = lambda: client.read_events(heartbeats(), limit=50).events  # noqa: E731
            first = until(lambda: [event for event in newest() if event.related[0].name == "sleeper"])[0]
            running = UUID(first.resource.id.removeprefix("prefect.flow-run."))
            os.kill(sleeper.pid, signal.SIGKILL)
            crashed = until(lambda: (one := client.read_flow_run(running)).state.is_crashed() and one)
    finally:
        sleeper.kill()
        sleeper.wait()
    assert "No heartbeat" in crashed.state.message
