"""Talk to a Hub that is not trusted: through huggingface_hub's HfApi, and by one function that receives files.

Answers and files are limited in bytes and in time. The token is sent to no other origin and removed from every message,
since a server may repeat what it was sent; the library's error is not chained to ours. No path comes from a server: a
file is cached under the digest of its received bytes, and discarded if that is not the expected one.

    $KVQ_HOME/hub/blobs/<sha256>            files of any repository
    $KVQ_HOME/hub/heads/<org>/<name>.json   the last known head of main: commit, files and kvq.json

The address is $HF_ENDPOINT, read at every call. The token is that of the file named by $KVQ_HF_TOKEN_FILE, which
`make flows-up` sets so that the worker's environment has no token, else the usual one (`hf auth login`, $HF_TOKEN).
"""

import hashlib
import io
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar
from urllib.parse import quote, urlsplit

from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError, Conflict, NotFound, Unanswered
from kvq_runtime.registry import reference
from kvq_runtime.registry.reference import without_secrets

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # variables that huggingface_hub reads
TOKEN_FILE = "KVQ_HF_TOKEN_FILE"
LIBRARY = "kvq-registry"  # in the user agent of HfApi's requests for us
TRIES = 5
MAX_WAIT = 60.0  # seconds; a longer Retry-After is an error
SILENCE = 60.0  # seconds without a byte of an answer after which a request has failed
RATE = 4096  # bytes a second, the least on the whole
LIMIT = 16 << 20  # bytes of an answer of the API, and of kvq.json
REDIRECTS = 5
_TRANSIENT = {408, 425, 500, 502, 503, 504}  # HTTP statuses after which the same request may succeed
_CHECK = "check HF_ENDPOINT, and what stands between it and this machine"

T = TypeVar("T")
_log = logging.getLogger(__name__)


def endpoint() -> str:
    """Return the Hub's address."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _hub() -> str:
    return f"the Hub at {without_secrets(endpoint())}"


def token() -> str | None:
    """Return the token of our requests. The library may ask the Hub to renew it, as after a login by browser."""
    from huggingface_hub import get_token

    disable_telemetry()
    path = Path(os.environ.get(TOKEN_FILE) or os.devnull)
    return (path.read_text().strip() if path.exists() else "") or _within(2 * SILENCE, get_token)


def disable_telemetry() -> None:
    """Keep huggingface_hub from asking a Hub for names and values of environment variables, and telling it which match.

    Its answer is unlimited, and is cached for all programs of the user. To be called before any request of the library.
    """
    from huggingface_hub import constants

    constants.HF_HUB_DISABLE_TELEMETRY = True


def is_offline() -> bool:
    """Return True if $HF_HUB_OFFLINE forbids requests, now or when huggingface_hub was imported."""
    from huggingface_hub import is_offline_mode

    return is_offline_mode() or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def check_online(what: str) -> None:
    """Raise RuntimeError if requests are forbidden; `what` begins the message."""
    if is_offline():
        raise RuntimeError(f"{what}: offline (HF_HUB_OFFLINE) and not in the cache; run kvq pull once while online")


# ---- the API ---------------------------------------------------------------------------------------------------------


def call(what: str, action: Callable[["HfApi"], T], repeatable: bool = True, uploaded: int = 0) -> T:
    """Return the result of an action on the Hub.

    what         begins messages: org/name
    repeatable   retry after any transient failure; else only if the request was certainly not carried out
    uploaded     bytes that the action sends, for which the time limit grows
    Raises NotFound for what does not exist or is not visible, PermissionError for what is refused, Conflict for a
    commit whose parent is not the head, Unanswered if nobody knows the outcome, RuntimeError for other failures.
    """
    check_online(what)
    return _retried(what, lambda: _within(2 * SILENCE + uploaded / RATE, lambda: action(_api())), repeatable)


def _retried(what: str, action: Callable[[], T], repeatable: bool = True) -> T:
    """Return the action's result; failures are retried and translated as in `call`."""
    for attempt in range(TRIES):
        try:
            return action()
        except Exception as error:
            wait = _retry_after(error, repeatable)
            if wait is None or wait > MAX_WAIT or attempt == TRIES - 1:
                raise (_translated(error, what) or error) from None
            if attempt == 0:
                _log.warning("no answer from %s; trying again, %d times in all", _hub(), TRIES)
            time.sleep(max(wait, 2.0**attempt))
    raise AssertionError("the last try returns or raises")


