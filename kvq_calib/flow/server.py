"""Start a Prefect server for the length of a process that has none; keep servers from others.

The server reads a pipe that only its parent can write to. Whatever way the parent ends, kill -9 included, the pipe
closes; the server then ends and deletes its folder. Several at once share nothing.

Servers answer to the names of loopback, and to whoever knows their secret. A web page that is open in a browser here
can reach loopback too, and whoever may create a deployment runs commands through the worker, so a page must get
nowhere: the secret (`PREFECT_SERVER_API_AUTH_STRING`) is in no cookie that a browser would add by itself, other origins
get no answer that they can read, and a name that was pointed at 127.0.0.1 later (DNS rebinding) is refused.
"""

import atexit
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

HOSTS = ("127.0.0.1", "localhost")
STARTUP = 600  # seconds; the first start on a busy machine migrates an empty database in some 20
GRACE = 5  # seconds in which a server may end by itself
# no telemetry, no blocks that nobody uses, no word but errors, no bars in logs; and patience, in seconds, since what is
# asked again is done twice: an answer that is late is not lost, and a client that closes its idle connections itself,
# after 25 s, sends nothing into one that the server is closing
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_SERVER_LEVEL": "ERROR",
    "PREFECT_API_REQUEST_TIMEOUT": "600",
    "PREFECT_SERVER_API_KEEPALIVE_TIMEOUT": "600",
}
_running: list[tuple[subprocess.Popen[str], Path]] = []


def new_secret() -> str:
    """Make a secret for clients, in the form of Prefect: user:password."""
    return f"kvq:{secrets.token_urlsafe(32)}"


def server_settings(secret: str, port: int | None = None) -> dict[str, str]:
    """The environment of a server that asks for the secret.

    port   whose pages may ask; None: those of none
    """
    origins = [f"http://{host}:{port}" for host in HOSTS] if port else ["http://127.0.0.1"]
    return {"PREFECT_SERVER_API_AUTH_STRING": secret, "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ",".join(origins)}


def app() -> Any:
    """Prefect's server as an ASGI application that other names of its address do not reach."""
    from prefect.server.api.server import create_app
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    one_writer()
    return TrustedHostMiddleware(create_app(final=True), allowed_hosts=HOSTS, www_redirect=False)


def one_writer() -> None:
    """Let each transaction on an SQLite database take its lock as it begins, where SQLite waits for it.

    Prefect's own read first. If another has written since, their write fails at once, with "database is locked": the
    server then evaluates an event again, and tells of it again, or, after three times, drops it.
    """
    from prefect.server.database import configurations, dependencies
    from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL

    class OneWriter(configurations.AioSqliteConfiguration):
        def begin_transaction(self, session, with_for_update=False):
            return super().begin_transaction(session, with_for_update=True)

    url = PREFECT_API_DATABASE_CONNECTION_URL.value()
    if url and url.startswith("sqlite"):
        dependencies.set_database_config(OneWriter(url))


@cache
def secret() -> str:
    """Make the secret that the clients of this process's server need."""
    return new_secret()


@cache
def address() -> str:
    """The API of this process's server, started when it is first asked for; it asks for `secret`.

    Raises RuntimeError with the server's output if it does not start.
    """
    home = Path(tempfile.mkdtemp(prefix="kvq-prefect-"))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    with (home / "server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "kvq_calib.flow.server", str(home)],
            env=inherited
            | QUIET
            | server_settings(secret())
            | {"PREFECT_HOME": str(home), "PREFECT_UI_ENABLED": "false", "PREFECT__SERVER_EPHEMERAL": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C is for the run, which tells the server what became of it
        )
    _running.append((server, home))
    assert server.stdout is not None
    port = server.stdout.readline().strip()
    url = f"http://127.0.0.1:{port}/api"
    if not port or not wait(url, lambda: server.poll() is None):
        said = (home / "server.log").read_text()[-2000:] if home.exists() else ""
        stop()
        raise RuntimeError(f"the Prefect server did not start; it said: {said or 'nothing'}. Leave out --prefect")
    return url


def wait(url: str, alive) -> bool:
    """Wait until a server answers; False if it ends, or does not answer in time."""
    ask, until = build_opener(ProxyHandler({})), time.monotonic() + STARTUP
    while alive() and time.monotonic() < until:
        try:
            with ask.open(f"{url}/health", timeout=5):
                return True
        except (URLError, OSError):
            time.sleep(0.2)
    return False


@atexit.register  # before prefect's own, which is imported later and so ends first
def stop() -> None:
    """End what `address` started, and wait for it."""
    while _running:
        server, home = _running.pop()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.close()
        try:
            server.wait(2 * GRACE)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        server.stdout.close()
        _remove(home)
    address.cache_clear()


def _remove(home: Path) -> None:
    """Delete a folder in which another process may still be making files."""
    for _ in range(100):
        shutil.rmtree(home, ignore_errors=True)
        if not home.exists():
            return
        time.sleep(0.05)


def main(home: Path) -> None:
    """Serve until standard input ends."""
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    idle = int(os.environ["PREFECT_SERVER_API_KEEPALIVE_TIMEOUT"])
    server = uvicorn.Server(
        uvicorn.Config(app, factory=True, log_level="error", lifespan="on", timeout_keep_alive=idle)
    )

    def follow() -> None:
        sys.stdin.read()
        server.should_exit = True
        time.sleep(GRACE)
        _remove(home)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    print(listening.getsockname()[1], flush=True)
    server.run(sockets=[listening])
    _remove(home)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
