"""The runtime imports, and loads an artifact, where nothing but its own three dependencies is installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lean import ABSENT, BLOCKED

from kvq_runtime import preset

ROOT = Path(__file__).parents[2]
GOLDEN = sorted((ROOT / "artifacts" / "golden").rglob("*.safetensors"))
# need the extras hf, triton, vllm, lmcache
OPTIONAL = ("kvq_runtime.hf", "kvq_runtime.kernels", "kvq_runtime.vllm.backend")
PREFIX = {f"kvq_runtime.prefix.{name}" for name in ("transformers", "vllm", "lmcache")}


def run(body: str, *arguments: str, home: Path, blocked: str = BLOCKED) -> subprocess.CompletedProcess:
    """Run Python with those modules blocked, outside the checkout."""
    environment = {"KVQ_HOME": str(home), "HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::ImportWarning", "-c", blocked + body, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=home, env=environment)


def modules() -> list[str]:
    """Every module of the runtime that must import without extras."""
    files = (ROOT / "kvq_runtime").rglob("*.py")
    names = {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for f in files}
    return sorted(n for n in names if not n.startswith(OPTIONAL) and n not in PREFIX)


def test_the_blockade_blocks(tmp_path):
    for name in ABSENT:
        done = run(f"import {name}", home=tmp_path)
        assert done.returncode == 1 and "(blocked)" in done.stderr, name


def test_every_module_imports(tmp_path):
    names = modules()
    assert "kvq_runtime.codec.codec" in names
    body = "import importlib, json\nfor name in json.loads(sys.argv[1]): importlib.import_module(name)"
    done = run(body, json.dumps(names), home=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [
    "from kvq_calib.cli.calibrate import main; sys.exit(main(['--model', 'demo']))",
    "from kvq_runtime.cli.main import main; sys.exit(main(['eval', 'higgs-2bit', '--model', 'demo']))",
])  # fmt: skip
def test_a_command_without_its_extra_names_it(command, tmp_path):
    done = run(command, home=tmp_path, blocked=BLOCKED.replace("'kvq_calib', ", ""))
    assert done.returncode and "[calib]" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_folder_needs_nothing_of_the_hub(tmp_path):
    body = """
from kvq_runtime.registry import resolve as registry
registry.open_registry().names()
print([name for name in sys.modules if name.startswith(("huggingface_hub", "httpx"))])
"""
    done = run(body, home=tmp_path)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_preset_reads_the_file_that_lists_it_and_its_json_what_it_names(tmp_path):
    body = """
import json
from kvq_runtime import Recipe, preset
def loaded(folder): return [name for name in sys.modules if name.startswith(f"kvq_runtime.{folder}.")]
recipe = preset("higgs-2bit").check()
print(json.dumps([loaded(folder) for folder in ("recipes", "policies", "store", "codec")]))
assert Recipe.from_json(recipe.to_json()) == recipe and not loaded("policies")
assert Recipe.from_json(json.loads(sys.argv[1])).policies and loaded("policies")
"""
    stated = json.dumps(preset("subkv-2bit").to_json())
    done = run(body, stated, home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["kvq_runtime.recipes.higgs"], [], [], []]


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, list]:
    """Of each golden artifact its recipe and layers, or how it failed, from one process without those modules."""
    body = """
import json, traceback
from kvq_runtime.artifact import artifact
from kvq_runtime.codec import codec
from kvq_runtime.codec import shared
said = {}
for path in sys.argv[1:]:
    try:
        loaded = artifact.load(path)
        pairs = shared.build(loaded.recipe, loaded.fingerprint.geometry, loaded.tensors)
        said[path] = [loaded.recipe.name, len(pairs)]
    except Exception:
        said[path] = [traceback.format_exc()]
print(json.dumps(said))
"""
    done = run(body, *map(str, GOLDEN), home=tmp_path_factory.mktemp("lean"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.xdist_group("golden artifacts without extras")
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.relative_to(ROOT / "artifacts" / "golden").as_posix())
def test_an_artifact_loads_and_builds(path, said):
    name, *layers = said[str(path)]
    assert layers, name
    assert name and layers[0] >= 1


def test_the_command_runs_without_extras(tmp_path):
    done = run("sys.argv = ['kvq', 'list']\nfrom kvq_runtime.cli.main import main\nsys.exit(main())", home=tmp_path)
    assert done.returncode == 0, done.stderr
