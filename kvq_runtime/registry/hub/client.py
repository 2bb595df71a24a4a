"""Talk to a Hub through `huggingface_hub`: retry transient faults, and turn its errors into ours.

The address is $HF_ENDPOINT, read at every call (the library reads it once, at import). The token is the Hub's usual one
(`hf auth login`, $HF_TOKEN) unless `using` gives another; the library sends it to the Hub and to no other origin. A
server may repeat what it was sent, so the token is removed from every message before it is raised, and the library's
error is not chained to ours.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from kvq_runtime.errors import NotFound
from kvq_runtime.registry.reference import without_secrets

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # what huggingface_hub reads
TOKEN_FILE = "KVQ_HF_TOKEN_FILE"  # names a file with one; where it is not set, or there is none, nothing is done
TRIES = 5
MAX_WAIT = 60.0  # seconds; a longer Retry-After is an error
SILENCE = 60.0  # seconds without a byte of an answer after which a request has failed
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}  # HTTP statuses after which the same request may succeed

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Access:
    """Settings of requests, in the terms of huggingface_hub.

    token              None or True: the usual one; False: none
    cache_dir          where downloads are kept; None: $HF_HUB_CACHE
    local_files_only   make no request
    """

    token: str | bool | None = None
    cache_dir: str | Path | None = None
    local_files_only: bool = False


_USUAL = Access()
_access: ContextVar[Access] = ContextVar("kvq_hub_access", default=_USUAL)


@contextmanager
def using(access: Access) -> Iterator[None]:
    """Make the requests of this thread so, until the block ends."""
    before = _access.set(access)
    try:
        yield
    finally:
        _access.reset(before)


def token() -> str | bool | None:
    """The token of this thread's requests, in the words of huggingface_hub."""
    return _access.get().token


@contextmanager
def publishing() -> Iterator[None]:
    """Set $HF_TOKEN from the file that $KVQ_HF_TOKEN_FILE names, and restore what was there.

    `make flows-up` keeps the token in a file that its user alone can read, and starts the worker without it. What asks
    to write to a registry, or writes, has it for its length; private models and artifacts are read with the token of
    `hf auth login`.
    """
    path = Path(os.environ.get(TOKEN_FILE) or os.devnull)
    token = path.read_text().strip() if path.exists() else ""
    if not token:
        yield
        return
    before = os.environ.get(TOKENS[0])
    os.environ[TOKENS[0]] = token
    try:
        yield
    finally:
        del os.environ[TOKENS[0]]
        if before is not None:
            os.environ[TOKENS[0]] = before


def cache_folder() -> Path:
    """Return huggingface_hub's folder of downloads."""
    from huggingface_hub import constants

    return Path(_access.get().cache_dir or constants.HF_HUB_CACHE).expanduser()


def endpoint() -> str:
    """The Hub's address."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def place() -> str:
    """The Hub's address as messages quote it."""
    return without_secrets(endpoint())


def api() -> "HfApi":
    """Return huggingface_hub's client, for changes. Xet is disabled for other endpoints, which have none.

    The library waits for an answer without end; unless a limit is set, its session gets one. Telemetry is disabled:
    with it, the library asks the Hub which environment variables to look for, and sends what it found.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import get_session

    if urlsplit(endpoint()).hostname not in ("huggingface.co", "hub-ci.huggingface.co"):
        constants.HF_HUB_DISABLE_XET = True
    constants.HF_HUB_DISABLE_TELEMETRY = True
    session = get_session()
    if session.timeout.read is None:
        session.timeout = SILENCE
    return HfApi(endpoint=endpoint(), library_name="kvq", token=token())


def is_offline() -> bool:
    """True if requests are forbidden: by `using`, or by $HF_HUB_OFFLINE now or when the library was imported."""
    from huggingface_hub import is_offline_mode

    if _access.get().local_files_only:
        return True
    return is_offline_mode() or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def check_online(what: str) -> None:
    """Raise the library's OfflineModeIsEnabled if requests are forbidden; `what` is its message."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if is_offline():
        raise OfflineModeIsEnabled(what)


def http_status(error: BaseException) -> int | None:
    """The HTTP status of the response that caused an error; None if there was no response."""
    response = _response(error)
    return None if response is None else response.status_code


