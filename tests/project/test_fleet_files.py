"""The files of docs/fleet are accepted by the tools that read them, and run commands that exist.

No cluster is asked: Kubernetes' own schemas check its objects, SkyPilot itself its task, Debian's sbatch the options of
a job, up to where it would ask its controller. What a file runs is run, beside programs that only note their words.
"""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from kvq_calib.cli import calibrate
from kvq_runtime.recipe import presets

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "fleet"
SLURM, SKYPILOT = ROOT / "build" / "slurm", ROOT / "build" / "skypilot"  # by make schedulers
JOB, WORKER = "kubernetes-job.yaml", "kubernetes-worker.yaml"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.sh"))
# Of sbatch, by the manual page of Slurm 22.05.
OPTIONS = {"array", "cpus-per-task", "gpus", "gpus-per-node", "job-name", "mem", "nodes", "ntasks-per-node",
           "open-mode", "output", "requeue", "signal", "time"}  # fmt: skip
LIST = "- model: demo\n  recipe: aqua-2bit\n- model: demo\n  recipe: aqua-3bit\n"
NOTE = """#!{python}
import json, os, sys
names = "KVQ_", "PREFECT_", "RAY_", "HF_", "SRUN_"
kept = {{name: value for name, value in os.environ.items() if name.startswith(names)}}
with open({file!r}, "a") as file:
    print(json.dumps([{name!r}, sys.argv[1:], kept]), file=file)
"""


def objects(name: str) -> dict[str, dict]:
    """{kind: object} of a file of Kubernetes."""
    return {one["kind"]: one for one in yaml.safe_load_all((FOLDER / name).read_text())}


def pod(name: str) -> dict:
    """What the pods of a file are."""
    found = objects(name)
    return (found.get("Job") or found["Deployment"])["spec"]["template"]["spec"]


def task() -> dict:
    return yaml.safe_load((FOLDER / "skypilot.yaml").read_text())


def run(folder: Path, script: str, **environment: str) -> list[tuple[str, list[str], dict[str, str]]]:
    """(program, words, environment) of what a script of bash runs, in a home with a checkout, in the order of starting.

    Programs of its .venv, of the path, and of SkyPilot's own environment only note their words; srun runs a program.
    """
    programs = ("kvq-calibrate", "prefect", "ray", "uv", "sleep", "hostname")
    notes, places = folder / "notes", [folder / "bin", folder / "kvq" / ".venv" / "bin", folder / "kvq-env" / "bin"]
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
        for name in programs:
            (place / name).write_text(NOTE.format(python=sys.executable, file=str(notes), name=name))
            (place / name).chmod(0o755)
    (folder / "bin" / "hostname").write_text("#!/bin/sh\necho node1\n")
    (folder / "bin" / "srun").write_text('#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n')
    (folder / "bin" / "srun").chmod(0o755)
    (folder / "kvq" / "list.yaml").write_text(LIST)
    for secret in (".kvq-prefect-auth", ".kvq-hf-token"):
        (folder / secret).write_text("user:secret\n")
    notes.write_text("")
    path = f"{folder / 'bin'}:/usr/bin:/bin"
    given = {"PATH": path, "HOME": str(folder), "SCRATCH": str(folder / "scratch"), **environment}
    done = subprocess.run(
        ["bash", "-c", script + "\nwait"], cwd=folder / "kvq", env=given, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in notes.read_text().splitlines() if not line.startswith('["sleep"')]


def of_kubernetes(folder: Path, name: str, **environment: str) -> tuple[str, list[str], dict[str, str]]:
    """What a container's command runs, with the variables that the file gives it."""
    (container,) = pod(name)["containers"]
    given = {one["name"]: one.get("value", "secret") for one in container["env"]}
    words = shlex.join([*container["command"], *container.get("args", [])])
    (found,) = run(folder, words, **given, **environment)
    return found


