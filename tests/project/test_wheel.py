"""What users install: the wheel, and the wheel made from the sdist, are the same and work outside the checkout."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOLDEN = sorted((ROOT / "artifacts" / "golden").rglob("*.safetensors"))
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]  # one worker builds for all


def sh(*command, cwd, **environment) -> str:
    """Run a command and return its output; its errors are the test's message."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """{"tree": wheel, "sdist": wheel made from the sdist, "archive": the sdist itself}."""
    tree, sdist = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("sdist")
    build = (sys.executable, "-m", "build", "--no-isolation")
    sh(*build, "--wheel", "--outdir", tree, ROOT, cwd=tree)
    sh(*build, "--outdir", sdist, ROOT, cwd=sdist)
    (wheel,), (other,), (archive,) = tree.glob("*.whl"), sdist.glob("*.whl"), sdist.glob("*.tar.gz")
    return {"tree": wheel, "sdist": other, "archive": archive}


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """A folder that holds the wheel and nothing else; what it depends on comes from this environment."""
    folder = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    sh(*pip, "--target", folder, built["tree"], cwd=folder)
    return folder


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist()}


def python(folder: Path, body: str, *arguments) -> str:
    return sh(sys.executable, "-c", body, *arguments, cwd=folder, PYTHONPATH=str(folder))


def test_the_sdist_makes_the_same_wheel(built):
    tree, sdist = content(built["tree"]), content(built["sdist"])
    assert tree.keys() == sdist.keys()
    assert [name for name in tree if tree[name] != sdist[name]] == []


def test_the_wheel_holds_the_packages_and_the_models_and_nothing_else(built):
    found = content(built["tree"])
    tops = {name.split("/")[0] for name in found if ".dist-info/" not in name}
    assert tops == {"kvq_runtime", "kvq_calib", "kvq_demo_model"}
    for package in ("kvq_runtime", "kvq_calib"):
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert found[path.relative_to(ROOT).as_posix()] == path.read_bytes()
    for path in (ROOT / "artifacts" / "demo-model").iterdir():
        assert found[f"kvq_demo_model/{path.name}"] == path.read_bytes()


def test_the_sdist_holds_what_the_wheel_leaves_out(built):
    with tarfile.open(built["archive"]) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    for wanted in ("pipelines/__init__.py", "tests/project/test_wheel.py", "scripts/train_demo_model.py", "Makefile",
                   "constraints.txt", "artifacts/demo-model/model.safetensors", "LICENSE", ".ci/run"):  # fmt: skip
        assert wanted in names
    assert not any(name.startswith((".venv", "build", "dist")) for name in names)


def test_the_commands_run_outside_the_checkout(installed):
    body = "import kvq_runtime, kvq_calib; print(kvq_runtime.__file__, kvq_calib.__file__)"
    assert all(path.startswith(str(installed)) for path in python(installed, body).split())
    home = {"PYTHONPATH": str(installed), "KVQ_HOME": str(installed / "home")}
    sh(installed / "bin" / "kvq", "list", cwd=installed, **home)
    assert "--recipe" in sh(installed / "bin" / "kvq-calibrate", "--help", cwd=installed, **home)


def test_embedded_models_are_found_outside_the_checkout(installed):
    body = "from kvq_calib.model import find; print(find._embedded_folder('demo'))"
    assert python(installed, body).split() == [str(installed / "kvq_demo_model")]


def test_golden_artifacts_load_outside_the_checkout(installed):
    """All of them in one process, which prints the name of each one's recipe."""
    body = """
import sys
from kvq_runtime.artifact import artifact
for path in sys.argv[1:]:
    print(artifact.load(path).recipe.name or "no name", path)
"""
    lines = python(installed, body, *GOLDEN).splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [str(path) for path in GOLDEN]
    assert not [line for line in lines if line.startswith("no name")]
