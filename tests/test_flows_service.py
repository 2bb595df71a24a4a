"""`make flows-up` as it is: a real server, a real worker, schedules in seconds, a webhook on loopback, a kill -9."""

import json
import os
import signal
import socket
import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
import tiny

from kvq_runtime import registry

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("prefect")]
ROOT = Path(__file__).parents[1]
PATIENCE = 300  # seconds; on two quiet cores a run takes fifteen


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def until(what, seconds: float = PATIENCE):
    """Ask until there is an answer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(0.2)
    raise AssertionError(f"nothing after {seconds} s")


@pytest.fixture
def webhook():
    """An address that is posted to, and what was."""
    heard: list[dict] = []

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self):
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *given):
            pass

    with HTTPServer(("127.0.0.1", 0), Listener) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/", heard
        server.shutdown()
        thread.join()


def deployments(model: Path, folder: Path) -> Path:
    """flows.yaml for a tiny model: every ten seconds what is nightly, and a bound on demand that nothing keeps."""
    import yaml

    given = yaml.safe_load((ROOT / "flows.yaml").read_text())
    small = {"corpus": str(model / "corpus.txt"), "samples": 4, "seq_len": 384, "eval_windows": 2}
    nightly = next(one for one in given["deployments"] if one["name"] == "nightly")
    asked = next(one for one in given["deployments"] if one["name"] == "on-demand")
    soon = (datetime.now(UTC) + timedelta(seconds=1)).isoformat()
    nightly["parameters"] = {"models": [str(model)], **small}
    nightly["schedules"] = [{"interval": 10, "anchor_date": soon, "timezone": "Europe/Berlin", "slug": "soon"}]
    asked["parameters"] = {"model": str(model), "seed": 1, "max_kl": 1e-12, **small}
    path = folder / "flows.yaml"
    path.write_text(yaml.safe_dump(given))
    return path


def test_no_path_and_every_policy_in_flows_yaml():
    import yaml

    given = yaml.safe_load((ROOT / "flows.yaml").read_text())
    assert not [line for line in (ROOT / "flows.yaml").read_text().splitlines() if ": /" in line or '"/' in line]
    assert {one["name"] for one in given["deployments"]} == {"on-demand", "nightly", "drift"}
    for one in given["deployments"]:
        assert one["concurrency_limit"]["collision_strategy"] in ("ENQUEUE", "CANCEL_NEW")
        assert all(schedule["timezone"] for schedule in one.get("schedules", []))
        assert (ROOT / one["entrypoint"].partition(":")[0]).is_file()


def test_a_scheduled_run_is_killed_resumed_completed_and_a_failed_gate_told(tmp_path, monkeypatch, webhook):
    from prefect.client.orchestration import get_client

    from kvq_calib import flow
    from pipelines import service

    model = tmp_path / "tiny-model"
    model.mkdir()
    tiny.save(model, "llama", layers=16)
    tiny.text(model)
    for name, value in {"PREFECT_WORKER_QUERY_SECONDS": "2", "PREFECT_WORKER_PREFETCH_SECONDS": "2"}.items():
        monkeypatch.setenv(name, value)
    address, heard = webhook
    runs, started = tmp_path / "kvq-home" / "runs", []
    try:
        url = service.up(free_port(), deployments(model, tmp_path), address)
        started = family(tmp_path / "kvq-home" / "flows")
        assert len(started) >= 2
        with flow.temporary_settings({flow.PREFECT_API_URL: url}), get_client(sync_client=True) as client:
            defined = {one.name: one for one in client.read_automations()}
            assert len(defined) == 4
            assert defined["kvq: no success for 36 hours"].trigger.within == timedelta(hours=36)
            killed = kill_in_mid_run(client, runs)
            crashed = until(lambda: (one := client.read_flow_run(killed)).state.is_crashed() and one)
            assert crashed.deployment_id is not None
            done = until(lambda: states(client, "nightly", "Completed"))
            assert resumed(client, runs)
            client.pause_deployment(done[0].deployment_id)
            assert registry.resolve("tiny-model-aqua-2bit").version == "1.0.0"
            assert not [
                one for one in states(client, "kvq-calibrate", "Running") if one.start_time < done[0].start_time
            ]
            asked = client.read_deployment_by_name("on-demand/on-demand")
            client.create_flow_run_from_deployment(asked.id)
            until(lambda: heard)
            (failed,) = states(client, "kvq-calibrate", "GateFailed")
            assert failed.state.message in heard[0]["text"] and "was not published. KL" in heard[0]["text"]
            started += family(tmp_path / "kvq-home" / "flows")
    finally:
        stopped = service.down()
    assert stopped == ["worker", "server"]
    assert not [one for one in started if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert service.down() == []


def family(folder: Path) -> list[psutil.Process]:
    """What the service started, and their children."""
    found = [psutil.Process(json.loads(record.read_text())["pid"]) for record in folder.glob("*.json")]
    return found + [child for one in found for child in one.children(recursive=True)]


def states(client, name: str, state: str):
    """Flow runs of a flow in a state."""
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName

    found = client.read_flow_runs(flow_filter=FlowFilter(name=FlowFilterName(any_=[name])))
    return [one for one in found if one.state_name == state]


def kill_in_mid_run(client, runs: Path):
    """Kill the process of the nightly run when a few layers are done; the run's id."""
    until(lambda: list(runs.glob("*/layer-0002")))
    (running,) = states(client, "nightly", "Running")
    for one in psutil.process_iter(["environ"]):
        if (one.info["environ"] or {}).get("PREFECT__FLOW_RUN_ID", "").replace("-", "") == running.id.hex:
            os.kill(one.pid, signal.SIGKILL)
    assert not list(runs.glob("*/layer-0015"))
    return running.id


def resumed(client, runs: Path) -> bool:
    """Whether no layer was fitted twice: the layer at which the first run was killed is the only one tried again."""
    from collections import Counter

    counts = Counter(one.name for one in client.read_task_runs() if one.name.startswith("layer-"))
    return set(counts) == {f"layer-{n}-0" for n in range(16)} and sum(n > 1 for n in counts.values()) <= 1
