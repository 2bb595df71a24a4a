"""`make flows-up` as it is: a real server, a real worker, a schedule in seconds, a webhook on loopback, a kill -9."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from uuid import UUID

import patience
import psutil
import pytest
import tiny
from patience import PATIENCE, held, lives
from webhook import free_port, listening

from kvq_runtime.registry import resolve as registry

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("prefect")]
ROOT = Path(__file__).parents[3]
CANARY = "hf_" + "canary" * 5
until = partial(patience.until, pause=1.0)  # each question is work for the server, too


@pytest.fixture
def hook():
    """A webhook, and what it heard."""
    with listening() as found:
        yield found


def deployments(model: Path, folder: Path) -> Path:
    """flows.yaml for a tiny model: every ten seconds what is nightly, and a bound on demand that nothing keeps."""
    import yaml

    given = yaml.safe_load((ROOT / "flows.yaml").read_text())
    settings = {"corpus": str(model / "corpus.txt"), "samples": 4, "seq_len": 384, "eval_windows": 2,
             "checkpoint_every": 0}  # fmt: skip
    nightly = next(one for one in given["deployments"] if one["name"] == "nightly")
    asked = next(one for one in given["deployments"] if one["name"] == "on-demand")
    soon = (datetime.now(UTC) + timedelta(seconds=1)).isoformat()
    nightly["parameters"] = {"jobs": [{"model": str(model), **settings}]}
    nightly["schedules"] = [{"interval": 10, "anchor_date": soon, "timezone": "Europe/Berlin", "slug": "soon"}]
    asked["parameters"] = {"model": str(model), "settings": {**settings, "seed": 1, "max_kl": 1e-12}}
    path = folder / "flows.yaml"
    path.write_text(yaml.safe_dump(given))
    return path


def test_the_page_starts_a_deployment_that_there_is():
    import yaml

    (line,) = [
        one for one in (ROOT / "docs" / "schedule.md").read_text().splitlines() if "prefect deployment run" in one
    ]
    words = shlex.split(line)
    flow, name = words[words.index("run") + 1].split("/")
    (found,) = [one for one in yaml.safe_load((ROOT / "flows.yaml").read_text())["deployments"] if one["name"] == name]
    file, function = found["entrypoint"].split(":")
    made = getattr(import_module(file.removesuffix(".py").replace("/", ".")), function)
    assert made.name == flow
    given = dict(words[place + 1].split("=", 1) for place, word in enumerate(words) if word == "--param")
    made.validate_parameters(found["parameters"] | {key: json.loads(value) for key, value in given.items()})


def test_a_run_is_killed_and_resumed_and_a_failed_gate_is_reported(tmp_path, monkeypatch, hook):
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    address, heard = hook
    model = tmp_path / "tiny-model"
    model.mkdir()
    tiny.save(model, "llama", layers=6)
    tiny.text(model)
    for name in ("WORKER_QUERY_SECONDS", "WORKER_PREFETCH_SECONDS", "SERVER_SERVICES_SCHEDULER_MIN_RUNS",
                 "SERVER_SERVICES_SCHEDULER_MAX_RUNS"):  # fmt: skip
        monkeypatch.setenv(f"PREFECT_{name}", "2")
    monkeypatch.setenv("HF_TOKEN", CANARY)
    runs, flows = tmp_path / "kvq-home" / "runs", tmp_path / "kvq-home" / "flows"
    hold = tmp_path / "hold"  # while it exists the fourth layer is not finished
    hold.touch()
    (tmp_path / "sitecustomize.py").write_text(held(hold, "name.endswith('layer-0003')"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with free_port() as port:
        command = [sys.executable, "-m", "pipelines.service", "--port", str(port), "--webhook", address]
        command += ["--file", str(deployments(model, tmp_path))]
        service = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert service.stdout and "shows the flows" in service.stdout.readline()
    try:
        started = family(service)
        assert len(started) >= 2
        assert flows.stat().st_mode & 0o777 == 0o700
        assert {(flows / name).stat().st_mode & 0o777 for name in ("auth", "hf-token")} == {0o600}
        assert (flows / "hf-token").read_text() == CANARY
        known = {PREFECT_API_URL: f"http://127.0.0.1:{port}/api", PREFECT_API_AUTH_STRING: (flows / "auth").read_text()}
        with temporary_settings(known), get_client(sync_client=True) as client:
            defined = {one.name: one for one in client.read_automations()}
            assert len(defined) == 5
            assert defined["kvq: no success for 36 hours"].trigger.within == timedelta(hours=36)
            killed = kill_in_mid_run(client, runs)
            crashed = until(lambda: (one := client.read_flow_run(killed)).state.is_crashed() and one)
            assert crashed.auto_scheduled and crashed.deployment_id is not None
            assert registry.open_registry().names() == []
            hold.unlink()
            second = client.create_flow_run_from_deployment(crashed.deployment_id).id
            until(lambda: client.read_flow_run(second).state.is_completed())
            until(lambda: fitted(client).keys() == {f"layer-{n}-0" for n in range(6)})
            assert fitted(client)["layer-0-0"] == fitted(client)["layer-2-0"] == 1
            assert registry.resolve("tiny-model-aqua-2bit").version == "1.0.0"
            until(lambda: not states(client, "kvq-calibrate", "Running"))
            asked = client.read_deployment_by_name("on-demand/on-demand")
            client.create_flow_run_from_deployment(asked.id)
            told = until(lambda: [text for text in heard if "was not published. KL" in text])
            (failed,) = states(client, "kvq-calibrate", "GateFailed")
            assert failed.state.message in told[0]
            assert list(registry.open_registry().state("tiny-model-aqua-2bit").versions) == ["1.0.0"]
            started += family(service)
    finally:
        service.send_signal(signal.SIGTERM)
        assert service.wait(PATIENCE) == 0
        service.stdout.close()
    assert not [one for one in started if lives(one)]
    assert not (flows / "auth").exists() and not (flows / "hf-token").exists()


def family(service: subprocess.Popen) -> list[psutil.Process]:
    """Return what the service started, and their children; none of them has the token in its environment."""
    found = psutil.Process(service.pid).children(recursive=True)
    assert not [one for one in found if CANARY in one.environ().values()]
    return found


def states(client, name: str, state: str):
    """Flow runs of a flow in a state."""
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName

    found = client.read_flow_runs(flow_filter=FlowFilter(name=FlowFilterName(any_=[name])))
    return [one for one in found if one.state_name == state]


def kill_in_mid_run(client, runs: Path) -> UUID:
    """Kill the process of the scheduled run when three layers are done, and Prefect knows it; the run's id. No other
    one of the schedule is started after it."""
    running, id = until(lambda: next(at_work(runs.parent), None))
    client.pause_deployment(client.read_flow_run(id).deployment_id)
    for other in [one for one in client.read_flow_runs() if one.auto_scheduled and one.id != id]:
        client.delete_flow_run(other.id)
    assert CANARY not in running.environ().values()
    until(lambda: fitted(client).keys() >= {f"layer-{n}-0" for n in range(4)})
    running.kill()
    assert {path.name for path in runs.glob("*/layer-????")} == {f"layer-000{n}" for n in range(3)}
    return id


def at_work(home: Path) -> Iterator[tuple[psutil.Process, UUID]]:
    """Processes that run flows for this service, with their run's id."""
    for one in psutil.process_iter(["environ"]):
        given = one.info["environ"] or {}
        if given.get("KVQ_HOME") == str(home) and "PREFECT__FLOW_RUN_ID" in given:
            yield one, UUID(given["PREFECT__FLOW_RUN_ID"])


def fitted(client) -> Counter[str]:
    """How often each layer was begun, as far as Prefect has been told."""
    return Counter(one.name for one in client.read_task_runs() if one.name.startswith("layer-"))
