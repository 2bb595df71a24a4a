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


def ends(name: str, state, run: str | None = None) -> None:
    """Run a flow of this name that ends in this state."""
    from prefect import flow

    flow(name=name, flow_run_name=run)(lambda: state)(return_state=True)


@pytest.fixture
def enter(server):
    """Bring a run of a deployment of a flow of this name into states, one after the other; return its id."""
    from prefect.client.orchestration import get_client

    def enter(name: str, *states) -> UUID:
        with get_client(sync_client=True) as client:
            deployment = client.create_deployment(client.create_flow_from_name(name), name=name)
            run = client.create_flow_run_from_deployment(deployment).id
            for state in states:
                client.set_flow_run_state(run, state, force=True)
        return run

    return enter


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


def test_every_run_that_ends_without_success_is_told_once_and_nothing_else(server, enter):
    from prefect.states import Cancelled, Completed, Crashed, Failed

    from pipelines import automations

    with listening() as (address, heard):
        automations.define(address)
        ends("kvq-calibrate", Failed(message="is a part of nightly's message"))
        enter("nightly", Completed(message="is nobody's affair"))
        enter("nightly", Cancelled(message="neither"))
        enter("drift", Failed(name=automations.DRIFTED, message='demo@1.0.0 has drifted. "KL" 2'))
        enter("nightly", Failed(message="demo was not published"))
        enter("nightly", Crashed(message="killed"))
        enter("on-demand", Failed(name="TimedOut", message="8 hours"))
        until(lambda: len(heard) >= 4)
    told = sorted((text.split(" ")[1], text.partition(": ")[2]) for text in heard)
    expected = [("drift", 'demo@1.0.0 has drifted. "KL" 2'), ("nightly", "demo was not published")]
    assert told == [*expected, ("nightly", "killed"), ("on-demand", "8 hours")]


def test_automations_that_are_defined_go_on_waiting_and_others_are_replaced(server):
    from prefect.client.orchestration import get_client

    from pipelines import automations

    with get_client(sync_client=True) as client:
        automations.replace([])
        automations.define("http://127.0.0.1:9/x")
        before = {one.name: one.id for one in client.read_automations()}
        assert len(before) == 5
        automations.define("http://127.0.0.1:9/x")
        assert {one.name: one.id for one in client.read_automations()} == before
        automations.define()
        assert {one.name: one.id for one in client.read_automations()}.items() < before.items()


def test_silence_is_told_of_each_model_and_a_success_is_no_silence(server):
    from prefect.states import Completed, Failed

    from pipelines import automations

    told = "kvq: no calibration of {} has succeeded for 36 hours"
    for period in (SHORT, 4 * SHORT, 16 * SHORT):
        with listening() as (address, heard):
            automations.replace([automations.report_silence(automations.save_webhook(address), period)])
            ends("kvq-calibrate", Failed(message="is no success"), "bad")
            begun, longest = time.monotonic(), 0.0
            while (last := time.monotonic()) - begun < 2 * period.total_seconds():
                ends("kvq-calibrate", Completed(), "good")
                ends("other", Completed(), "bad")
                time.sleep(1)
                longest = max(longest, time.monotonic() - last)
            if longest > period.total_seconds() / 3:
                continue  # on so slow a machine it was silent indeed
            until(lambda: heard)
            assert {*heard} == {told.format("bad")}, f"a success every {longest} s"
            until(lambda: {*heard} == {told.format("bad"), told.format("good")})
            break
    else:
        pytest.fail("the machine is too slow to tell a pause from silence")


def test_a_run_that_died_in_any_state_is_ended(server, enter):
    """A worker that died before its process began, or while it was cancelled, sent no heartbeat."""
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelling, Pending, Running, Submitting

    from pipelines import automations

    automations.replace(automations.end_dead(stranded=SHORT))
    begun = [
        enter("nightly", *states) for states in ([Pending()], [Pending(), Submitting()], [Running(), Cancelling()])
    ]
    alive = enter("nightly", Pending(), Running())
    with get_client(sync_client=True) as client:
        state = lambda run: client.read_flow_run(run).state  # noqa: E731
        until(lambda: all(state(run).is_final() for run in begun))
        assert [state(run).name for run in begun] == ["Crashed", "Crashed", "Cancelled"]
        assert state(begun[1]).message.startswith("Never started. ") and state(alive).is_running()


def test_the_start_of_the_service_ends_what_an_earlier_one_left(server, enter, monkeypatch):
    """In whatever state: its slot of the deployment is free again."""
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelling, Pending, Running, Scheduled

    from pipelines import service

    for name, value in server.items():
        monkeypatch.setenv(name, value)
    flows = service.ROOT / "flows.yaml"
    service.deploy(flows, None)
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("nightly/nightly").id
        for states in ([Pending()], [Pending(), Running()], [Pending(), Running(), Cancelling()]):
            left, waiting = (client.create_flow_run_from_deployment(deployment).id for _ in range(2))
            for state in states:
                assert client.set_flow_run_state(left, state).status.value == "ACCEPT"
            assert client.set_flow_run_state(waiting, Pending()).status.value == "REJECT", "one at a time"
            service.deploy(flows, None)
            assert client.read_flow_run(left).state.is_crashed()
            after = client.create_flow_run_from_deployment(deployment, state=Scheduled()).id
            assert client.set_flow_run_state(after, Pending()).status.value == "ACCEPT"
            client.delete_flow_run(after)


def test_the_dead_are_found_by_their_heartbeat(server):
    from prefect.client.orchestration import get_client
    from prefect.events.filters import EventFilter, EventNameFilter

    from pipelines import automations

    heartbeats = lambda: EventFilter(event=EventNameFilter(name=["prefect.flow-run.heartbeat"]))  # noqa: E731
    automations.replace(automations.end_dead(SHORT))
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
