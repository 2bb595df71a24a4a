"""The public names: all there, described, typed, and imported no earlier than they are used."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import kvq_runtime

ROOT = Path(__file__).parents[2]


def loaded(body: str) -> set[str]:
    """The modules that a program of its own has imported at its end."""
    code = f"import sys\n{body}\nprint(*sys.modules, sep='\\n', file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


@pytest.mark.parametrize("name", kvq_runtime.__all__)
def test_a_public_name_is_there_and_says_what_it_is(name):
    value = getattr(kvq_runtime, name)
    assert name in dir(kvq_runtime)
    if name == "__version__":
        assert isinstance(value, str) and value
    else:
        assert value.__name__ == name and inspect.getdoc(value)


def test_a_name_is_imported_on_first_use():
    assert "torch" not in loaded("import kvq_runtime; kvq_runtime.__version__; kvq_runtime.NotFound")
    assert "transformers" not in loaded("from kvq_runtime import Artifact, MemoryReport, load_artifact, preset")


def test_help_does_not_wait_for_torch():
    body = "from kvq_runtime.cli.main import main\nassert main(['--help']) == 0 and main(['pull', '--help']) == 0"
    assert not {"torch", "huggingface_hub", "transformers"} & loaded(body)


def test_a_transformers_that_lacks_what_is_used_is_named_with_the_one_that_does_not(monkeypatch):
    """Whatever name it is that it lacks."""

    def without(module: str):
        raise ImportError("cannot import name 'Mixin' from 'transformers.cache_utils'", name="transformers.cache_utils")

    vars(kvq_runtime).pop("KVQCache", None)
    monkeypatch.setattr(kvq_runtime, "import_module", without)
    versions = {"transformers": "4.57.6"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    with pytest.raises(ImportError, match=r"KVQCache needs transformers .*>=5\.\d+.*, and 4\.57\.6 is here; .*hf"):
        kvq_runtime.KVQCache  # noqa: B018
