"""Settings of Prefect in kvq, and Prefect's own temporary server for a process without one. Imports no prefect.

Whoever may ask a server can make it run commands through its workers, and a web page that is open in a browser here
reaches loopback too. Servers therefore demand a secret, which no browser adds by itself, and allow no other origin.
"""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

# no telemetry, no unused blocks, errors alone in logs; runs send heartbeats; patience in seconds: a late answer is not
# lost, and the server closes no connection into which a client is sending
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_SERVER_LEVEL": "ERROR",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_API_REQUEST_TIMEOUT": "600",
    "PREFECT_SERVER_API_KEEPALIVE_TIMEOUT": "600",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "600",
}


def apply_settings() -> None:
    """Set QUIET in the environment, except what the user has set; call it before prefect is imported."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


def new_secret() -> str:
    """Make a secret for the clients of a server, in Prefect's form user:password."""
    return f"kvq:{secrets.token_urlsafe(32)}"


@contextmanager
def temporary_server() -> Iterator[str]:
    """Use a server that ends with this process, with a database of its own; yields the address of its API."""
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    url, secret = _start()
    with temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: secret}):
        yield url


@cache
def _start() -> tuple[str, str]:
    """Start the server of this process; return its address and secret. Prefect stops it at exit."""
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import PREFECT_HOME, PREFECT_SERVER_API_AUTH_STRING, temporary_settings
    from prefect.settings import PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS as ORIGINS

    folder, secret = tempfile.TemporaryDirectory(prefix="kvq-prefect-"), new_secret()
    _folders.append(folder)
    settings: dict[Any, str] = {
        PREFECT_HOME: folder.name,
        PREFECT_SERVER_API_AUTH_STRING: secret,
        ORIGINS: "http://127.0.0.1",
    }
    with temporary_settings(settings):
        server = SubprocessASGIServer()
        server.start()
    return server.api_url, secret


_folders: list[tempfile.TemporaryDirectory] = []  # deleted when this process ends