def retry_delay(error: BaseException) -> float | None:
    """Seconds to wait before the same request may succeed; None if a retry is useless."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if any(isinstance(cause, OfflineModeIsEnabled) for cause in _chain(error)) or _is_unknown_host(error):
        return None
    status = http_status(error)
    if status in _TRANSIENT:
        return _retry_after(error)
    if status is None and any(_is_network(cause) for cause in _chain(error)):
        return 0.0
    return None


def retry(action: Callable[[], T]) -> T:
    """The action's result; transient faults are retried after 1, 2, 4 and 8 seconds, or as long as the Hub asks."""
    for attempt in range(TRIES):
        try:
            return action()
        except Exception as error:
            delay = retry_delay(error)
            if delay is None or delay > MAX_WAIT or attempt == TRIES - 1:
                raise
            if attempt == 0:
                _log.warning("no answer from the Hub at %s; trying again, %d times in all", place(), TRIES)
            back_off(attempt, delay)
    raise AssertionError("the last try returns or raises")


def back_off(attempt: int, least: float = 0.0) -> None:
    """Wait after failed attempt number `attempt`, from 0: 2^attempt seconds, or `least` if that is more."""
    time.sleep(max(least, 2.0**attempt))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _response(error: BaseException) -> Any:
    """The response that caused an error; None if there was none."""
    return next((found for one in _chain(error) if (found := getattr(one, "response", None)) is not None), None)


def _is_unknown_host(error: BaseException | None) -> bool:
    """True if the address has an unknown host name, which another try will not change."""
    while error is not None:
        if isinstance(error, socket.gaierror):
            return error.errno == socket.EAI_NONAME
        error = error.__cause__ or error.__context__
    return False


def _is_network(error: BaseException) -> bool:
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    transport = {("httpx", "TransportError"), ("httpx2", "TransportError")}
    short = isinstance(error, OSError) and str(error).startswith("Consistency check failed")
    return bool(kinds & transport) or short or isinstance(error, (ConnectionError, TimeoutError))


def _retry_after(error: BaseException) -> float:
    try:
        return float(_response(error).headers.get("Retry-After", 0))
    except ValueError:  # a date
        return 0.0


@contextmanager
def translate_errors(repo: str) -> Iterator[None]:
    """Turn huggingface_hub's errors about a repository into ours, each saying what to do.

    NotFound for what does not exist or is not visible, PermissionError for what is refused, RuntimeError for a Hub or a
    network that fails. Other errors pass through.
    """
    try:
        yield
    except Exception as error:
        translated = _translated(error, repo)
        if translated is None:
            raise
        raise translated from None


def _translated(error: Exception, repo: str) -> Exception | None:
    from huggingface_hub import errors

    code, message = http_status(error), redacted(error)
    chain = list(_chain(error))
    if any(isinstance(cause, errors.GatedRepoError) for cause in chain):
        text = f"{repo} is gated: accept its terms at {place()}/{repo}, then `hf auth login` or set HF_TOKEN"
        return PermissionError(text)
    if any(isinstance(cause, errors.RepositoryNotFoundError) for cause in chain):
        text = "it does not exist, or is private: check the name, then `hf auth login` or set HF_TOKEN"
        return NotFound(f"no artifact {repo.rpartition('/')[2]} at {place()}/{repo}; {text}")
    if any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in chain):
        why = "local_files_only" if _access.get().local_files_only else "HF_HUB_OFFLINE"
        return RuntimeError(f"{repo}: offline ({why}) and not in the cache; run kvq pull once while online")
    if code == 401:
        return PermissionError(f"{repo}: the Hub does not accept the token: `hf auth login`, or set another HF_TOKEN")
    if code == 403:
        return PermissionError(f"{repo}: the token may not do this ({message}); use one with write access")
    if isinstance(error, (errors.RemoteEntryNotFoundError, errors.RevisionNotFoundError)):
        return NotFound(f"{repo}: {message}")
    if code == 429:
        return RuntimeError(f"{repo}: the Hub limits the rate of requests (429); retry in some minutes")
    if _is_unknown_host(error):
        return RuntimeError(f"{repo}: {place()}: no host of this name is found; check the network, or HF_ENDPOINT")
    if code is not None or any(map(_is_network, chain)) or isinstance(error, errors.LocalEntryNotFoundError):
        return RuntimeError(f"{repo}: no answer from the Hub at {place()} after {TRIES} tries: {message}")
    return None


def redacted(error: object) -> str:
    """The first 300 characters of a message, on one line, without the token."""
    from huggingface_hub import get_token

    text, given = " ".join(str(error).split()), _access.get().token
    for token in (given, get_token()):
        if isinstance(token, str) and token:
            text = text.replace(token, "<token>")
    return without_secrets(text)[:300]