def _within(seconds: float, action: Callable[[], T], late: str = "took too long") -> T:
    """Return the result of an action; Unanswered if it takes longer, and its thread is left.

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
        raise Unanswered(f"{_hub()} {late}; {_CHECK}") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _api() -> "HfApi":
    """Return huggingface_hub's client, without telemetry, and without Xet for endpoints that have none."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import get_session

    if urlsplit(endpoint()).hostname not in ("huggingface.co", "hub-ci.huggingface.co"):
        constants.HF_HUB_DISABLE_XET = True
    disable_telemetry()
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
    origins = [urlsplit(str(request.url)), urlsplit(endpoint())]
    ours = LIBRARY in request.headers.get("user-agent", "") and "authorization" in request.headers
    if ours and len({(origin.scheme, origin.hostname, origin.port) for origin in origins}) > 1:
        raise RuntimeError(f"{_hub()} names another address, which gets no token; {_CHECK}")


def _read_bounded(response: Any) -> None:
    """Read an answer to one of our requests; RuntimeError if it has more than LIMIT bytes."""
    if LIBRARY not in response.request.headers.get("user-agent", "") or hasattr(response, "_content"):
        return
    content = bytearray()
    for chunk in response.iter_bytes():
        content += chunk
        if len(content) > LIMIT:
            raise RuntimeError(f"{_hub()} sends more than the {LIMIT} bytes that are allowed; {_CHECK}")
    response._content = bytes(content)


# ---- errors ----------------------------------------------------------------------------------------------------------


def _redacted(error: object) -> str:
    """Return the first 300 characters of a message, on one line, without the token."""
    text, secret = " ".join(str(error).split()), token()
    return without_secrets(text.replace(secret, "<token>") if secret else text)[:300]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _response_of(error: BaseException) -> Any:
    return next(
        (response for cause in _chain(error) if (response := getattr(cause, "response", None)) is not None), None
    )


def _is_network(error: BaseException) -> bool:
    kinds = {(kind.__module__.partition(".")[0].rstrip("2"), kind.__name__) for kind in type(error).__mro__}
    return ("httpx", "TransportError") in kinds or isinstance(error, (ConnectionError, TimeoutError))


def _retry_after(error: BaseException, repeatable: bool) -> float | None:
    """Return the seconds to wait before the same request may succeed; None if it should not be repeated."""
    response = _response_of(error)
    if response is not None and (response.status_code == 429 or (repeatable and response.status_code in _TRANSIENT)):
        try:
            return float(response.headers.get("Retry-After", 0))
        except ValueError:  # a date
            return 0.0
    return 0.0 if repeatable and response is None and any(map(_is_network, _chain(error))) else None


def _translated(error: Exception, what: str) -> Exception | None:
    from huggingface_hub import errors

    response, message = _response_of(error), _redacted(error)
    status, page = None if response is None else response.status_code, f"{without_secrets(endpoint())}/{what}"
    if isinstance(error, (Unanswered, NotFound, Conflict)):
        return None
    if isinstance(error, errors.GatedRepoError):
        return PermissionError(f"{what} is gated: accept its terms at {page}, then `hf auth login` or set HF_TOKEN")
    if isinstance(error, errors.RepositoryNotFoundError):
        text = "it does not exist, or is private: check the name, then `hf auth login` or set HF_TOKEN"
        return NotFound(f"no artifact {what.rpartition('/')[2]} at {page}; {text}")
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
        text = f"{what}: no answer from {_hub()} after {TRIES} tries: {message}"
        return Unanswered(f"{text}; check the network or HF_ENDPOINT, or set HF_HUB_OFFLINE=1 to use the cache")
    if isinstance(error, (AttributeError, KeyError, TypeError, ValueError)):
        return RuntimeError(f"{what}: {_hub()} gave an answer of another form ({message}); check HF_ENDPOINT")
    return None


# ---- the cache -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """The head of a repository's main: commit, files {path: size}, and the text of kvq.json, "" if there is none."""

    commit: str
    files: Mapping[str, int]
    index: str = ""


def _cache() -> Path:
    return reference.home() / "hub"


def blob(sha256: str, size: int) -> Path | None:
    """Return the cached file of a digest, found by name and size; its reader checks the digest."""
    path = _cache() / "blobs" / reference.check_sha256(sha256)
    return path if path.is_file() and path.stat().st_size == size else None


def load_head(org: str, name: str) -> Head | None:
    """Return the last known head of a repository, None if there is none."""
    with suppress(ArtifactError):
        fields = strict_json.loads(files.read(_cache() / "heads" / org / f"{name}.json", 2 * LIMIT), "head")
        return Head(**strict_json.keys(fields, {"commit", "files", "index"}, "head"))
    return None


