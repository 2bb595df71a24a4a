"""An OCI registry that is not trusted: whom its answers send credentials and bytes to, and what is believed of them."""

import base64
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from hashlib import sha256
from urllib.parse import parse_qs

import pytest

from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry.oci.client import Repository
from kvq_runtime.registry.webhook import Stay


class Liar:
    """A server on loopback that answers as it is told, and remembers what it was asked, with which credentials."""

    def __init__(self):
        self.asked = list[tuple[str, str, str | None]]()
        self.received = list[bytes]()
        self.answers: dict[str, Callable[[str | None], tuple[int, dict[str, str], bytes]]] = {}


@pytest.fixture
def liars(monkeypatch, tmp_path) -> Iterator[tuple[Liar, str, Liar, str]]:
    """Two of them with their hosts; the first one's credentials are in Docker's settings."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    def serve(liar: Liar) -> ThreadingHTTPServer:
        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                liar.received.append(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
                given = self.headers.get("Authorization")
                liar.asked.append((self.command, self.path, given))
                make = next((make for part, make in liar.answers.items() if part in self.path), None)
                code, head, body = make(given) if make else (404, {}, b"")
                self.send_response(code)
                for name, value in {"Content-Length": str(len(body)), **head}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_HEAD = do_POST = do_PUT = answer

            def log_message(self, *given) -> None:
                return

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setenv("KVQ_HOME", str(tmp_path))
    first, second = Liar(), Liar()
    servers = [serve(first), serve(second)]
    hosts = [f"127.0.0.1:{server.server_port}" for server in servers]
    auth = base64.b64encode(b"me:canary").decode()
    monkeypatch.setenv("DOCKER_AUTH_CONFIG", json.dumps({"auths": {hosts[0]: {"auth": auth}}}))
    yield first, hosts[0], second, hosts[1]
    for server in servers:
        server.shutdown()
        server.server_close()


BASIC = "Basic " + base64.b64encode(b"me:canary").decode()
LIST = (200, {}, b'{"name":"x","tags":["n.a"]}')


def challenged(header: str, wanted: str):
    return lambda given: LIST if given == wanted else (401, {"WWW-Authenticate": header}, b"")


def test_credentials_are_docker_s_and_sent_when_asked_for(liars, monkeypatch, tmp_path):
    first, host, _, _ = liars
    first.answers["tags/list"] = challenged('Basic realm="x"', BASIC)
    assert Repository(f"{host}/x").tags() == {"n.a"}
    assert [given for _, _, given in first.asked] == [None, BASIC]
    monkeypatch.delenv("DOCKER_AUTH_CONFIG")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with pytest.raises(PermissionError, match="docker login") as caught:
        Repository(f"{host}/x").tags()
    assert "canary" not in str(caught.value)
    (tmp_path / "config.json").write_text(json.dumps({"credHelpers": {host: "kvq-test"}}))
    helper = tmp_path / "docker-credential-kvq-test"
    helper.write_text('#!/bin/sh\nread host\necho "{\\"Username\\": \\"me\\", \\"Secret\\": \\"canary\\"}"\n')
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert Repository(f"{host}/x").tags() == {"n.a"}
    helper.write_text('#!/bin/sh\necho "{\\"Username\\": \\"<token>\\", \\"Secret\\": \\"canary\\"}"\n')
    token = json.dumps({"auths": {host: {"auth": "bWU6", "identitytoken": "canary"}}}).encode()
    for settings, said, kind in ((b'{"auths": 7}', "cannot be used", RuntimeError),
                                 (b"\xff\xfe{", "cannot be used", RuntimeError),
                                 (token, "identity token", PermissionError),
                                 (b'{"credsStore": "kvq-test"}', "identity token", PermissionError)):  # fmt: skip
        (tmp_path / "config.json").write_bytes(settings)
        with pytest.raises(kind, match=f"Docker's settings.* {said}") as caught:
            Repository(f"{host}/x").tags()
        assert "canary" not in str(caught.value)


def test_a_user_of_no_name_has_a_password(liars, monkeypatch):
    first, host, second, other = liars
    nameless = base64.b64encode(b":canary").decode()
    monkeypatch.setenv("DOCKER_AUTH_CONFIG", json.dumps({"auths": {host: {"auth": nameless}}}))
    first.answers["tags/list"] = challenged("Basic", f"Basic {nameless}")
    assert Repository(f"{host}/x").tags() == {"n.a"}
    first.answers["tags/list"] = challenged(f'Bearer realm="http://{other}/token"', "Bearer abc")
    second.answers["/token"] = lambda given: (200, {}, b'{"token":"abc"}')
    assert Repository(f"{host}/x").tags() == {"n.a"} and second.asked == [("GET", "/token?", f"Basic {nameless}")]


@pytest.mark.parametrize("host, key", [
    ("host:5000", "https://host:5000"), ("host:5000", "host:5000/v2/"),
    ("registry-1.docker.io", "registry-1.docker.io"), ("registry-1.docker.io", "https://index.docker.io/v1/"),
])  # fmt: skip
def test_keys_of_docker_s_settings(host: str, key: str, monkeypatch):
    entry = {"auth": base64.b64encode(b"me:canary").decode()}
    monkeypatch.setenv("DOCKER_AUTH_CONFIG", json.dumps({"auths": {"host": {"auth": "eDp5"}, key: entry}}))
    assert Repository(f"{host}/x")._user() == ("me", "canary")
    assert Repository("other/x")._user() is None


def test_loopback_is_asked_without_a_proxy(liars, monkeypatch):
    first, host, second, other = liars
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://{other}")
    monkeypatch.setattr("kvq_runtime.registry.oci.client._opener", urllib.request.build_opener(Stay))
    for header, wanted in (("Basic", BASIC), (f'Bearer realm="HTTP://{host}/token"', "Bearer abc")):
        first.answers = {"tags/list": challenged(header, wanted), "/token": lambda _: (200, {}, b'{"token":"abc"}')}
        assert Repository(f"{host}/x").tags() == {"n.a"} and second.asked == []


def test_only_a_registry_says_that_there_are_no_tags(liars):
    first, host, _, _ = liars
    with pytest.raises(RuntimeError, match=r"/v2/ answers 404, as no OCI registry does; check the address"):
        Repository(f"{host}/x").tags()
    first.answers |= {"tags/list": lambda given: (404, {}, b""), "/v2/": lambda given: (401, {}, b"")}
    repository = Repository(f"{host}/x")
    first.asked.clear()
    assert repository.tags() == repository.tags() == set() and len(first.asked) == 3


def test_a_token_is_asked_for_where_the_registry_says(liars):
    first, host, second, other = liars
    header = f'Bearer realm="http://{other}/token",service="s",scope="repository:x:pull"'
    first.answers["tags/list"] = challenged(header, "Bearer abc")
    second.answers["/token"] = lambda given: (200, {}, b'{"token":"abc"}')
    assert Repository(f"{host}/x").tags() == {"n.a"}
    assert second.asked == [("GET", "/token?service=s&scope=repository%3Ax%3Apull", BASIC)]
    first.answers["tags/list"] = challenged(header.replace("http://127", "ftp://127"), "Bearer abc")
    with pytest.raises(RuntimeError, match="gives tokens at ftp://127"):
        Repository(f"{host}/x").tags()
    first.answers["tags/list"] = challenged(header, "Bearer abc")
    second.answers["/token"] = lambda given: (200, {}, b'{"token":"a\\nb"}')
    with pytest.raises(RuntimeError, match="gave no token"):
        Repository(f"{host}/x").tags()
    first.answers["/v2/"] = lambda given: (401, {}, b"")  # a registry, which has no repository of this name
    second.answers["/token"] = lambda given: (404, {}, b"")
    with pytest.raises(RuntimeError, match=f"nothing is at http://{other} where it gives tokens"):
        Repository(f"{host}/x").tags()


@pytest.mark.parametrize("code, header, said, action", [
    (401, "WWW-Authenticate", 'Bearer realm="https://["', lambda repository: repository.tags()),
    (200, "Link", '<https://[>; rel="next"', lambda repository: repository.tags()),
    (202, "Location", "https://[", lambda repository: repository._upload(b"bytes", "0" * 64)),
])  # fmt: skip
def test_an_address_that_is_none_is_refused_by_name(code, header, said, action, liars):
    first, host, _, _ = liars
    first.answers["v2"] = lambda given: (code, {header: said}, LIST[2])
    with pytest.raises(RuntimeError, match=rf"oci://{host}/x: .* 'https://\[', which is no address"):
        action(Repository(f"{host}/x"))


@pytest.mark.parametrize("helped", [False, True])
def test_an_identity_token_buys_a_token_for_the_registry(helped, liars, monkeypatch, tmp_path):
    """As distribution's specification has it: a form that is posted to where tokens are given, and nowhere else."""
    first, host, second, other = liars
    entry = {"credsStore": "kvq-test"} if helped else {"auths": {host: {"auth": "bWU6", "identitytoken": "canary"}}}
    helper = tmp_path / "docker-credential-kvq-test"
    helper.write_text('#!/bin/sh\necho "{\\"Username\\": \\"<token>\\", \\"Secret\\": \\"canary\\"}"\n')
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("DOCKER_AUTH_CONFIG", json.dumps(entry))
    header = f'Bearer realm="http://{other}/token",service="s",scope="repository:x:pull,push"'
    first.answers["tags/list"] = challenged(header, "Bearer abc")
    second.answers["/token"] = lambda given: (200, {}, b'{"access_token":"abc","expires_in":300}')
    assert Repository(f"{host}/x").tags() == {"n.a"}
    assert second.asked == [("POST", "/token", None)] and all("canary" not in str(one) for one in first.asked)
    assert parse_qs(second.received[-1].decode()) == {
        "grant_type": ["refresh_token"], "refresh_token": ["canary"], "client_id": ["kvq"], "service": ["s"],
        "scope": ["repository:x:pull,push"],
    }  # fmt: skip
    second.answers["/token"] = lambda given: (400, {}, b'{"error":"invalid_grant canary"}')
    with pytest.raises(PermissionError, match=f"identity token .* not accepted .*docker login {host}") as caught:
        Repository(f"{host}/x").tags()
    assert "canary" not in str(caught.value)
    first.answers["/v2/"] = lambda given: (401, {}, b"")
    for code in (404, 405):  # without OAuth; it is not the repository that is not there
        second.answers["/token"] = lambda given, code=code: (code, {}, b"canary")
        with pytest.raises(
            PermissionError, match=f"not accepted .{code}.; `docker login {host}` with a pass"
        ) as caught:
            Repository(f"{host}/x").tags()
        assert "canary" not in str(caught.value)
    first.answers["tags/list"] = challenged(header.replace("http://127", "ftp://127"), "Bearer abc")
    with pytest.raises(RuntimeError, match="gives tokens at ftp://127"):
        Repository(f"{host}/x").tags()


