"""Start a Prefect server and a worker on this machine, deploy `flows.yaml` to them, and stop exactly those again.

    python -m pipelines.service up [--webhook URL]
    python -m pipelines.service down

Database, logs and the record of what was started lie in $KVQ_HOME/flows, which its user alone can read. A process is
known by its id and the moment it began, so that an id that the system has reused is left alone; the moment is counted
from the system's start, since clocks are set.

    auth        what every request to the server must know: made when it is started, passed to worker and commands
    hf-token    $HF_TOKEN, which the worker does not have: see kvq_runtime/registry/hub_api.py
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
from filelock import FileLock

from kvq_calib.flow import server as flow_server
from kvq_runtime.disk import files
from kvq_runtime.registry.hub_api import TOKEN_FILE, TOKENS
from kvq_runtime.registry.reference import home

ROOT = Path(__file__).parents[1]
PORT = 4200
GRACE = 20  # seconds
_started: list[subprocess.Popen] = []  # Python complains of one that is forgotten while it runs


def up(port: int = PORT, file: Path = ROOT / "flows.yaml", webhook: str | None = None) -> str:
    """Start what does not run yet, deploy, and return the address of the server.

    Raises RuntimeError where the port is taken by another, or something does not start.
    """
    folder = _folder()
    with FileLock(folder / "lock"):
        url = f"http://127.0.0.1:{port}/api"
        if _running(folder / "server.json") is None:
            if _taken(port):
                raise RuntimeError(f"port {port} is taken by another process; use another: --port, FLOWS_PORT=4300")
            _keep(folder / "auth", flow_server.new_secret())
            _start("server", server_command(port), server_environment(folder, port), folder)
        if not (folder / "auth").exists():
            raise RuntimeError("the server that is running asks for no secret: make flows-down, then make flows-up")
        if not flow_server.wait(url, lambda: _running(folder / "server.json") is not None):
            raise RuntimeError(f"the server did not start: see {folder / 'server.log'}")
        if os.environ.get(TOKENS[0]):
            _keep(folder / "hf-token", os.environ[TOKENS[0]])
        environment = client_environment(folder, url)
        setup = ["-m", "pipelines.service", "deploy", "--file", str(file)]
        given = [sys.executable, *setup] + (["--webhook", webhook] if webhook else [])
        if subprocess.run(given, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL).returncode:
            raise RuntimeError("the deployment failed; what was started runs on: make flows-down stops it")
        if _running(folder / "worker.json") is None:
            worker = ["-m", "prefect", "worker", "start", "--pool", "kvq-gpu", "--type", "process"]
            _start("worker", worker, environment, folder)
    return url


def down() -> list[str]:
    """Stop what `up` started, flows at work included; what was stopped."""
    folder, stopped = _folder(), []
    with FileLock(folder / "lock"):
        for name in ("worker", "server"):
            process = _running(folder / f"{name}.json")
            if process is not None:
                _stop(process)
                stopped.append(name)
            (folder / f"{name}.json").unlink(missing_ok=True)
        for name in ("auth", "hf-token"):
            (folder / name).unlink(missing_ok=True)
    for one in _started:
        one.poll()
    return stopped


def deploy(file: Path, webhook: str | None) -> int:
    """Make the pool of one GPU, deploy a file, define the automations, on the server of PREFECT_API_URL."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.workers.process import ProcessWorker

    from pipelines import automations

    template = ProcessWorker.get_default_base_job_template()
    pool = WorkPoolCreate(name="kvq-gpu", type="process", base_job_template=template, concurrency_limit=1)
    with get_client(sync_client=True) as client:
        client.create_work_pool(pool, overwrite=True)
    automations.define(webhook)
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--prefect-file", str(file), "--all"]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:  # else it only says to start a worker, which is done here
        print(done.stdout, done.stderr, file=sys.stderr)
    return done.returncode


def _folder() -> Path:
    folder = home() / "flows"
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def _keep(path: Path, secret: str) -> None:
    files.replace(path, secret.encode(), path.parent, mode=0o600)


def server_command(port: int) -> list[str]:
    """Return Python's arguments that run the server."""
    idle = flow_server.QUIET["PREFECT_SERVER_API_KEEPALIVE_TIMEOUT"]
    where = ["--host", "127.0.0.1", "--port", str(port), "--timeout-keep-alive", idle, "--log-level", "error"]
    return ["-m", "uvicorn", "--factory", "kvq_calib.flow.server:app", *where]


def server_environment(folder: Path, port: int) -> dict[str, str]:
    """The environment of the server, whose secret is in the folder; it has no token."""
    own = flow_server.server_settings((folder / "auth").read_text(), port)
    return _environment(folder, f"http://127.0.0.1:{port}/api") | own


def client_environment(folder: Path, url: str) -> dict[str, str]:
    """The environment of worker and commands: they know the secret, and where the token is that they do not have."""
    own = {"PREFECT_API_AUTH_STRING": (folder / "auth").read_text(), TOKEN_FILE: str(folder / "hf-token")}
    return _environment(folder, url) | own


def _environment(folder: Path, url: str) -> dict[str, str]:
    dropped = ("PREFECT_API", "PREFECT_SERVER_API", *TOKENS)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    own = {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_API_URL": url, "KVQ_CHECKOUT": str(ROOT)}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return flow_server.QUIET | inherited | own


def _taken(port: int) -> bool:
    return any(
        one.laddr.port == port and one.status == psutil.CONN_LISTEN
        for one in psutil.net_connections("tcp")
        if one.laddr
    )


def _start(name: str, arguments: list[str], environment: dict[str, str], folder: Path) -> None:
    """Start Python apart from this terminal, and note which process it is."""
    with (folder / f"{name}.log").open("ab") as log:
        command = [sys.executable, *arguments]
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    _started.append(process)
    record = {"pid": process.pid, "began": _began(psutil.Process(process.pid))}
    files.save(folder / f"{name}.json", json.dumps(record).encode())


def _running(record: Path) -> psutil.Process | None:
    """The process that was noted, if it still is that one."""
    try:
        noted = json.loads(record.read_text())
        process = psutil.Process(noted["pid"])
        same = _began(process) == noted["began"] and process.status() != psutil.STATUS_ZOMBIE
        return process if same else None
    except (FileNotFoundError, psutil.NoSuchProcess):
        return None


def _began(process: psutil.Process) -> float:
    """Seconds from the system's start to a process's, in hundredths, which is what systems tell."""
    start = psutil.boot_time()
    return round(process.create_time() - start, 2)


def _stop(process: psutil.Process) -> None:
    """End a process and its children: asked first, then killed."""
    family = [process, *process.children(recursive=True)]
    process.terminate()
    psutil.wait_procs([process], GRACE)
    for one in family:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, GRACE)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser("python -m pipelines.service", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=("up", "down", "deploy"))
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help=f"of the server (default {PORT})")
    parser.add_argument("--file", type=Path, default=ROOT / "flows.yaml", help="what to deploy (default flows.yaml)")
    parser.add_argument("--webhook", metavar="URL", help="where failed gates, drift and silence are told")
    args = parser.parse_args()
    try:
        if args.command == "deploy":
            return deploy(args.file, args.webhook)
        if args.command == "up":
            url = up(args.port, args.file, args.webhook)
            page, folder = url.removesuffix("/api"), _folder()
            print(f"{page} shows the flows to whoever knows what is in {folder / 'auth'}: the page asks for it once.")
            print(f"Logs are in {folder}; make flows-down stops both.")
        else:
            print(f"stopped: {', '.join(down()) or 'nothing was running'}")
    except RuntimeError as error:
        print(f"flows: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
