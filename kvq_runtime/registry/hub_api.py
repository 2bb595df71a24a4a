"""Call a Hub through huggingface_hub's HfApi: bounded, retried, and with errors of our own.

The Hub is not trusted. Answers are limited in bytes and in time, the token is sent to no other origin, and, since a
server may repeat what it was sent, the token is removed from every message. The library's error is not chained to ours.

The address is $HF_ENDPOINT, read at every call. The token is that of the file named by $KVQ_HF_TOKEN_FILE, which
`make flows-up` sets so that the worker's environment has no token, else the usual one (`hf auth login`, $HF_TOKEN).
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextvars import copy_context
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from kvq_runtime.errors import Conflict, NotFound, Unanswered
from kvq_runtime.registry.reference import without_secrets

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # variables that huggingface_hub reads
TOKEN_FILE = "KVQ_HF_TOKEN_FILE"
LIBRARY = "kvq-registry"  # marks our requests by their user agent
TRIES = 5
MAX_WAIT = 60.0  # seconds; a longer Retry-After is an error
SILENCE = 60.0  # seconds without a byte of an answer after which a request has failed
RATE = 4096  # bytes a second, the least on the whole
ANSWER = 16 << 20  # bytes of an answer of the API
_TRANSIENT = {408, 425, 500, 502, 503, 504}  # HTTP statuses after which the same request may succeed
_CHECK = "check HF_ENDPOINT, and what stands between it and this machine"

T = TypeVar("T")
_log = logging.getLogger(__name__)


def endpoint() -> str:
    """Return the Hub's address."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def address() -> str:
    """Return the Hub's address as messages quote it."""
    return without_secrets(endpoint())


def token() -> str | None:
    """Return the token of our requests."""
    from huggingface_hub import get_token

    path = Path(os.environ.get(TOKEN_FILE) or os.devnull)
    return (path.read_text().strip() if path.exists() else "") or get_token()


def is_offline() -> bool:
    """Return True if $HF_HUB_OFFLINE forbids requests, now or when huggingface_hub was imported."""
    from huggingface_hub import is_offline_mode

    return is_offline_mode() or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def check_online(what: str) -> None:
    """Raise RuntimeError if requests are forbidden; `what` begins the message."""
    if is_offline():
        raise RuntimeError(f"{what}: offline (HF_HUB_OFFLINE) and not in the cache; run kvq pull once while online")


def call(what: str, action: Callable[["HfApi"], T], repeatable: bool = True, uploaded: int = 0) -> T:
    """Return the result of an action on the Hub.

    what         begins messages: org/name
    repeatable   retry after any transient failure; else only if the request was certainly not carried out
    uploaded     bytes that the action sends, for which the time limit grows
    Raises NotFound for what does not exist or is not visible, PermissionError for what is refused, Conflict for a
    commit whose parent is not the head, Unanswered if nobody knows the outcome, RuntimeError for other failures.
    """
    check_online(what)
    late = f"the Hub at {address()} took too long; {_CHECK}"
    return retried(what, lambda: within(2 * SILENCE + uploaded / RATE, lambda: action(_api()), late), repeatable)


def retried(what: str, action: Callable[[], T], repeatable: bool = True) -> T:
    """Return the action's result; failures are retried and translated as in `call`."""
    for attempt in range(TRIES):
        try:
            return action()
        except Exception as error:
            wait = _retry_after(error, repeatable)
            if wait is None or wait > MAX_WAIT or attempt == TRIES - 1:
                translated = _translated(error, what)
                raise (translated or error) from None
            if attempt == 0:
                _log.warning("no answer from the Hub at %s; trying again, %d times in all", address(), TRIES)
            time.sleep(max(wait, 2.0**attempt))
    raise AssertionError("the last try returns or raises")