def test_a_redirect_of_a_blob_goes_without_credentials_and_no_other_goes(liars):
    first, host, second, other = liars
    data = b"bytes"
    digest = sha256(data).hexdigest()
    to = (307, {"Location": f"http://{other}/elsewhere"}, b"")
    first.answers["blobs"] = lambda given: to if given == BASIC else (401, {"WWW-Authenticate": "Basic"}, b"")
    second.answers["elsewhere"] = lambda given: (200, {}, data)
    repository = Repository(f"{host}/x")
    assert b"".join(repository.pieces(digest, 99)) == data
    assert second.asked == [("GET", "/elsewhere", None)]
    first.answers["tags/list"] = lambda given: to
    with pytest.raises(RuntimeError, match="answered with 307"):
        repository.tags()
    for place in ("file:///etc/passwd", "ftp://127.0.0.1/x"):
        first.answers["blobs"] = lambda given, place=place: (307, {"Location": place}, b"")
        with pytest.raises(RuntimeError, match="not https"):
            list(repository.pieces(digest, 99))
    first.answers["blobs"] = lambda given: (307, {"Location": f"http://{host}/v2/x/blobs/a"}, b"")
    with pytest.raises(RuntimeError, match="answered with 307"):
        list(repository.pieces(digest, 99))
    assert len(second.asked) == 1


