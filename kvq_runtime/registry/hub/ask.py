"""Ask a Hub that is not trusted: the head of main, files of a commit, tags, commits, names, and the bytes of a file.

Answers are checked for form, and received within limits of bytes and of time. Nothing of an answer becomes a path: an
ETag is only compared with the digest of what was received. A redirect is followed without its body and, to another
origin, without the token. The body of an error is not read.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from datetime import datetime
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote, urlencode, urljoin, urlsplit

from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry.hub import client
from kvq_runtime.registry.reference import check_commit

ANSWER = 16 << 20  # bytes of an answer of the API, all its pages together
PAGES = 4096
REDIRECTS = 5
RATE = 4096  # bytes a second that a body must have come with on the whole, once it took SILENCE seconds

T = TypeVar("T")
_ASK = "check HF_ENDPOINT, and what stands between it and this machine"


@dataclass(frozen=True)
class File:
    """A file of a commit: `sha256` of a large one, else None; `at`, if asked, is when it last changed, in seconds."""

    size: int
    sha256: str | None
    at: float


def head(repo: str) -> str:
    """The commit at the head of main."""
    from huggingface_hub import constants

    limit = constants.HF_HUB_ETAG_TIMEOUT  # seconds; a small answer, which every other request waits for
    found = answer(f"/api/models/{repo}", {"expand": "sha"}, limit)
    with _formed(repo):
        return check_commit(found["sha"])


def tree(repo: str, commit: str, folder: str = "", times: bool = False) -> dict[str, File]:
    """{path: file} of all files of a commit, or of those in a folder.

    times   ask when each was last changed
    """
    path = f"/api/models/{repo}/tree/{commit}{'/' + quote(folder) if folder else ''}"
    found = {}
    for row in pages(path, {"recursive": "true", **({"expand": "true"} if times else {})}):
        with _formed(repo):
            if row["type"] == "file":
                at = datetime.fromisoformat(row["lastCommit"]["date"]).timestamp() if times else 0.0
                found[str(row["path"])] = File(int(row["size"]), (row.get("lfs") or {}).get("oid"), at)
    return found


def tags(repo: str) -> dict[str, str]:
    """{tag: the commit it points to}."""
    found = answer(f"/api/models/{repo}/refs")
    with _formed(repo):
        return {str(tag["name"]): check_commit(tag["targetCommit"]) for tag in found["tags"]}


def commits(repo: str) -> Iterator[tuple[str, str]]:
    """(commit, title) of main, the newest first."""
    for row in pages(f"/api/models/{repo}/commits/main"):
        with _formed(repo):
            yield check_commit(row["id"]), str(row["title"])


def names(org: str) -> list[str]:
    """Every model of an organization whose card has the tag kvq, as the Hub's search lists them now."""
    found = []
    for row in pages("/api/models", {"author": org, "filter": "kvq"}):
        with _formed(f"{org}/*"):
            owner, _, name = row["id"].partition("/")
            found += [name] if owner == org else []
    return found


def check_writable(org: str) -> None:
    """Raise PermissionError if the token may not write to an organization; fine-grained tokens are not checked."""
    from huggingface_hub import get_token

    if client.is_offline():
        raise RuntimeError(
            f"hf://{org}: offline (HF_HUB_OFFLINE), nothing can be published; go online, or name a folder"
        )
    token = client.token()
    if token is False or not (token if isinstance(token, str) else get_token()):
        raise PermissionError(f"hf://{org}: no token to write with: `hf auth login`, or set HF_TOKEN")
    with client.translate_errors(f"{org}/*"):
        me = answer("/api/whoami-v2")
    with _formed(org):
        role = me.get("auth", {}).get("accessToken", {}).get("role")
        owners = [me.get("name"), *(group.get("name") for group in me.get("orgs", []))]
    if role == "read":
        raise PermissionError(f"hf://{org}: the token is read-only; create one with write access at {client.place()}")
    if org not in owners:
        raise PermissionError(f"hf://{org}: {owners[0]} is not a member of it; ask to be added, or push elsewhere")