def within(seconds: float, action: Callable[[], T], late: str) -> T:
    """Return the result of an action; Unanswered with the text `late` if it takes longer, and its thread is left.

    A limit for each read would not end headers that come one by one.
    """
    results: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def act() -> None:
        try:
            results.put((action(), None))
        except BaseException as error:
            results.put((None, error))

    Thread(target=copy_context().run, args=(act,), daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except Empty:
        raise Unanswered(late) from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


# ---- the library -----------------------------------------------------------------------------------------------------


def _api() -> "HfApi":
    """Return huggingface_hub's client. Telemetry is disabled, with which it would ask the Hub for names of environment
    variables and send their values; so is Xet for endpoints that have none."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import get_session

    if urlsplit(endpoint()).hostname not in ("huggingface.co", "hub-ci.huggingface.co"):
        constants.HF_HUB_DISABLE_XET = True
    constants.HF_HUB_DISABLE_TELEMETRY = True
    session = get_session()
    if session.timeout.read is None:  # the library waits without end
        session.timeout = SILENCE
    hooks = session.event_hooks
    if _check_origin not in hooks["request"]:
        session.event_hooks = {
            "request": [*hooks["request"], _check_origin],
            "response": [*hooks["response"], _read_bounded],
        }
    return HfApi(endpoint=endpoint(), library_name=LIBRARY, token=token() or False)


def _check_origin(request: Any) -> None:
    """Refuse to send our token to another origin, as by the address of a list's next page."""
    origin = urlsplit(str(request.url)), urlsplit(endpoint())
    ours = LIBRARY in request.headers.get("user-agent", "") and "authorization" in request.headers
    if ours and len({(part.scheme, part.hostname, part.port) for part in origin}) > 1:
        raise RuntimeError(f"the Hub at {address()} names another address, which gets no token; {_CHECK}")


def _read_bounded(response: Any) -> None:
    """Read an answer to one of our requests; RuntimeError if it has more than ANSWER bytes."""
    if LIBRARY not in response.request.headers.get("user-agent", "") or hasattr(response, "_content"):
        return
    content = bytearray()
    for chunk in response.iter_bytes():
        content += chunk
        if len(content) > ANSWER:
            raise RuntimeError(f"the Hub at {address()} sends more than the {ANSWER} bytes that are allowed; {_CHECK}")
    response._content = bytes(content)


# ---- errors ----------------------------------------------------------------------------------------------------------


def redacted(error: object) -> str:
    """Return the first 300 characters of a message, on one line, without the token."""
    text, secret = " ".join(str(error).split()), token()
    return without_secrets(text.replace(secret, "<token>") if secret else text)[:300]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _response(error: BaseException) -> Any:
    return next((found for cause in _chain(error) if (found := getattr(cause, "response", None)) is not None), None)


def _is_network(error: BaseException) -> bool:
    kinds = {(kind.__module__.partition(".")[0].rstrip("2"), kind.__name__) for kind in type(error).__mro__}
    return ("httpx", "TransportError") in kinds or isinstance(error, (ConnectionError, TimeoutError))


def _retry_after(error: BaseException, repeatable: bool) -> float | None:
    """Return the seconds to wait before the same request may succeed; None if it should not be repeated."""
    response = _response(error)
    if response is not None and (response.status_code == 429 or (repeatable and response.status_code in _TRANSIENT)):
        try:
            return float(response.headers.get("Retry-After", 0))
        except ValueError:  # a date
            return 0.0
    lost = response is None and any(map(_is_network, _chain(error)))
    return 0.0 if repeatable and lost else None


def _translated(error: Exception, what: str) -> Exception | None:
    from huggingface_hub import errors

    response, message, hub = _response(error), redacted(error), f"the Hub at {address()}"
    status = None if response is None else response.status_code
    if isinstance(error, (Unanswered, NotFound, Conflict)):
        return None
    if isinstance(error, errors.GatedRepoError):
        text = f"{what} is gated: accept its terms at {address()}/{what}, then `hf auth login` or set HF_TOKEN"
        return PermissionError(text)
    if isinstance(error, errors.RepositoryNotFoundError):
        text = "it does not exist, or is private: check the name, then `hf auth login` or set HF_TOKEN"
        return NotFound(f"no artifact {what.rpartition('/')[2]} at {address()}/{what}; {text}")
    if status == 401:
        return PermissionError(f"{what}: the Hub does not accept the token: `hf auth login`, or set another HF_TOKEN")
    if status == 403:
        return PermissionError(f"{what}: the token may not do this ({message}); use one with write access")
    if status == 404:
        return NotFound(f"{what}: {message}")
    if status in (409, 412):
        return Conflict(f"{what}: somebody changed it first; retry")
    if status == 429:
        return RuntimeError(f"{what}: the Hub limits the rate of requests (429); retry in some minutes")
    if status is not None or any(map(_is_network, _chain(error))):
        text = f"{what}: no answer from {hub} after {TRIES} tries: {message}"
        return Unanswered(f"{text}; check the network, or HF_ENDPOINT")
    if isinstance(error, (AttributeError, KeyError, TypeError, ValueError)):
        return RuntimeError(f"{what}: {hub} gave an answer of another form ({message}); check HF_ENDPOINT")
    return None
