"""The Dockerfile is one, and installs what is here: no builder runs where the tests do."""

import json
import re
import shlex
import tomllib
from io import BytesIO
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "CMD", "COMMENT"}


@pytest.fixture(scope="module")
def dockerfile():
    parse = pytest.importorskip("dockerfile_parse", reason="the parser of Dockerfiles is in the extra dev: make env")
    return parse.DockerfileParser(fileobj=BytesIO((ROOT / "Dockerfile").read_bytes()))


def given(dockerfile, instruction: str) -> list[str]:
    return [one["value"] for one in dockerfile.structure if one["instruction"] == instruction]


def test_it_copies_what_there_is_and_installs_an_extra_that_there_is(dockerfile):
    assert {one["instruction"] for one in dockerfile.structure} == INSTRUCTIONS
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (version,) = re.fullmatch(r"python:([\d.]+)-slim", dockerfile.baseimage).groups()
    assert SpecifierSet(project["requires-python"]).contains(version)
    copied = {source for value in given(dockerfile, "COPY") for source in shlex.split(value)[:-1]}
    assert {source for source in copied if not (ROOT / source).exists()} == set()
    assert {
        "kvq_runtime",
        "kvq_calib",
        "pipelines",
        "flows.yaml",
        project["readme"],
        *project["license-files"],
    } <= copied
    (install,) = [shlex.split(value) for value in given(dockerfile, "RUN") if value.startswith("pip install")]
    assert install[-2] == "-e" and set(install[-1][2:-1].split(",")) <= set(project["optional-dependencies"])
    assert install[install.index("-c") + 1] in copied


def test_it_starts_what_a_worker_of_kubernetes_starts_and_not_as_root(dockerfile):
    deployment = yaml.safe_load((ROOT / "docs" / "fleet" / "kubernetes-worker.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert json.loads(dockerfile.cmd) == container["command"]
    (checkout,) = [one["value"] for one in container["env"] if one["name"] == "KVQ_CHECKOUT"]
    assert given(dockerfile, "WORKDIR") == [checkout] and given(dockerfile, "ENV") == [f"KVQ_CHECKOUT={checkout}"]
    assert given(dockerfile, "USER") == ["kvq"]
