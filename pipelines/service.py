"""Run a Prefect server and a worker on this machine, with the deployments of `flows.yaml`, until Ctrl-C.

    python -m pipelines.service [--webhook URL]

Database, logs and secrets lie in $KVQ_HOME/flows, which its user alone can read. While this runs there are

    auth        what every request to the server must carry: made at the start, passed to worker and commands
    hf-token    $HF_TOKEN, which the worker does not have: only requests to a registry read it
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import psutil

from kvq_calib.flow import server
from kvq_runtime.disk import files
from kvq_runtime.registry.hub_client import TOKEN_FILE, TOKENS
from kvq_runtime.registry.reference import home

ROOT = Path(__file__).parents[1]
PORT = 4200
GRACE = 20  # seconds in which a process may end by itself
STARTUP = 600  # seconds; the first start migrates an empty database
POOL = "kvq-gpu"


def main() -> int:
    """Serve until Ctrl-C or SIGTERM; return 1 if the server or the worker ends before."""
    parser = argparse.ArgumentParser("python -m pipelines.service", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help=f"of the server (default {PORT})")
    parser.add_argument("--file", type=Path, default=ROOT / "flows.yaml", help="what to deploy (default flows.yaml)")
    parser.add_argument("--webhook", metavar="URL", help="where failures and 36 hours without success are reported")
    args = parser.parse_args()
    folder, running = home() / "flows", list[subprocess.Popen]()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        return _serve(args, folder, running)
    except KeyboardInterrupt:
        return 0
    except RuntimeError as error:
        _say(str(error))
        return 1
    finally:
        for process in reversed(running):
            _stop(psutil.Process(process.pid))
        for name in ("auth", "hf-token") if running else ():
            (folder / name).unlink(missing_ok=True)


def _serve(args: argparse.Namespace, folder: Path, running: list[subprocess.Popen]) -> int:
    """Start the server, deploy, start the worker, and wait until one of them ends."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", args.port))
        except OSError:
            raise RuntimeError(f"port {args.port} is taken; use another: --port, FLOWS_PORT=4300") from None
    if not args.file.is_file():
        raise RuntimeError(f"{args.file}: no such file; name what to deploy: --file, FLOWS=~/flows.yaml")
    page = f"http://127.0.0.1:{args.port}"
    _say(f"starting the server, which may take minutes at its first start: {folder / 'server.log'}")
    files.replace(folder / "auth", server.new_secret().encode(), folder, mode=0o600)
    if os.environ.get(TOKENS[0]):
        files.replace(folder / "hf-token", os.environ[TOKENS[0]].encode(), folder, mode=0o600)
    running.append(_start(server_command(args.port), server_environment(folder, args.port), folder / "server.log"))
    wait(f"{page}/api", running[0])
    environment = client_environment(folder, f"{page}/api")
    os.environ.clear()
    os.environ.update(environment)  # read when prefect is imported
    _say(f"deploying {args.file}")
    deploy(args.file.absolute(), args.webhook)
    _say(f"starting the worker: {folder / 'worker.log'}")
    command = ["worker", "start", "--pool", POOL, "--type", "process"]
    running.append(_start(command, environment, folder / "worker.log"))
    print(f"{page} shows the flows, and asks once for what is in {folder / 'auth'}. Ctrl-C stops.", flush=True)
    while all(process.poll() is None for process in running):
        time.sleep(1)
    raise RuntimeError(f"server or worker ended: see the logs in {folder}")


def _say(text: str) -> None:
    print(f"flows: {text}", file=sys.stderr, flush=True)


def deploy(file: Path, webhook: str | None) -> None:
    """Make the pool of one GPU, deploy a file, define the automations, on the server of PREFECT_API_URL.

    No worker is alive: what an earlier one left pending, running or cancelling is crashed.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.states import Crashed
    from prefect.workers.process import ProcessWorker

    from pipelines import automations

    template = ProcessWorker.get_default_base_job_template()
    pool = WorkPoolCreate(name=POOL, type="process", base_job_template=template, concurrency_limit=1)
    with get_client(sync_client=True) as client:
        client.create_work_pool(pool, overwrite=True)
        automations.define(webhook)
        begun = FlowRunFilter.model_validate({"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}})
        for run in client.read_flow_runs(flow_run_filter=begun):
            died = Crashed(message="Its process ended with the service. A retry resumes.")
            client.set_flow_run_state(run.id, died, force=True)  # else none but Cancelled follows Cancelling
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--prefect-file", str(file), "--all"]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the deployment of {file} failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def server_command(port: int) -> list[str]:
    """Return the arguments of `prefect` that run the server."""
    return ["server", "start", "--host", "127.0.0.1", "--port", str(port)]


def server_environment(folder: Path, port: int) -> dict[str, str]:
    """Return the environment of the server: the secret of the folder, and no token of the Hub."""
    origins = ",".join(f"http://{host}:{port}" for host in ("127.0.0.1", "localhost"))
    own = {"PREFECT_SERVER_API_AUTH_STRING": (folder / "auth").read_text()}
    own["PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"] = origins
    return _environment(folder, f"http://127.0.0.1:{port}/api") | own


def client_environment(folder: Path, url: str) -> dict[str, str]:
    """Return the environment of worker and commands: the secret, and the path of the token's file."""
    own = {"PREFECT_API_AUTH_STRING": (folder / "auth").read_text(), TOKEN_FILE: str(folder / "hf-token")}
    return _environment(folder, url) | own


def _environment(folder: Path, url: str) -> dict[str, str]:
    dropped = ("PREFECT_API", "PREFECT_SERVER_API", *TOKENS)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    own = {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_API_URL": url, "KVQ_CHECKOUT": str(ROOT)}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return server.QUIET | inherited | own


def _start(arguments: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen:
    """Start `prefect` apart from this terminal's Ctrl-C."""
    command = [sys.executable, "-m", "prefect", *arguments]
    with log.open("ab") as out:
        return subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


def wait(url: str, process: subprocess.Popen) -> None:
    """Wait until a server answers; raise RuntimeError if it ends, or does not answer in time."""
    opener, until = build_opener(ProxyHandler({})), time.monotonic() + STARTUP
    while process.poll() is None and time.monotonic() < until:
        try:
            with opener.open(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError("the server did not start: see server.log")


def _stop(process: psutil.Process) -> None:
    """End a process and its children: terminate it, then kill what is left."""
    family = [process, *process.children(recursive=True)]
    process.terminate()
    psutil.wait_procs([process], GRACE)
    for one in family:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, GRACE)


if __name__ == "__main__":
    sys.exit(main())
