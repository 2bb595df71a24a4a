"""Talk to an OCI registry that is not trusted: tags, blobs by digest, and the manifests that keep blobs.

Plain HTTP by the standard library, of OCI's distribution API what every registry has. TLS is demanded but on loopback.
Each answer is received within limits of bytes and of time, and whoever asks for a whole blob checks its digest. A
redirect is followed for blobs alone, and to another origin without credentials; an upload goes to the registry's own
origin. Proxies are those of the environment, but for loopback.

Credentials are Docker's: $DOCKER_AUTH_CONFIG (the text of a config.json), else config.json in $DOCKER_CONFIG or
~/.docker, with its `auths`, `credHelpers` and `credsStore`. They are sent to the registry, and to the address at which
it says that it gives tokens, as Docker does, an identity token there alone; never in a message.
"""

import base64
import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from hashlib import sha256 as hash_of
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode, urljoin, urlsplit

from kvq_runtime.disk import strict_json
from kvq_runtime.errors import NotFound
from kvq_runtime.registry.hub import ask
from kvq_runtime.registry.webhook import Stay, cause

TRIES = 4
PAGE = 1000  # tags that are asked for at once
SECONDS = 20.0  # each step of an answer may take
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
KIND = "application/vnd.kvq.file.v1"
EMPTY = b"{}"
_ADVICE = "check its address, and what stands between it and this machine"
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_opener = urllib.request.build_opener(Stay)
_direct = urllib.request.build_opener(Stay, urllib.request.ProxyHandler({}))  # for loopback, which no proxy is to hear
_HUB = "https://index.docker.io/v1/"  # the name of registry-1.docker.io in Docker's settings
_IDENTITY = "<token>"  # the user whose password is an identity token, as Docker's helpers have it
T = TypeVar("T")


