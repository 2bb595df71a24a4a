"""The flows of `pipelines/`, run in this process against a Prefect server of its own."""

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tiny
import tiny_artifact
from patience import until

from kvq_calib.cli import calibrate as cli
from kvq_calib.evaluate.quality_checks import DriftCheck, check_drift
from kvq_runtime.errors import NotFound
from kvq_runtime.registry import resolve as registry

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("prefect")]
NAME = "tiny-model-aqua-2bit"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny.with_text(tmp_path_factory.mktemp("model")))


@pytest.fixture
def server(request):
    """The Prefect server of this process, in use. Other tests use it too: a run has its test's name as a tag."""
    from prefect import tags
    from prefect.settings import PREFECT_API_URL

    from kvq_calib.flow.server import temporary_server

    assert PREFECT_API_URL.value() is None
    with temporary_server() as address, tags(request.node.name):
        yield address


def small(model: str, **more) -> dict:
    own = {"corpus": f"{model}/corpus.txt", "samples": 4, "seq_len": 384, "eval_windows": 2, **more}
    return {"settings": own}


@pytest.fixture
def mine(request):
    """Read flow runs or artifacts from the server: `mine("flow_runs")`, those of this test alone."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags

    ours = FlowRunFilter(tags=FlowRunFilterTags(all_=[request.node.name]))

    def read(what: str):
        with get_client(sync_client=True) as client:
            return getattr(client, f"read_{what}")(flow_run_filter=ours)

    return read


@pytest.fixture
def shown(mine):
    """What a test's runs show: the artifacts of a key."""
    return lambda key: [one for one in mine("artifacts") if one.key == key]


def logged(run) -> list[str]:
    """What a flow run's log holds."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId

    with get_client(sync_client=True) as client:
        found = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])))
    return [line.message for line in found]


def test_every_parameter_is_described_and_none_is_a_secret():
    from prefect.utilities.callables import parameter_schema

    from pipelines.flows import drift, nightly, on_demand

    for one in (on_demand, nightly, drift):
        properties = parameter_schema(one.fn).properties
        assert properties and all(len(given["description"]) > 10 for given in properties.values()), properties
        assert not any("token" in name for name in properties)


def test_a_run_shows_progress_table_and_version(model, server, shown):
    from pipelines.flows import on_demand

    rows = on_demand(model, **small(model))
    assert registry.resolve(rows[0]["artifact"]).sha256 == rows[0]["sha256"]
    progress = shown("kvq-progress")
    assert [one.data for one in progress] == [100.0] and "evaluation" in progress[0].description
    assert NAME in shown("kvq-artifacts")[0].data
    assert registry.resolve(f"{NAME}@1.0.0").path.as_uri() in shown("kvq-version")[0].data


def test_a_failed_gate_is_in_the_state_the_record_and_the_exit_code(model, server, mine, tmp_path, monkeypatch, capsys):
    from pipelines.flows import on_demand

    monkeypatch.setenv("PREFECT_API_URL", server)
    state = on_demand(model, **small(model, seed=1, max_kl=1e-12), return_state=True)
    assert state.is_failed() and f"{NAME} was not published. KL divergence, nats, full encode: " in state.message
    inner = [run.state for run in mine("flow_runs") if run.state_name == "GateFailed"]
    assert len(inner) == 1 and inner[0].type.value == "FAILED" and inner[0].message in state.message
    for run in mine("flow_runs"):  # both, as `prefect flow-run logs` shows them
        assert [line for line in until(lambda run=run: logged(run)) if line in state.message], logged(run)
    (run,) = (tmp_path / "kvq-home" / "runs").iterdir()
    record = json.loads((run / "evaluation.json").read_text())[0]
    assert record["result"]["gate"]["failed"][0] in state.message
    assert registry.open_registry().names() == []
    given = ["--model", model, "--corpus", f"{model}/corpus.txt", "--samples", "4", "--seq-len", "384", "--seed", "1"]
    assert cli.main([*given, "--eval-windows", "2", "--max-kl", "1e-12"]) == 5
    assert "was not published. KL" in capsys.readouterr().err


@pytest.fixture
def losing(monkeypatch):
    """Lose the answer to the first request that sets the state GateFailed: the client asks again. The lost ones."""
    send, lost = httpx.Client.send, []

    def loses(client, request, *args, **kwargs):
        answer = send(client, request, *args, **kwargs)
        if "/flow_runs/" in request.url.path and b'"GateFailed"' in request.content and not lost:
            lost.append(request)
            raise httpx.ReadTimeout("lost", request=request)
        return answer

    monkeypatch.setattr(httpx.Client, "send", loses)
    return lost


def test_a_failed_gate_is_known_when_an_answer_is_lost(model, server, losing, monkeypatch, capsys):
    """The client asks again, and is given the server's state, which holds nothing that the flow put into it."""
    monkeypatch.setenv("PREFECT_API_URL", server)
    given = ["--model", model, "--corpus", f"{model}/corpus.txt", "--samples", "4", "--seq-len", "384", "--seed", "2"]
    assert cli.main([*given, "--eval-windows", "2", "--max-kl", "1e-12"]) == 5 and losing
    assert f"{NAME} was not published. KL" in capsys.readouterr().err


