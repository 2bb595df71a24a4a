"""What a stranger clones: no trace of one machine, no large files, and a README whose commands exist."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LARGEST = 15_000_000  # bytes, of an artifact in the zoo
# Spelled in parts, so that this file does not contain what it looks for.
TRACES = {
    "a path of one machine": re.compile(
        r"(?<![\w.])/(?:" + "|".join(["work", "root", "home/[a-z]", "farm", "tmp/[a-z]"]) + ")/"
    ),
    "a package index": re.compile(
        "|".join(["index" + "-url", r"pypi\." + r"\w+", r"files\." + "pythonhosted", "find" + "-links"])
    ),
}


def tracked() -> list[Path]:
    """Files of the repository: those in git, and new ones that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        pytest.skip("not a git checkout")
    return [path for name in found.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def texts() -> list[tuple[str, str]]:
    """(name, text) of every tracked file that is text."""
    found = []
    for path in tracked():
        try:
            found.append((path.relative_to(ROOT).as_posix(), path.read_text("utf-8")))
        except UnicodeDecodeError:
            continue
    return found


@pytest.mark.parametrize("what", TRACES)
def test_no_traces_of_a_machine(what):
    found = [
        f"{name}:{number}: {line.strip()[:120]}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if TRACES[what].search(line)
    ]
    assert not found, f"{what}:\n" + "\n".join(found)


def test_no_large_files():
    large = {path.name: path.stat().st_size for path in tracked() if path.stat().st_size > LARGEST}
    assert not large


def test_no_test_imports_another():
    """What several tests use is a file in tests/support; that folder and the root alone are on the path."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert settings["pythonpath"] == [".", "tests/support"]
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            tests = [name for name in names if re.search(r"(^|\.)(test_\w+|conftest)$", name)]
            assert not tests, f"{path.relative_to(ROOT)} imports {tests}; move what it needs to tests/support"


def test_the_makefile_has_what_the_pages_name_and_contributing_all_of_it():
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"(?:`|^)make ([a-z-]+)", (ROOT / name).read_text(), re.MULTILINE))
        assert named and named <= targets, f"{name} names {named - targets}"
    listed = set(re.findall(r"^\| `make ([a-z-]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
    assert listed == targets - {"help"}
    assert {"env", "demo", "test", "check", "bench", "flows-up"} <= targets


def test_files_that_the_readme_names_exist():
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"`((?:[\w-]+/)+[\w.-]+\.\w+|[A-Z]{4,}|constraints\.txt)`", text):
        assert name.startswith("build/") or (ROOT / name).exists(), name


def test_excerpts_of_the_documentation_are_the_code():
    """A block that begins with a file's name quotes it; `...` stands for what is left out."""
    quoted = re.findall(
        r"```python\n# (\S+\.py)\n(.*?)```", (ROOT / "docs" / "adding-a-method.md").read_text(), re.DOTALL
    )
    assert len(quoted) >= 3
    for name, block in quoted:
        text = (ROOT / name).read_text()
        for part in block.split("...\n"):
            assert part in text, f"{name} has no longer:\n{part}"


def test_pins_satisfy_the_project():
    """Every direct dependency of the project has one pin in constraints.txt, inside the project's bounds.

    Not vLLM, which has an environment of its own: it pins torch. Nor LMCache, which asks for CUDA's libraries, and
    lm-eval: their pins stand in the Makefile, and they lie beside .venv for their tests."""
    packaging = pytest.importorskip("packaging.requirements")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = dict(line.split("==") for line in lines if line)
    normal = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    assert len(normal) == len([line for line in lines if line])
    apart = ("triton", "vllm", "lmcache", "lm-eval")
    extras = {name: needs for name, needs in project["optional-dependencies"].items() if name not in apart}
    for given in [*project["dependencies"], *(need for needs in extras.values() for need in needs)]:
        need = packaging.Requirement(given)
        name = re.sub(r"[-_.]+", "-", need.name).lower()
        if name != "kvq-runtime":
            assert name in normal, f"{name} is not pinned"
            assert need.specifier.contains(normal[name]), f"{given}, but constraints.txt says {normal[name]}"


def test_torch_pins_its_own_triton():
    """PyTorch's GPU build asks for exactly one Triton; a pin of another would make `make env` unsolvable with it."""
    assert not re.search(r"^triton==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_caches_are_handed_to_models_by_the_name_of_the_release_at_hand():
    """pytest does not make errors of transformers' warnings about the old one, which tests use."""
    named = re.compile(r"(?<!\w)past_key_values=(?!cache before transformers)")
    places = ("kvq_runtime/", "kvq_calib/", "pipelines/", "scripts/", "benchmarks/", "docs/", "README.md")
    found = [name for name, text in texts() if name.startswith(places) and named.search(text)]
    assert not found, found
    assert named.search("model(ids, past_key_values=cache)")