def test_an_upload_goes_to_no_other_origin(liars):
    first, host, second, other = liars
    first.answers["uploads"] = lambda given: (202, {"Location": f"http://{other}/put"}, b"")
    with pytest.raises(RuntimeError, match="another origin"):
        Repository(f"{host}/x").put_blob(b"bytes")
    assert second.asked == []


def test_answers_are_limited(liars, monkeypatch):
    first, host, _, other = liars
    repository = Repository(f"{host}/x")
    first.answers["blobs"] = lambda given: (200, {}, b"x" * 100)
    with pytest.raises(RuntimeError, match="sends more than the 99 bytes"):
        list(repository.pieces("0" * 64, 99))
    monkeypatch.setattr("kvq_runtime.registry.hub.ask.ANSWER", 99)
    first.answers["tags/list"] = lambda given: (200, {}, b'{"tags":[%s]}' % (b'"a",' * 50 + b'"a"'))
    with pytest.raises(RuntimeError, match="sends more than"):
        repository.tags()
    monkeypatch.setattr("kvq_runtime.registry.hub.ask.ANSWER", 1 << 20)
    first.answers["tags/list"] = lambda given: (200, {}, b"<html>")
    with pytest.raises(ArtifactError, match="invalid JSON"):
        repository.tags()
    monkeypatch.setattr("kvq_runtime.registry.hub.ask.PAGES", 3)
    first.answers["tags/list"] = lambda given: (
        200,
        {"Link": f'<http://{other}/v2/x/tags/list?n=1>; rel="next"'},
        LIST[2],
    )
    with pytest.raises(RuntimeError, match="more than 3 pages"):
        repository.tags()
    assert {path for _, path, _ in first.asked if "n=1" in path} and not liars[2].asked, "pages are of one origin"