def test_a_model_that_fails_does_not_stop_the_night(model, server, tmp_path, caplog):
    from pipelines.flows import nightly

    (tmp_path / "gone").mkdir()
    gone = str(tmp_path / "gone")
    state = nightly([{"model": one, **small(model)["settings"]} for one in (gone, model)], return_state=True)
    assert gone in caplog.text and "Traceback" not in caplog.text
    assert state.is_failed() and state.message.startswith(f"{gone}: ") and model not in state.message.replace(gone, "")
    assert registry.resolve(NAME).version == "1.0.0"


def test_a_wrong_entry_is_told_before_the_night_and_stops_no_other(server, monkeypatch):
    from pipelines import flows

    told, before = list[str](), list[Any]()
    monkeypatch.setattr(flows, "get_run_logger", lambda: SimpleNamespace(error=told.append))
    monkeypatch.setattr(flows, "calibrated", lambda job, _: before.append((job.samples, [*told])) or [])
    wrong = [{"model": "nosuch"}, {"recipes": ["aqua-2bit"]}, "demo", {"model": "demo", "max_kl": -1}]
    state = flows.nightly([{"model": "demo", "samples": 4}, *wrong, {"model": "demo", "samples": 8}], return_state=True)
    assert before == [(4, told), (8, told)] and state.is_failed() and state.message == told[0]
    for message in (
        "nosuch: model 'nosuch' is no f",
        "entry 3: model: Field required",
        "entry 4: ",
        "demo: --max-kl -1",
    ):
        assert message in told[0]
    monkeypatch.setattr(flows, "measure", lambda check: before.append(check.artifacts) or [])
    before.clear()
    checks = [{"model": "demo", "artifact": "x"}, {"model": "demo", "artifacts": [NAME]}]
    state = flows.drift(checks, return_state=True)
    assert state.is_failed() and "artifact: Unexpected" in state.message and before == [[NAME]]


def test_a_refusal_is_logged_without_its_traceback_and_a_defect_with_it(server, monkeypatch, caplog):
    from pipelines import flows

    for error, traced in ((ValueError("of a setting"), False), (KeyError("of a defect"), True)):

        def fails(*_, error=error):
            raise error

        monkeypatch.setattr(flows, "calibrated", fails)
        assert flows.nightly([{"model": "demo"}], return_state=True).is_failed()
        assert "demo: " in caplog.text and ("Traceback" in caplog.text) == traced


def test_drift_is_told_and_on_record(model, server):
    from pipelines.flows import drift as check
    from pipelines.flows import on_demand

    on_demand(model, **small(model, seed=2))
    place, given = registry.open_registry(), {"model": model, "corpus": f"{model}/corpus.txt", "windows": 2}
    given |= {"artifacts": [NAME], "length": 384}
    state = check([given | {"max_kl": 1e-12}], return_state=True)
    assert state.name == "Drifted" and state.is_failed() and f"{NAME}@1.0.0 has drifted. KL" in state.message
    assert check([given | {"max_kl": 100.0, "max_perplexity_ratio": 2.0}]) == [f"{NAME}@1.0.0"]
    kept = place.evaluations(registry.resolve(NAME).sha256)
    assert sorted(len(one["result"]["gate"]["failed"]) for one in kept if "gate" in one["result"]) == [0, 1]


def test_a_drift_check_of_what_is_withdrawn_measures_nothing_and_says_so(model, tmp_path):
    place = registry.open_registry(str(tmp_path / "registry"))
    place.publish(NAME, tiny_artifact.data())
    place.yank(NAME, "1.0.0", "of the wrong text")
    with pytest.raises(NotFound, match=f"every version of {NAME} is yanked, and no alias production points to one"):
        check_drift(DriftCheck(model, [NAME], registry=place.url))