def entry(words: list[str], folder: Path, text: str, capsys) -> str:
    """The command of the entry that a command line of kvq-calibrate chooses of this list."""
    (folder / "list.yaml").write_text(text)
    words = [str(folder / "list.yaml") if word.endswith("list.yaml") else word for word in words]
    assert calibrate.main([*words, "--commands"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return line.removeprefix("kvq-calibrate ")


@pytest.fixture(scope="module")
def kubernetes():
    try:
        return importlib.import_module("kubernetes_validate")
    except ImportError:
        assert "CI" not in os.environ, "kubernetes-validate is not there: make env"
        pytest.skip("Kubernetes' schemas are in the extra dev: make env")


@pytest.mark.parametrize("version", ["1.33", "1.37"])
@pytest.mark.parametrize("name", [JOB, WORKER])
def test_kubernetes_schemas_accept_each_object(name: str, version: str, kubernetes):
    for one in objects(name).values():
        try:
            kubernetes.validate(one, version, strict=True)
        except kubernetes.ValidationError as error:  # whose text is the schema's, all of it
            pytest.fail(f"{name}: {one['kind']} {'.'.join(map(str, error.path))}: {error.message:.500}")


def test_kubernetes_schemas_refuse_a_wrong_field(kubernetes):
    job = objects(JOB)["Job"]
    job["spec"]["completionsMode"] = job["spec"].pop("completionMode")
    with pytest.raises(kubernetes.ValidationError, match="completionsMode"):
        kubernetes.validate(job, "1.37", strict=True)


@pytest.mark.parametrize("name", [JOB, WORKER])
def test_names_within_a_file_of_kubernetes_agree(name: str):
    text, spec = (FOLDER / name).read_text(), pod(name)
    (container,) = spec["containers"]
    volumes = {one["name"]: one for one in spec["volumes"]}
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert mounts.keys() == volumes.keys()
    made = dict(re.findall(r"kubectl create secret generic (\S+) --from-file=(\w+)=", text))
    asked = [one["valueFrom"]["secretKeyRef"] for one in container["env"] if "valueFrom" in one]
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert values["KVQ_HF_TOKEN_FILE"] == f"{mounts['hf']}/{made[volumes['hf']['secret']['secretName']]}"
    assert {one["name"]: one["key"] for one in asked}.items() <= made.items()
    assert len(made) == len(asked) + 1
    assert all(values[one].startswith(mounts["shared"]) for one in ("KVQ_HOME", "HF_HOME"))


def test_labels_of_the_workers_are_what_the_deployment_selects():
    spec = objects(WORKER)["Deployment"]["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    (limit,) = re.findall(r"set-concurrency-limit kvq-gpu (\d+)", (FOLDER / WORKER).read_text())
    assert int(limit) == spec["replicas"]


def test_a_job_of_kubernetes_does_an_entry_for_each_index(tmp_path: Path, capsys):
    found = objects(JOB)
    text, spec = found["ConfigMap"]["data"]["list.yaml"], found["Job"]["spec"]
    entries = yaml.safe_load(text)
    assert spec["completions"] == len(entries) >= spec["parallelism"] and spec["completionMode"] == "Indexed"
    (volume,) = [one for one in pod(JOB)["volumes"] if "configMap" in one]
    assert volume["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]
    commands = []
    for index in range(spec["completions"]):
        program, words, given = of_kubernetes(tmp_path, JOB, JOB_COMPLETION_INDEX=str(index))
        assert program == "kvq-calibrate" and "/models/list.yaml" in words and given["KVQ_REGISTRY"] == "hf://my-org"
        commands.append(entry(words, tmp_path, text, capsys))
    assert commands == [
        "--device cuda --model qwen2.5-7b",
        "--device cuda --model Qwen/Qwen3-8B --recipe aqua-2bit --recipe aqua-fisher-2bit",
    ]
    assert {one for each in entries if isinstance(each, dict) for one in each["recipe"]} <= set(presets())


def test_a_job_of_an_array_of_slurm_does_the_entry_of_its_number(tmp_path: Path, capsys):
    script = (FOLDER / "slurm-array.sh").read_text()
    ((program, words, given),) = run(tmp_path, script, SLURM_ARRAY_TASK_ID="2")
    assert program == "kvq-calibrate" and given["KVQ_HOME"] == f"{tmp_path}/scratch/kvq"
    assert Path(given["KVQ_HF_TOKEN_FILE"]).exists()
    assert entry(words, tmp_path, LIST, capsys) == "--device cuda --model demo --recipe aqua-3bit"


@pytest.mark.parametrize(("rank", "chosen", "recipe"), [
    ("0", "", "aqua-2bit"), ("1", "", "aqua-3bit"), ("0", "2", "aqua-3bit"),
])  # fmt: skip
def test_a_job_of_skypilot_does_the_entry_of_its_rank_or_the_chosen_one(rank, chosen, recipe, tmp_path: Path, capsys):
    envs = {**task()["envs"], "ENTRY": chosen, "HF_TOKEN": "hf_token", "SKYPILOT_JOB_RANK": rank}
    ((program, words, given),) = run(tmp_path, task()["run"], **envs)
    assert program == "kvq-calibrate" and given["KVQ_REGISTRY"] == "hf://my-org"
    assert entry(words, tmp_path, LIST, capsys) == f"--device cuda --model demo --recipe {recipe}"


def test_skypilot_installs_extras_that_there_are(tmp_path: Path):
    (_, made, _), (_, words, _) = run(tmp_path, task()["setup"])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert made[0] == "venv" and made[-1] == f"{tmp_path}/kvq-env" == words[words.index("--python") + 1]
    assert (ROOT / words[words.index("--constraint") + 1]).exists()
    assert set(re.fullmatch(r"\.\[(.+)\]", words[-1])[1].split(",")) <= set(extras)


@pytest.mark.slow
@pytest.mark.parametrize("name", [WORKER, "slurm-worker.sh"])
def test_a_worker_is_started_by_a_command_of_prefect(name: str, tmp_path: Path):
    worker = pytest.importorskip("prefect.cli.worker", reason="Prefect is in the extra flows: make env")
    if name == WORKER:
        program, words, given = of_kubernetes(tmp_path, name)
    else:
        ((program, words, given),) = run(tmp_path, (FOLDER / name).read_text())
        assert given["PREFECT_API_AUTH_STRING"] == "user:secret" and given["KVQ_CHECKOUT"] == f"{tmp_path}/kvq"
    assert program == "prefect" and words[0] == "worker"
    bound = worker.worker_app.parse_args(words[1:], exit_on_error=False, print_error=False)[1]
    assert bound.kwargs == {"work_pool_name": "kvq-gpu", "worker_type": "process"}
    assert {"KVQ_HOME", "KVQ_CHECKOUT", "KVQ_HF_TOKEN_FILE", "PREFECT_API_URL"} <= given.keys()


@pytest.mark.slow
def test_nodes_of_slurm_join_ray_and_one_calibrates(tmp_path: Path):
    ray = pytest.importorskip("ray.scripts.scripts", reason="Ray is in the extra scale: make env")
    found = run(tmp_path, (FOLDER / "slurm-ray.sh").read_text(), SLURM_JOB_NUM_NODES="4", SLURM_CPUS_PER_TASK="64")
    starts = [words for program, words, _ in found if program == "ray"]
    assert all(given["SRUN_CPUS_PER_TASK"] == "64" for program, _, given in found if program == "ray")
    assert len(starts) == 2 and all(words[0] == "start" for words in starts)
    parsed = [ray.start.make_context("start", words[1:]).params for words in starts]
    assert {one["port"] for one in parsed if one["head"]} == {6379}
    assert [one["address"] for one in parsed if not one["head"]] == ["node1:6379"]
    ((words, given),) = [(words, given) for program, words, given in found if program == "kvq-calibrate"]
    assert calibrate.parser().parse_args(words).workers == 32 and given["RAY_ADDRESS"] == "node1:6379"


@pytest.mark.slow
def test_what_a_file_runs_can_be_done(tmp_path: Path, capsys):
    """The array's command, up to where it would fit, for a CPU and a registry of this machine."""
    ((_, words, _),) = run(tmp_path, (FOLDER / "slurm-array.sh").read_text(), SLURM_ARRAY_TASK_ID="2")
    words = [str(tmp_path / "kvq" / "list.yaml") if word == "list.yaml" else word for word in words]
    assert calibrate.main([*words, "--device", "cpu", "--dry-run"]) == 0
    assert re.search(r"^demo +aqua-3bit ", capsys.readouterr().out, re.MULTILINE)


def test_variables_that_files_set_are_read():
    read = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "commands.md").read_text()))
    for path in FOLDER.iterdir():
        named = set(re.findall(r"\b(KVQ_[A-Z_]*[A-Z])\b", path.read_text()))
        assert named and named <= read, f"{path.name} sets {named - read}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_reads_a_script_of_slurm(name: str):
    done = subprocess.run(["bash", "-n", str(FOLDER / name)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    given = re.findall(r"^#SBATCH (.*)$", (FOLDER / name).read_text(), re.MULTILINE)
    assert given and {re.match(r"--([\w-]+)", line)[1] for line in given} <= OPTIONS


def asked(program: str, *words: str) -> str:
    """What a command of Slurm says, of a cluster whose controller nothing answers for."""
    if not (SLURM / program).is_file():
        pytest.skip(f"Slurm's {program} is not here, for the tests of docs/fleet: make schedulers")
    done = subprocess.run([SLURM / program, *words], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    return done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_sbatch_takes_the_options_of_a_script(name: str, tmp_path: Path):
    """It says that there is no controller after it has read all options."""
    assert "Unable to contact slurm controller" in asked("sbatch", "--test-only", str(FOLDER / name))
    wrong = tmp_path / name
    for old, new in (("--time=", "--times="), ("--time=", "--time=long")):
        wrong.write_text((FOLDER / name).read_text().replace(f"#SBATCH {old}", f"#SBATCH {new}"))
        assert "controller" not in asked("sbatch", "--test-only", str(wrong))


def test_srun_takes_the_options_of_a_script():
    script = (FOLDER / "slurm-ray.sh").read_text().replace("$others", "3").replace("$head", "node1")
    lines = re.findall(r"^srun ((?:--\S+ )+)", script, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        assert "Unable to contact slurm controller" in asked("srun", *shlex.split(line), "true")
    assert "controller" not in asked("srun", "--node-list=node1", "true")


ASK_SKYPILOT = """
import json, sys
import click, yaml
import sky
from sky.client.cli import command
from sky.serve import serve_utils
given = yaml.safe_load(open(sys.argv[1]))
task = sky.Task.from_yaml_config(dict(given), secrets_overrides=[("HF_TOKEN", "hf_token")])
serve_utils.validate_service_task(task, pool=True)
try:
    sky.Task.from_yaml_config({**given, "runs": ""})
except Exception as error:
    print(json.dumps(str(error)))
for line in open(sys.argv[1]):
    if line.startswith("#   sky "):
        one, words = command.cli, line.split()[2:]
        while isinstance(one, click.Group):
            one = one.get_command(click.Context(one), words.pop(0))
        print(json.dumps([one.name, one.make_context(one.name, words).params], default=str))
"""


@pytest.mark.slow
def test_skypilot_takes_the_task_the_pool_and_the_commands(tmp_path: Path):
    if not (SKYPILOT / ".installed").exists():
        pytest.skip("SkyPilot is not here, for the tests of docs/fleet: make schedulers")
    path = str(FOLDER / "skypilot.yaml")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": str(SKYPILOT),
        "HF_TOKEN": "hf_token",
    }
    environment["SKYPILOT_DISABLE_USAGE_COLLECTION"] = "1"
    done = subprocess.run([sys.executable, "-c", ASK_SKYPILOT, path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    refused, *commands = [json.loads(line) for line in done.stdout.splitlines() if line[:1] in '["']
    assert "did you mean 'run'" in refused
    assert [name for name, _ in commands] == ["launch", "apply", "launch", "down", "launch"]
    (own, pool, shared, _, one) = [params for _, params in commands]
    assert (
        own["num_jobs"] == shared["num_jobs"] == 2 and own["pool"] is None and shared["pool"] == pool["pool"] == "kvq"
    )
    assert one["env"] == [["ENTRY", "2"]] and all(each["secret"] == [["HF_TOKEN", "hf_token"]] for each in (own, one))
