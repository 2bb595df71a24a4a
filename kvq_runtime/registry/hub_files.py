"""Receive files of a Hub, and keep them in a cache by their sha256, for later and for offline use.

    $KVQ_HOME/hub/blobs/<sha256>            files of any repository
    $KVQ_HOME/hub/heads/<org>/<name>.json   the last known head of main: commit, files and kvq.json

No path comes from a server: a blob is named by the digest of the received bytes. A file is received within its stated
size, at a least rate, and is discarded if its digest is another. Redirects are followed without their bodies and, to
another origin, without the token.
"""

import hashlib
import io
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError, Unanswered
from kvq_runtime.registry import hub_api, reference

REDIRECTS = 5
LIMIT = 16 << 20  # bytes of kvq.json, and of a head in the cache


@dataclass(frozen=True)
class Head:
    """The head of a repository's main.

    files   {path: size}
    index   the text of kvq.json, "" if there is none
    """

    commit: str
    files: Mapping[str, int]
    index: str = ""


def _cache() -> Path:
    return reference.home() / "hub"


# ---- cache -----------------------------------------------------------------------------------------------------------


def blob(sha256: str, size: int) -> Path | None:
    """Return the cached file of a digest, found by name and size; its reader checks the digest."""
    path = _cache() / "blobs" / reference.check_sha256(sha256)
    return path if path.is_file() and path.stat().st_size == size else None


def load_head(org: str, name: str) -> Head | None:
    """Return the last known head of a repository, None if there is none."""
    with suppress(ArtifactError):
        fields = strict_json.loads(files.read(_cache() / "heads" / org / f"{name}.json", 2 * LIMIT), "head")
        head = Head(**strict_json.keys(fields, {"commit", "files", "index"}, "head"))
        return head if isinstance(head.files, dict) and isinstance(head.index, str) else None
    return None


def save_head(org: str, name: str, head: Head) -> None:
    """Remember the head of a repository; a read-only or full disk forgets it."""
    path = _cache() / "heads" / org / f"{name}.json"
    with suppress(OSError):
        files.make_folder(path.parent)
        files.save(path, strict_json.record(asdict(head)))


# ---- receiving -------------------------------------------------------------------------------------------------------


def download(repo: str, path: str, commit: str, sha256: str, size: int) -> Path:
    """Receive a file of a commit into the cache, checked; returns its path. Other bytes are received once more."""
    folder, target = _cache() / "blobs", _cache() / "blobs" / reference.check_sha256(sha256)
    hub_api.check_online(repo)
    files.make_folder(folder)
    for orphan in files.orphans(folder):
        orphan.unlink(missing_ok=True)
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
        "nothing was kept, kvq doctor checks the repository"
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
    """Receive a file from the beginning; transient failures are retried."""
    url = f"{hub_api.endpoint()}/{repo}/resolve/{reference.check_commit(commit)}/{quote(path)}"

    def attempt() -> None:
        file.seek(0)
        file.truncate()
        with _response(url) as response:
            for chunk in _body(response, size):
                file.write(chunk)

    hub_api.retried(repo, attempt)


@contextmanager
def _response(url: str) -> Iterator[Any]:
    """Yield an answer after its headers; raises huggingface_hub's errors, without the body of an error."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    secret, hub = hub_api.token(), f"the Hub at {hub_api.address()}"
    headers = {"User-Agent": "kvq", "Accept-Encoding": "identity"}  # not LIBRARY: the answer is not read at once
    headers |= {"Authorization": f"Bearer {secret}"} if secret else {}
    session = get_session()
    request, redirects = session.build_request("GET", url, headers=headers, timeout=hub_api.SILENCE), 0
    while True:
        response = hub_api.within(
            2 * hub_api.SILENCE,
            lambda request=request: session.send(request, stream=True, follow_redirects=False),
            f"{hub} took too long to begin; check HF_ENDPOINT",
        )
        if response.next_request is None:
            break
        response.close()
        request, redirects = response.next_request, redirects + 1
        if redirects > REDIRECTS:
            raise RuntimeError(f"{hub} redirects without end; check HF_ENDPOINT")
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
    chunks, hub, began, received = response.iter_raw(), f"the Hub at {hub_api.address()}", time.monotonic(), 0
    slow = f"{hub} sends less than {hub_api.RATE} bytes a second; try again later, or check HF_ENDPOINT"
    while True:
        left = began + hub_api.SILENCE + received / hub_api.RATE - time.monotonic()
        if left <= 0:
            raise Unanswered(slow)
        chunk = hub_api.within(left, lambda: next(chunks, None), slow)
        if chunk is None:
            return
        received += len(chunk)
        if received > size:
            raise RuntimeError(f"{hub} sends more than the {size} bytes that are expected; check HF_ENDPOINT")
        yield chunk