class Repository:
    """A repository of an OCI registry: `root` is "host/repository", or "host:port/some/repository".

    Raises NotFound for what is not there, PermissionError for what is refused, RuntimeError for all else that fails.
    """

    def __init__(self, root: str):
        self.root, (host, _, self.path) = root, root.partition("/")
        self.host = host
        self._origin = f"{'http' if urlsplit(f'//{host}').hostname in _LOOPBACK else 'https'}://{host}".lower()
        self._token = ""  # the header that the last challenge was answered with
        self._is_there = False  # a registry, whether it has this repository or not

    def tags(self) -> set[str]:
        """Every tag; none if there is no such repository."""
        first = address = self._address(f"tags/list?n={PAGE}")
        found, left = set[str](), ask.ANSWER
        for page in range(ask.PAGES):
            try:
                data, head = self.retried(lambda a=address, n=left: self._all("GET", a, n))
            except NotFound:
                if page == 0:
                    self._look_for_registry()
                    return found
                raise RuntimeError(f"oci://{self.root}: its list of tags breaks off (404); try again") from None
            listed = strict_json.loads(data, f"{self.root}: tags")
            names = (listed.get("tags") or []) if isinstance(listed, dict) else None
            if not isinstance(names, list):
                raise RuntimeError(f"oci://{self.root}: its answer is no list of tags; check the address")
            new = {name for name in names if isinstance(name, str)} - found
            found |= new
            left -= len(data)
            following = _next(head)
            if following is None:
                if len(names) < PAGE or not new:
                    return found
                following = f"{first}&{urlencode({'last': names[-1]})}"  # a full page may not be the last one
            parts = urlsplit(self._joined(address, following))  # credentials are sent along: the same origin, always
            address = urlsplit(first)._replace(path=parts.path, query=parts.query).geturl()
        raise RuntimeError(f"oci://{self.root}: more than {ask.PAGES} pages of tags")

    def _look_for_registry(self) -> None:
        """RuntimeError if what answers is no registry, and says of every address that nothing is there."""
        if self._is_there:
            return
        with self.retried(lambda: self._send("GET", f"{self._origin}/v2/", None, {})) as response:
            if response.status not in (200, 401):
                text = f"{self._origin}/v2/ answers {response.status}, as no OCI registry does; check the address"
                raise RuntimeError(f"oci://{self.root}: {text}")
        self._is_there = True

    def has(self, sha256: str) -> bool:
        """True if a blob is there."""
        try:
            self.retried(lambda: self._all("HEAD", self._address(f"blobs/sha256:{sha256}"), 0, redirects=True))
        except NotFound:
            return False
        return True

    def pieces(self, sha256: str, limit: int, first: bool = False) -> Iterator[bytes]:
        """A blob's bytes, as they come; RuntimeError for more than `limit`, or with `first` only the first ones."""
        head = {"Range": f"bytes=0-{limit - 1}"} if first else {}
        with self._answer("GET", self._address(f"blobs/sha256:{sha256}"), head=head, redirects=True) as response:
            left = limit
            for chunk in self._body(response, 1 << 62 if first else limit):
                yield chunk[:left]
                left -= len(chunk)
                if left <= 0 and first:
                    return

    def put_blob(self, data: bytes) -> None:
        """Store bytes under their digest, unless they are there."""
        sha256 = hash_of(data).hexdigest()
        if not self.has(sha256):
            self.retried(lambda: self._upload(data, sha256))

    def _upload(self, data: bytes, sha256: str) -> None:
        _, head = self._all("POST", self._address("blobs/uploads/"), ask.ANSWER, b"")
        place = self._joined(self._origin, head.get("Location") or "")
        if _origin(place) != self._origin or not head.get("Location"):
            text = f"it wants uploads at {_origin(place)}, another origin, and gets none there"
            raise RuntimeError(f"oci://{self.root}: {text}; ask who runs it for relative addresses")
        place += f"{'&' if '?' in place else '?'}{urlencode({'digest': f'sha256:{sha256}'})}"
        self._all("PUT", place, ask.ANSWER, data, {"Content-Type": "application/octet-stream"})

    def put_manifest(
        self, tag: str, files: Mapping[str, tuple[str, int]] | None = None, tries: int = TRIES,
        may: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """Write a tag of a manifest that keeps these blobs, {name: (sha256, size)}; the blob EMPTY has to be there.

        may   asked before every request: once it says no, none is made, and RuntimeError is raised
        """
        empty = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": f"sha256:{hash_of(EMPTY).hexdigest()}"}
        empty |= {"size": len(EMPTY)}
        layers = [
            {"mediaType": KIND, "digest": f"sha256:{sha256}", "size": size,
             "annotations": {"org.opencontainers.image.title": name}}
            for name, (sha256, size) in (files or {}).items()
        ]  # fmt: skip
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "artifactType": KIND, "config": empty}
        data = strict_json.dumps(manifest | {"layers": layers or [empty]}).encode()
        address, head = self._address(f"manifests/{tag}"), {"Content-Type": MANIFEST}
        self.retried(lambda: self._all("PUT", address, ask.ANSWER, data, head, may=may), tries)

    # ---- requests

    def _address(self, path: str) -> str:
        return f"{self._origin}/v2/{self.path}/{path}"

    def retried(self, action: Callable[[], T], tries: int = TRIES) -> T:
        """The action's result; transient faults are retried after 1, 2 and 4 seconds."""
        for attempt in range(tries):
            try:
                return action()
            except _Unanswered as error:
                if attempt == tries - 1:
                    raise RuntimeError(str(error)) from None
                time.sleep(2.0**attempt)
        raise AssertionError("the last try returns or raises")

    def _all(
        self, method: str, address: str, limit: int, data: bytes | None = None,
        head: Mapping[str, str] = {}, redirects: bool = False, may: Callable[[], bool] = lambda: True,
    ) -> tuple[bytes, Message]:  # fmt: skip
        """All of an answer, and its headers."""
        with self._answer(method, address, data, head, redirects, may) as response:
            return b"".join(self._body(response, limit)), response.headers

    def _body(self, response: Any, limit: int) -> Iterator[bytes]:
        """The body as it comes, in pieces."""
        return ask.paced(iter(lambda: response.read1(1 << 16), b""), limit, f"oci://{self.root}", _ADVICE)

    @contextmanager
    def _answer(
        self, method: str, address: str, data: bytes | None = None, head: Mapping[str, str] = {},
        redirects: bool = False, may: Callable[[], bool] = lambda: True,
    ) -> Iterator[Any]:  # fmt: skip
        """An answer after its headers; a challenge is answered once, a redirect of a blob is followed."""
        asked, left = False, ask.REDIRECTS if redirects else 0
        while True:
            if not may():
                raise RuntimeError(f"oci://{self.root}: too late for {method}")
            own = {"Authorization": self._token} if self._token and _origin(address) == self._origin else {}
            response = self._send(method, address, data, {**head, **own})
            code, headers = response.status, response.headers
            if code < 300:
                break
            response.close()
            if code == 401 and not asked and _origin(address) == self._origin:
                asked, self._token = True, self._credentials(headers.get_all("WWW-Authenticate") or [])
            elif code in (301, 302, 303, 307, 308) and left > 0 and headers.get("Location"):
                address, left = self._joined(address, headers["Location"]), left - 1
                if not self._is_safe(address):
                    raise RuntimeError(f"oci://{self.root}: it redirects to {_origin(address)}, which is not https")
            else:
                raise self._failure(method, code)
        try:
            yield response
        except (OSError, HTTPException) as error:
            raise _Unanswered(f"oci://{self.root}: the answer breaks off ({type(error).__name__})") from None
        finally:
            response.close()

    def _send(self, method: str, address: str, data: bytes | None, head: Mapping[str, str]) -> Any:
        request = urllib.request.Request(address, data, {"User-Agent": "kvq", **head}, method=method)

        def send() -> Any:
            try:
                return (_direct if urlsplit(address).scheme == "http" else _opener).open(request, timeout=SECONDS)
            except urllib.error.HTTPError as error:
                return error

        try:  # as long as the bytes that are sent take at the least rate
            limit = 2 * SECONDS + len(data or b"") / ask.RATE
            return ask.within(limit, send, f"oci://{self.root}", _ADVICE)
        except (OSError, HTTPException, ValueError) as error:
            raise _Unanswered(f"oci://{self.root}: no answer from {_origin(address)} ({cause(error)})") from None

    def _failure(self, method: str, code: int) -> Exception:
        what = f"oci://{self.root}: {method} was answered with {code}"
        if code == 404:
            return NotFound(f"oci://{self.root}: not found (404)")
        if code in (401, 403):
            return PermissionError(f"{what}: log in by `docker login {self.host}`, with an account that may do this")
        return _Unanswered(what) if code in _TRANSIENT else RuntimeError(what)

    def _joined(self, address: str, given: str) -> str:
        """The address that an answer gives, which may be relative to another one; RuntimeError if it is none."""
        try:
            return urlsplit(urljoin(address, given)).geturl()
        except ValueError:
            text = f"its answer names {given!r:.80}, which is no address; ask who runs it"
            raise RuntimeError(f"oci://{self.root}: {text}") from None

    def _is_safe(self, address: str) -> bool:
        """True for an address of https, or on loopback if the registry is."""
        parts, own = urlsplit(address), urlsplit(self._origin)
        return parts.scheme == "https" or (parts.scheme == own.scheme == "http" and parts.hostname in _LOOPBACK)

    # ---- credentials

    def _credentials(self, challenges: list[str]) -> str:
        """The header that answers a challenge; "" if there is nothing to answer with.

        Source: Distribution's token authentication (GET), and its OAuth 2.0 with an identity token (POST).
        """
        name, secret = self._user() or ("", "")
        given = f"Basic {base64.b64encode(f'{name}:{secret}'.encode()).decode()}"
        own = {"Authorization": given} if name or secret else {}
        bearer = next((one for one in challenges if one.lower().startswith("bearer ")), None)
        if bearer is None:
            if name == _IDENTITY:
                text = "asks for a password, and Docker's settings have an identity token"
                raise PermissionError(f"oci://{self.root}: it {text}; `docker login {self.host}` with a password")
            return own.get("Authorization", "")
        said = dict(re.findall(r'(\w+)="([^"]*)"', bearer))
        realm = self._joined("", said.pop("realm", ""))
        if not self._is_safe(realm):
            raise RuntimeError(f"oci://{self.root}: it gives tokens at {_origin(realm)}, which is not https")
        wanted = {key: said[key] for key in ("service", "scope") if key in said}
        if name == _IDENTITY:
            wanted |= {"grant_type": "refresh_token", "client_id": "kvq", "refresh_token": secret}
            asked = self._send("POST", realm, urlencode(wanted).encode(), {})
        else:
            asked = self._send("GET", f"{realm}{'&' if '?' in realm else '?'}{urlencode(wanted)}", None, own)
        with asked as response:
            code = response.status
            if code in (400, 404, 405) and name == _IDENTITY:  # without OAuth, nothing is there to post to
                text = f"the identity token of Docker's settings is not accepted ({code}); `docker login {self.host}`"
                text += " gets another" if code == 400 else " with a password"
                raise PermissionError(f"oci://{self.root}: {text}")
            if code == 404:  # never NotFound, which would say that there is no such repository
                raise RuntimeError(f"oci://{self.root}: nothing is at {_origin(realm)} where it gives tokens (404)")
            if code >= 300:
                raise self._failure("the request for a token", code)
            found = strict_json.loads(b"".join(self._body(response, 1 << 20)), "token")
        token = (found.get("token") or found.get("access_token")) if isinstance(found, dict) else None
        if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
            raise RuntimeError(f"oci://{self.root}: {_origin(realm)} gave no token")
        return f"Bearer {token}"

    def _user(self) -> tuple[str, str] | None:
        """User and password, or _IDENTITY and a token, for this host, of Docker's settings; None if they have none."""
        folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
        try:
            text = os.environ.get("DOCKER_AUTH_CONFIG") or (folder / "config.json").read_bytes()
        except OSError:
            return None
        host = _HUB if self.host == "registry-1.docker.io" else self.host
        try:
            settings = json.loads(text)
            auths = settings.get("auths") or {}  # by host, or by an address there
            auths = {key.rpartition("//")[2].partition("/")[0]: one for key, one in auths.items()} | auths
            entry = auths.get(host) or auths.get(self.host) or {}
            if entry.get("identitytoken"):
                return _IDENTITY, str(entry["identitytoken"])
            if entry.get("auth"):
                user, _, password = base64.b64decode(entry["auth"]).decode().partition(":")
                return user, password
            helper = (settings.get("credHelpers") or {}).get(host) or settings.get("credsStore")
            if not helper or not re.fullmatch(r"[\w.-]+", helper):
                return None
            command = [f"docker-credential-{helper}", "get"]
            answer = subprocess.run(command, input=host.encode(), capture_output=True, timeout=SECONDS)
            found = json.loads(answer.stdout) if answer.returncode == 0 else {}
            return (found["Username"], found["Secret"]) if "Secret" in found else None
        except (AttributeError, KeyError, TypeError, ValueError, OSError, subprocess.SubprocessError) as error:
            text = f"Docker's settings cannot be used ({type(error).__name__}); `docker login {self.host}` writes them"
            raise RuntimeError(f"oci://{self.root}: {text}") from None


class _Unanswered(RuntimeError):
    """A request that may succeed if it is made again."""


def _next(head: Message) -> str | None:
    """The address of the next page, of the headers of this one; None if they have none."""
    links = ", ".join(head.get_all("Link") or [])
    for address, said in re.findall(r'<([^>]*)>((?:\s*;\s*[\w*-]+\s*(?:=\s*(?:"[^"]*"|[^\s",;]*))?)*)', links):
        rel = re.search(r';\s*rel\s*=\s*(?:"([^"]*)"|([^\s",;]*))', said, re.IGNORECASE)
        if rel and "next" in (rel[1] or rel[2] or "").lower().split():
            return address
    return None


def _origin(address: str) -> str:
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}".lower()
