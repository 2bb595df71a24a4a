"""Prefect's server for this machine alone: it answers to the names of loopback, and to whoever knows its secret.

A web page that is open in a browser here can reach loopback too. Whoever may create a deployment runs commands through
the worker, so a page must get nowhere: the secret (`PREFECT_SERVER_API_AUTH_STRING`) is in no cookie that a browser
would add by itself, other origins get no answer that they can read, and a name that was pointed at 127.0.0.1 later
(DNS rebinding) is refused.
"""

import secrets
from typing import Any

HOSTS = ("127.0.0.1", "localhost")


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

    return TrustedHostMiddleware(create_app(final=True), allowed_hosts=HOSTS, www_redirect=False)
