"""Reach a Hub through `huggingface_hub`, patiently, and say what to do when it refuses.

The address is $HF_ENDPOINT, read at every call (the library reads it once, at import). The token is the Hub's usual one
(`hf auth login`, $HF_TOKEN); the library sends it to the Hub and to no other origin. It is taken out of every message
before one is raised, since a server may repeat what it was sent; what the server said is not chained to the error.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from kvq_runtime.errors import ArtifactError, NotFound

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TRIES = 5
LONGEST = 60.0  # seconds: a Retry-After beyond it is not waited for
_PASSING = {408, 425, 429, 500, 502, 503, 504}  # statuses after which the same request may succeed

T = TypeVar("T")


def endpoint() -> str:
    """The Hub's address."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def api() -> "HfApi":
    """The client. A Hub of one's own has no Xet, which the library does not find out by itself."""
    from huggingface_hub import HfApi, constants

    if urlsplit(endpoint()).hostname not in ("huggingface.co", "hub-ci.huggingface.co"):
        constants.HF_HUB_DISABLE_XET = True
    return HfApi(endpoint=endpoint(), library_name="kvq")


def offline() -> bool:
    """Whether the user has said, now or before the library was imported, that no network is to be used."""
    from huggingface_hub import is_offline_mode

    return is_offline_mode() or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def check_online(what: str) -> None:
    """Raise the library's error for a request made offline."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if offline():
        raise OfflineModeIsEnabled(what)


def file(repo: str, path: str, commit: str, force: bool = False) -> Path:
    """A file of a commit, from the cache or downloaded into it; `force`: in place of what the cache has.

    A small file that is not what its name in the cache says, git's digest, is fetched once more; then ArtifactError.
    """
    from huggingface_hub import hf_hub_download

    options: dict[str, Any] = {"revision": commit, "endpoint": endpoint(), "library_name": "kvq"}
    options |= {"local_files_only": offline()}
    for again in (force, True):
        found = Path(patiently(lambda again=again: hf_hub_download(repo, path, force_download=again, **options)))
        if not _damaged(found.resolve()):
            return found
    found.resolve().unlink()
    raise ArtifactError(f"{repo}/{path}: the Hub sent it damaged, twice; nothing was kept")


def _damaged(blob: Path) -> bool:
    """Whether a file that is named by a sha1, as git names it or of its bytes alone, is another."""
    if not re.fullmatch("[0-9a-f]{40}", blob.name):
        return False
    data = blob.read_bytes()
    return blob.name not in {hashlib.sha1(start + data).hexdigest() for start in (b"blob %d\0" % len(data), b"")}


def check_writable(org: str) -> None:
    """PermissionError where the token may not write to an organization; a fine-grained token is believed."""
    from huggingface_hub.errors import LocalTokenNotFoundError

    with asking(f"{org}/*"):
        check_online(org)
        try:
            me = patiently(lambda: api().whoami())
        except LocalTokenNotFoundError:
            raise PermissionError(f"hf://{org}: no token to write with: `hf auth login`, or set HF_TOKEN") from None
    if me.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise PermissionError(f"hf://{org}: the token only reads; make one that writes at {endpoint()}")
    if org not in (me.get("name"), *(one.get("name") for one in me.get("orgs", []))):
        raise PermissionError(f"hf://{org}: {me.get('name')} is no member of it; ask to be let in, or push elsewhere")


def status(error: BaseException) -> int | None:
    """The HTTP status that an error is about."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        if response is not None:
            return response.status_code
    return None


def passing(error: BaseException) -> float | None:
    """Seconds to wait before the same request may succeed; None if it will not."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if any(isinstance(one, OfflineModeIsEnabled) for one in _chain(error)):
        return None
    found = status(error)
    if found in _PASSING:
        return _retry_after(error)
    if found is None and any(_is_network(one) for one in _chain(error)):
        return 0.0
    return None


def patiently(action: Callable[[], T]) -> T:
    """Do it, and again after faults that pass: waits of 1, 2, 4, 8 seconds, or as long as the Hub asks."""
    for number in range(TRIES):
        try:
            return action()
        except Exception as error:
            wait = passing(error)
            if wait is None or wait > LONGEST or number == TRIES - 1:
                raise
            pause(number, wait)
    raise AssertionError("the last try returns or raises")


def pause(number: int, least: float = 0.0) -> None:
    """Wait before try `number` + 1."""
    time.sleep(max(least, 2.0**number))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_network(error: BaseException) -> bool:
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    transport = {("httpx", "TransportError"), ("httpx2", "TransportError")}
    short = isinstance(error, OSError) and str(error).startswith("Consistency check failed")
    return bool(kinds & transport) or short or isinstance(error, (ConnectionError, TimeoutError))


def _retry_after(error: BaseException) -> float:
    response = next(one.response for one in _chain(error) if getattr(one, "response", None) is not None)  # type: ignore
    try:
        return float(response.headers.get("Retry-After", 0))
    except ValueError:  # a date
        return 0.0


@contextmanager
def asking(repo: str) -> Iterator[None]:
    """Turn the library's errors into ours, each saying what to do.

    NotFound for what is not there or not to be seen, PermissionError for what is refused, RuntimeError for a Hub or a
    network that fails.
    """
    try:
        yield
    except Exception as error:
        found = _ours(error, repo)
        if found is None:
            raise
        raise found from None


def _ours(error: Exception, repo: str) -> Exception | None:
    from huggingface_hub import errors

    code, said = status(error), redacted(error)
    chain = list(_chain(error))
    if any(isinstance(one, errors.GatedRepoError) for one in chain):
        text = f"{repo} is gated: accept its terms at {endpoint()}/{repo}, then `hf auth login` or set HF_TOKEN"
        return PermissionError(text)
    if any(isinstance(one, errors.RepositoryNotFoundError) for one in chain):
        text = "it is not there, or it is private: check the name, then `hf auth login` or set HF_TOKEN"
        return NotFound(f"no artifact {repo.rpartition('/')[2]} at {endpoint()}/{repo}; {text}")
    if any(isinstance(one, errors.OfflineModeIsEnabled) for one in chain):
        return RuntimeError(
            f"{repo}: offline (HF_HUB_OFFLINE), and the cache does not hold it; kvq pull it once online"
        )
    if code == 401:
        return PermissionError(f"{repo}: the Hub does not accept the token: `hf auth login`, or set another HF_TOKEN")
    if code == 403:
        return PermissionError(f"{repo}: the token may not do this ({said}); use one that may write to it")
    if isinstance(error, (errors.RemoteEntryNotFoundError, errors.RevisionNotFoundError)):
        return NotFound(f"{repo}: {said}")
    if code == 429:
        return RuntimeError(f"{repo}: the Hub asks for fewer requests (429); say it again in some minutes")
    if code is not None or any(_is_network(one) for one in chain) or isinstance(error, errors.LocalEntryNotFoundError):
        return RuntimeError(f"{repo}: the Hub at {endpoint()} could not be asked, after {TRIES} tries: {said}")
    return None


def redacted(error: object) -> str:
    """The first words of a message, on one line, without the token."""
    from huggingface_hub import get_token

    text, token = " ".join(str(error).split()), get_token()
    return (text.replace(token, "<token>") if token else text)[:300]