@contextmanager
def _formed(what: str) -> Iterator[None]:
    """Turn what comes of an answer of another form into a RuntimeError."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        text = f"{what}: the Hub at {client.place()} gave an answer of another form ({client.redacted(error)})"
        raise RuntimeError(f"{text}; check HF_ENDPOINT") from None


# ---- receiving -------------------------------------------------------------------------------------------------------


def answer(path: str, query: Mapping[str, Any] | None = None, silence: float | None = None) -> Any:
    """The JSON that the Hub answers at a path; transient faults are retried.

    silence   seconds without a byte after which a try has failed; None is client.SILENCE
    """
    return client.retry(lambda: _json(_address(path, query), ANSWER, silence))[0]


def pages(path: str, query: Mapping[str, Any] | None = None) -> Iterator[Any]:
    """The entries of a list that the Hub gives in pages."""
    address, left = _address(path, query), ANSWER
    for _ in range(PAGES):
        entries, size, address = client.retry(lambda url=address, left=left: _json(url, left))
        if not isinstance(entries, list):
            raise RuntimeError(f"{path}: the Hub at {client.place()} answered with something else than a list")
        yield from entries
        left -= size
        if address is None:
            return
    raise RuntimeError(f"{path}: the Hub at {client.place()} has more than {PAGES} pages of it; {_ASK}")


def append(address: str, file: BinaryIO, limit: int) -> str:
    """Receive into a file what it has not yet of what is at an address; returns the ETag's text, or "".

    Raises RuntimeError for more than `limit` bytes in all.
    """
    with _response(address, start=file.tell()) as response:
        if response.status_code != 206:  # not the rest, but all of it
            file.seek(0)
            file.truncate()
        for chunk in _body(response, limit - file.tell()):
            file.write(chunk)
        headers = (response.history or [response])[0].headers  # of the Hub, not of where it redirects to
    return (headers.get("X-Linked-Etag") or headers.get("ETag") or "").removeprefix("W/").strip('"')


def _address(path: str, query: Mapping[str, Any] | None) -> str:
    return f"{client.endpoint()}{path}{'?' + urlencode(query) if query else ''}"


def _json(address: str, limit: int, silence: float | None = None) -> tuple[Any, int, str | None]:
    """Return the answer, its bytes, and the address of the next page, if there is one."""
    with _response(address, silence=silence) as response:
        data = b"".join(_body(response, limit))
        following = response.links.get("next", {}).get("url")
        if following is not None:  # the token is sent along, so the same origin, whatever is said
            parts = urlsplit(urljoin(address, following))
            following = urlsplit(address)._replace(path=parts.path, query=parts.query).geturl()
    try:
        return strict_json.loads(data, "answer", depth=32), len(data), following
    except ArtifactError:
        text = f"the Hub at {client.place()} answered with something else than JSON; {_ASK}"
        raise RuntimeError(text) from None


@contextmanager
def _response(address: str, start: int = 0, silence: float | None = None) -> Iterator[Any]:
    """An answer after its headers, from byte `start` on if the Hub has that; raises huggingface_hub's errors."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    client.check_online(address)
    silence = client.SILENCE if silence is None else silence
    headers = _headers() | ({"Range": f"bytes={start}-"} if start else {})
    session, history = get_session(), []
    request = session.build_request("GET", address, headers=headers, timeout=silence)
    while request is not None:
        if len(history) > REDIRECTS:
            raise RuntimeError(f"the Hub at {client.place()} redirects without end; {_ASK}")
        response = within(
            2 * silence,
            lambda request=request: session.send(request, stream=True, follow_redirects=False),
            f"the Hub at {client.place()} took more than {2 * silence:.0f} s to begin; {_ASK}",
        )
        history.append(response)
        request = response.next_request
        if request is not None or response.status_code >= 400:
            response.close()
    if response.status_code >= 400:
        kept = {
            name: value for name, value in response.headers.items() if not name.startswith(("content-", "transfer-"))
        }
        hf_raise_for_status(type(response)(response.status_code, headers=kept, request=response.request))
    response.history = history[:-1]
    try:
        yield response
    finally:
        response.close()


def _headers() -> dict[str, str]:
    """Return the headers of a request.

    Not huggingface_hub's `build_hf_headers`, which asks the Hub which environment variables to look for, without a
    limit of bytes or of time.
    """
    from huggingface_hub import get_token

    given = client.token()
    token = given if isinstance(given, str) else None if given is False else get_token()
    headers = {"User-Agent": "kvq", "Accept-Encoding": "identity"}
    return headers | ({"Authorization": f"Bearer {token}"} if token else {})


def _body(response: Any, limit: int) -> Iterator[bytes]:
    """Yield the body as it was sent, in pieces.

    Raises RuntimeError for more than `limit` bytes, or for less than RATE bytes a second on the whole, once it took
    SILENCE seconds. Only bytes of the body count: those of HTTP's framing do not extend the time.
    """
    chunks, place, began, received = response.iter_raw(), f"the Hub at {client.place()}", time.monotonic(), 0
    slow = f"{place} sends less than {RATE} bytes a second; try again later, or {_ASK}"
    while True:
        left = began + client.SILENCE + received / RATE - time.monotonic()
        if left <= 0:
            raise RuntimeError(slow)
        chunk = within(left, lambda: next(chunks, None), slow)
        if chunk is None:
            return
        received += len(chunk)
        if received > limit:
            raise RuntimeError(f"{place} sends more than the {limit} bytes that are expected; {_ASK}")
        yield chunk


def within(seconds: float, action: Callable[[], T], late: str) -> T:
    """Return the result of an action; RuntimeError with the text `late` if it takes longer, and its thread is left.

    A limit for each read does not end headers that come one by one.
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
        raise RuntimeError(late) from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
