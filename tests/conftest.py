"""Where the tests find real models and text, and what every run needs."""

import json
import os
from pathlib import Path

import hypothesis
import pytest
import torch
from interpreter import spare

from kvq_calib.flow import server as flow_server

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
os.environ.update(flow_server.QUIET)  # read when prefect is imported, whichever test does it first
# Kernels run on the GPU where there is one, else in Triton's interpreter, which is chosen before triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# What hypothesis draws is the same in every run of CI; elsewhere it looks further each time. On a busy machine it would
# call a test unhealthy for the time that drawing takes.
hypothesis.settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
if "CI" in os.environ:
    hypothesis.settings.load_profile("ci")

REPOSITORY = Path(__file__).parent.parent


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let a test draw the same numbers whatever tests were here before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the embedded model."""
    return REPOSITORY / "artifacts" / "demo-model"


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Models and text that are not part of the project, under KVQ_TEST_DATA."""
    folder = os.environ.get("KVQ_TEST_DATA")
    if not folder:
        pytest.skip("KVQ_TEST_DATA is not set: KVQ_TEST_DATA=FOLDER make test-all, of the larger test models and texts")
    path = Path(folder)
    assert path.is_dir(), f"KVQ_TEST_DATA={folder} is no folder"
    return path


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of SmolLM2-135M-Instruct, as `make real-model` makes it."""
    folder = REPOSITORY / "build" / "smollm2-135m"
    if not (folder / "config.json").is_file():
        assert "CI" not in os.environ, f"{folder} is not there: make real-model"
        pytest.skip("the model SmolLM2-135M is not here: make real-model")
    return folder


@pytest.fixture(scope="session")
def qwen() -> Path:
    """The folder of Qwen2.5-Coder-0.5B-Instruct, as `make real-model MODEL=qwen2.5-coder-0.5b` makes it."""
    folder = REPOSITORY / "build" / "qwen2.5-coder-0.5b"
    if not (folder / "config.json").is_file():
        assert "CI" not in os.environ, f"{folder} is not there: make real-model MODEL=qwen2.5-coder-0.5b"
        pytest.skip("the model Qwen2.5-Coder-0.5B is not here: make real-model MODEL=qwen2.5-coder-0.5b")
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A Hub on loopback that this process' client talks to, with a cache of its own."""
    from hub_client import hub_for

    with hub_for(monkeypatch, tmp_path) as hub:
        yield hub


@pytest.fixture
def kvq(capsys: pytest.CaptureFixture[str]):
    """Run a command of `kvq`: its exit code, output and errors."""
    from kvq_runtime.cli.main import main

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def as_json(kvq):
    """Run a command of `kvq` that must succeed, with --json, and read what it printed."""

    def run(*arguments: object):
        code, out, err = kvq(*arguments, "--json")
        assert (code, err) == (0, ""), err
        return json.loads(out)

    return run


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """One thread, no network, and a registry of the test's own."""
    torch.set_num_threads(1)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("KVQ_HOME", str(tmp_path / "kvq-home"))
    monkeypatch.delenv("KVQ_REGISTRY", raising=False)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


@pytest.fixture
def recipe(request: pytest.FixtureRequest):
    """The recipe of a parameter `recipe` that is a name, with small blocks: see `feeding.every_recipe`."""
    from feeding import RECIPES

    return RECIPES[request.param]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of a GPU where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="a GPU is needed: make test-all on a machine that has one"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules are imported now, and Triton with them where there is one."""
    spare()
    if session.config.getoption("loadgroup", False):
        loose = [
            item.nodeid for item in session.items if item.get_closest_marker("xdist_group") and "@" not in item.nodeid
        ]
        assert not loose, f"{loose[0]} would not stay with its group: install the versions of constraints.txt"


def pytest_terminal_summary(terminalreporter) -> None:
    """Print what tests counted: `record_property("kvq", "...")`."""
    reports = [
        report for group in terminalreporter.stats.values() for report in group if hasattr(report, "user_properties")
    ]
    counted = [text for report in reports for name, text in report.user_properties if name == "kvq"]
    if counted:
        terminalreporter.section("counts")
        terminalreporter.write_line("\n".join(dict.fromkeys(counted)))