def paged(given: list[tuple[dict[str, str], list[str]]]):
    """Pages of tags one after the other; then there are none (404)."""
    pages = iter([(200, head, json.dumps({"tags": tags}).encode()) for head, tags in given])
    return lambda _: next(pages, (404, {}, b""))


@pytest.mark.parametrize("link", [
    '</v2/x/tags/list?last=a>; rel="next"', '</v2/x/tags/list?last=a>; title="a, b"; rel="next"',
    '</v2/>; rel="start", </v2/x/tags/list?last=a> ; REL=Next', '<list?last=a>; rel="last next"',
    '<https://127.0.0.1//v2/x/tags/list?last=a>; rel="next"',
])  # fmt: skip
def test_every_page_of_tags_is_read(link: str, liars):
    first, host, _, _ = liars
    first.answers["tags/list"] = paged([({"Link": link}, ["n.a"]), ({}, ["n.b"])])
    assert Repository(f"{host}/x").tags() == {"n.a", "n.b"}
    assert first.asked[1][1].lstrip("/") == "v2/x/tags/list?last=a"
    first.answers["tags/list"] = paged([({"Link": link}, ["n.a"])])
    with pytest.raises(RuntimeError, match=r"list of tags breaks off \(404\)"):
        Repository(f"{host}/x").tags()


def test_after_a_full_page_there_is_another_or_nothing_new(liars, monkeypatch):
    monkeypatch.setattr("kvq_runtime.registry.oci.client.PAGE", 2)
    first, host, _, _ = liars
    for pages in ([["a", "b"], ["c"]], [["a", "b"], ["c", "a"], []], [["a", "b", "c"], ["a", "b", "c"]]):
        first.asked.clear()
        first.answers["tags/list"] = paged([({}, page) for page in pages])
        assert Repository(f"{host}/x").tags() == {"a", "b", "c"}
        assert len(first.asked) == len(pages) and first.asked[1][1] == f"/v2/x/tags/list?n=2&last={pages[0][-1]}"


def test_what_may_pass_is_tried_again(liars):
    first, host, _, _ = liars
    answers = [(503, {}, b""), (429, {}, b""), LIST]
    first.answers["tags/list"] = lambda given: answers.pop(0)
    assert Repository(f"{host}/x").tags() == {"n.a"}
    first.answers["tags/list"] = lambda given: (500, {}, b"canary")
    with pytest.raises(RuntimeError, match="answered with 500") as caught:
        Repository(f"{host}/x").tags()
    assert "canary" not in str(caught.value) and len(first.asked) == 3 + 4