def save_head(org: str, name: str, head: Head) -> None:
    """Remember the head of a repository; a read-only or full disk forgets it."""
    path = _cache() / "heads" / org / f"{name}.json"
    with suppress(OSError):
        files.make_folder(path.parent)
        files.save(path, strict_json.record({"commit": head.commit, "files": head.files, "index": head.index}))


# ---- files -----------------------------------------------------------------------------------------------------------


def download(repo: str, path: str, commit: str, sha256: str, size: int) -> Path:
    """Receive a file of a commit into the cache, checked; returns its path. Other bytes are received once more."""
    folder, target = _cache() / "blobs", _cache() / "blobs" / reference.check_sha256(sha256)
    check_online(repo)
    files.make_folder(folder)
    with files.draft(folder) as (draft, file):
        for _ in range(2):
            _receive(repo, path, commit, file, size)
            file.flush()
            if files.digest(draft) == (sha256, size):
                files.settle(draft, file, target)
                return target
        received, count = files.digest(draft)
    raise ArtifactError(
        f"{repo}/{path}: sha256: the Hub sent {received}, {count} bytes, twice; expected {sha256}, {size} bytes; "
        "nothing was kept; restore the file from an earlier commit of the repository"
    )


def read(repo: str, path: str, commit: str, size: int, git_digest: str) -> bytes:
    """Receive a small file of a commit into memory; other bytes than those of git's digest are received once more."""
    for _ in range(2):
        file = io.BytesIO()
        _receive(repo, path, commit, file, min(size, LIMIT))
        data = file.getvalue()
        if hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() == git_digest:
            return data
    raise ArtifactError(f"{repo}/{path}: the Hub sent other bytes than it lists, twice; retry, or restore the file")


def _receive(repo: str, path: str, commit: str, file: BinaryIO, size: int) -> None:
    """Receive a file of at most `size` bytes from its beginning; transient failures are retried."""
    url = f"{endpoint()}/{repo}/resolve/{reference.check_commit(commit)}/{quote(path)}"

    def attempt() -> None:
        file.seek(0)
        file.truncate()
        with _response(url) as response:
            for chunk in _body(response, size):
                file.write(chunk)

    _retried(repo, attempt)


@contextmanager
def _response(url: str) -> Iterator[Any]:
    """Yield an answer after its headers; raises huggingface_hub's errors, without the body of an error.

    Redirects are followed without their bodies and, to another origin, without the token.
    """
    from huggingface_hub.utils import get_session, hf_raise_for_status

    secret, session = token(), get_session()
    headers = {"User-Agent": "kvq", "Accept-Encoding": "identity"}  # no LIBRARY: the answer is not read at once
    headers |= {"Authorization": f"Bearer {secret}"} if secret else {}
    request, redirects = session.build_request("GET", url, headers=headers, timeout=SILENCE), 0
    while True:
        send = lambda request=request: session.send(request, stream=True, follow_redirects=False)  # noqa: E731
        response = _within(2 * SILENCE, send, "took too long to begin")
        if response.next_request is None:
            break
        response.close()
        request, redirects = response.next_request, redirects + 1
        if redirects > REDIRECTS:
            raise RuntimeError(f"{_hub()} redirects without end; {_CHECK}")
    try:
        if response.status_code >= 400:
            kept = {n: v for n, v in response.headers.items() if not n.startswith(("content-", "transfer-"))}
            hf_raise_for_status(type(response)(response.status_code, headers=kept, request=response.request))
        yield response
    finally:
        response.close()


def _body(response: Any, size: int) -> Iterator[bytes]:
    """Yield the body as it was sent, in pieces.

    Raises RuntimeError for more than `size` bytes, Unanswered for less than RATE bytes a second on the whole once it
    took SILENCE seconds. Only bytes of the body count: those of HTTP's framing do not extend the time.
    """
    chunks, began, received = response.iter_raw(), time.monotonic(), 0
    slow = f"sends less than {RATE} bytes a second"
    while (left := began + SILENCE + received / RATE - time.monotonic()) > 0:
        chunk = _within(left, lambda: next(chunks, None), slow)
        if chunk is None:
            return
        received += len(chunk)
        if received > size:
            raise RuntimeError(f"{_hub()} sends more than the {size} bytes that are expected; check HF_ENDPOINT")
        yield chunk
    raise Unanswered(f"{_hub()} {slow}; {_CHECK}")
