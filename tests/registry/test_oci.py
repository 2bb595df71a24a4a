"""What is an OCI registry's own: tries, tags and damage there, of Debian's docker-registry. `make test-oci`."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from email.message import Message
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_artifact as tiny
from patience import PATIENCE

from kvq_runtime.cli import main as cli
from kvq_runtime.errors import ArtifactError, Conflict
from kvq_runtime.registry import resolve
from kvq_runtime.registry.events import Promote, Publish
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.oci import registry as module
from kvq_runtime.registry.oci.client import Repository
from kvq_runtime.registry.oci.registry import OciRegistry
from kvq_runtime.registry.reference import Reference, parse

NAME = "tiny-2bit"
PROGRAM = Path(__file__).parents[2] / "build" / "oci" / "usr" / "bin" / "docker-registry"


@pytest.fixture
def store(oci_registry: OciRegistry) -> OciRegistry:
    return oci_registry


def test_copy_of_a_name_where_other_repositories_are_refused(store: OciRegistry, tmp_path, monkeypatch, capsys):
    tags = Repository.tags

    def refuse(self) -> set[str]:
        if self.root != store.root:
            raise PermissionError(f"oci://{self.root}: log in")
        return tags(self)

    names = (NAME, "tiny..2bit")  # no address of a repository can end as the second does
    for name in names:
        store.publish(name, tiny.data())
    monkeypatch.setattr(Repository, "tags", refuse)
    for name in names:
        assert cli.main(["copy", "--all", f"{store.url}/{name}", (tmp_path / "to").as_uri()]) == 0, capsys.readouterr()
    assert LocalRegistry(tmp_path / "to").names() == sorted(names)
    for address in (f"{store.url}/other", f"{store.url}/other/{NAME}", store.url.removesuffix("/kvq")):
        assert cli.main(["copy", "--all", address, (tmp_path / "to").as_uri()]) != 0
        assert f"{address}: log in" in capsys.readouterr().err


def test_addresses(monkeypatch, capsys):
    for url in ("oci://", "oci://host", "oci://host/A", "oci://host/../x", "oci://u:p@host/x", "oci://host//x"):
        with pytest.raises(ValueError, match=r"use oci://host/repository"):
            resolve.open_registry(url)
    with pytest.raises(ValueError, match=r"use oci://host/repository"):
        parse("oci://host/name")
    assert parse("oci://host:5000/a/b/tiny@1.0.0") == Reference("tiny", "version", "1.0.0", "oci://host:5000/a/b")
    for root, origin in (("ghcr.io/x", "https://ghcr.io"), ("127.0.0.1:5000/x", "http://127.0.0.1:5000"),
                         ("localhost.evil.org/x", "https://localhost.evil.org")):  # fmt: skip
        assert Repository(root)._origin == origin
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert cli.main(["list", "--registry", "oci://localhost:9/x"]) == 1
    assert "no answer from http://localhost:9" in capsys.readouterr().err


# ---- several publishers


class Dead(BaseException):
    """A process ends, and does nothing any more."""


class Turns:
    """Publishers of one process, each request of whom is one step: who is next is drawn. The clock counts steps.

    Nobody waits for more than a minute of that clock: a request takes effect within `LEASE` - `PATIENCE`, or never.
    """

    def __init__(self, seed: int):
        self.draw, self.now, self.turn = random.Random(seed), 0.0, threading.Condition()
        self.waiting, self.alive, self.next = dict[int, float](), set[int](), None
        self.tags, self.blobs, self.dies = set[str](), dict[str, bytes](), dict[int, int]()

    def step(self) -> None:
        """Wait for this thread's turn."""
        me = threading.get_ident()
        with self.turn:
            if me not in self.alive:
                return
            self.waiting[me] = self.now
            self._choose()
            assert self.turn.wait_for(lambda: self.next == me, PATIENCE)
            self.next = None
            self.now += 0.5
            self.dies[me] = self.dies.get(me, 1 << 30) - 1
            if self.dies[me] < 0:
                raise Dead

    def _choose(self) -> None:
        if self.next is None and self.waiting and self.waiting.keys() >= self.alive:
            longest = min(self.waiting, key=lambda one: self.waiting[one])
            late = self.now - self.waiting[longest] > 60
            self.next = longest if late else self.draw.choice(sorted(self.waiting))
            del self.waiting[self.next]
            self.turn.notify_all()

    def leave(self) -> None:
        with self.turn:
            self.alive.discard(threading.get_ident())
            self._choose()

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.step()


class Memory(Repository):
    """A repository in memory, in which each request is a turn."""

    def __init__(self, turns: Turns):
        super().__init__("localhost/x")
        self.turns = turns

    def tags(self) -> set[str]:
        self.turns.step()
        return set(self.turns.tags)

    def put_manifest(self, tag, files=None, tries=1, may=lambda: True) -> None:
        if not may():
            raise RuntimeError("too late")
        self.turns.step()
        self.turns.tags.add(tag)

    def put_blob(self, data: bytes) -> None:
        self.turns.blobs[sha256(data).hexdigest()] = data

    def has(self, digest: str) -> bool:
        return digest in self.turns.blobs

    def pieces(self, digest: str, limit: int, first: bool = False) -> Iterator[bytes]:
        yield self.turns.blobs[digest][:limit]


@pytest.mark.parametrize("seed", range(40))
def test_in_any_order_of_requests_each_number_is_of_one(seed: int, monkeypatch, tmp_path):
    """Three publishers, one of whom may die at any request: what a publisher was told is there once, in one order."""
    monkeypatch.setenv("KVQ_HOME", str(tmp_path))
    turns, told = Turns(seed), dict[str, list[str]]()
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=turns.sleep))
    monkeypatch.setattr(module, "_clock", lambda: turns.now)

    def opened() -> OciRegistry:
        found = OciRegistry("localhost/x")
        found._repository = Memory(turns)
        return found

    place, doomed = opened(), turns.draw.randrange(6)
    place.change(NAME, lambda state: Publish("1.0.0", "0" * 64, 1))
    gate = threading.Barrier(3)

    def work(number: int) -> None:
        turns.alive.add(threading.get_ident())
        if number == doomed:
            turns.dies[threading.get_ident()] = random.Random(seed).randrange(12)
        gate.wait(PATIENCE)
        try:
            own = opened()
            for count in range(2):
                state = own.change(NAME, lambda state, alias=f"a{number}-{count}": Promote(alias, "1.0.0"))
                told.setdefault(f"a{number}", []).append(getattr(state.events[-1].change, "alias", ""))
        except Dead:
            pass
        finally:
            turns.leave()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(PATIENCE)
    aliases = [getattr(event.change, "alias", "") for event in place.state(NAME).events[1:]]
    assert all(told[f"a{number}"] == [f"a{number}-0", f"a{number}-1"] for number in range(3) if number != doomed)
    assert len(aliases) == len(set(aliases)) and set(aliases) >= {one for each in told.values() for one in each}
    assert len(aliases) >= (4 if doomed < 3 else 6)


def interleaved(store: OciRegistry, monkeypatch, step: str, rival: Callable[[], object]) -> list[str]:
    """Let a rival act once, just after this publisher's tag with this end was written."""
    real, came = Repository.put_manifest, list[str]()

    def put(self, tag, *given, **more):
        real(self, tag, *given, **more)
        if tag.endswith(step) and not came:
            came.append(tag)
            rival()

    monkeypatch.setattr(Repository, "put_manifest", put)
    return came


def test_two_tries_one_of_which_goes(store: OciRegistry, monkeypatch):
    """The rival's whole publish begins after the try, and waits for it: in the end both are there."""
    done = list[str]()
    rival = threading.Thread(target=lambda: done.append(OciRegistry(store.root).publish(NAME, tiny.data(1)).version))
    came = interleaved(store, monkeypatch, ".try", rival.start)
    made = store.publish(NAME, tiny.data(0)).version
    rival.join(PATIENCE)
    assert came and sorted([made, *done]) == ["1.0.0", "1.0.1"] == sorted(store.state(NAME).versions)
    tags = store._repository.tags()
    tried = {tag[:-4] for tag in tags if tag.endswith(".try")}
    assert all((f"{one}.set" in tags) != (f"{one}.out" in tags) for one in tried), "whoever tried in vain is out"


@pytest.mark.parametrize("least", [True, False])
def test_of_two_that_see_each_other_the_least_stays(least: bool, store: OciRegistry, monkeypatch):
    """The other one's try is written at the same moment; it goes out when the least waits for it."""
    other = f"e.{module._short(sha256(NAME.encode()).hexdigest())}.00000001.{'ffffffff' if least else '00000000'}"
    other += f".{module._short('0' * 64)}"
    repository = Repository(store.root)
    interleaved(store, monkeypatch, ".try", lambda: repository.put_manifest(f"{other}.try"))
    threading.Timer(1.0, lambda: Repository.put_manifest(repository, f"{other}.out")).start()
    assert store.publish(NAME, tiny.data()).version == "1.0.0"
    tags = store._repository.tags()
    assert len([tag for tag in tags if tag.endswith(".try")]) == (2 if least else 3)
    assert len([tag for tag in tags if tag.endswith(".set")]) == 1 and store.examine() == []


def test_a_killed_publisher_is_put_out_after_the_lease(store: OciRegistry, monkeypatch):
    """Between try and set: the old state stands, and the next one waits as long as the killed one might still set."""
    with monkeypatch.context() as patched:
        patched.setattr(OciRegistry, "_alone", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        patched.setattr(module, "suppress", lambda *kinds: (_ for _ in ()).throw(KeyboardInterrupt))  # it dies at once
        with pytest.raises(KeyboardInterrupt):
            store.publish(NAME, tiny.data(0))
    assert store.state(NAME).versions == {} and store.names() == []
    monkeypatch.setattr(module, "LEASE", 2.0)
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    began = time.monotonic()
    assert OciRegistry(store.root).publish(NAME, tiny.data(1)).version == "1.0.0"
    assert time.monotonic() - began > 2.0
    assert {version.sha256 for version in store.state(NAME).versions.values()} == {sha256(tiny.data(1)).hexdigest()}


def test_an_interrupted_publisher_leaves_nothing_to_wait_for(store: OciRegistry, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(OciRegistry, "_alone", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.publish(NAME, tiny.data(0))
    assert store.publish(NAME, tiny.data(1)).version == "1.0.0" and len(store.state(NAME).events) == 1


def immutable(monkeypatch) -> list[str]:
    """Let no tag be written twice, as some registries do; returns those that were written."""
    real, written = Repository.put_manifest, list[str]()

    def put(self, tag, *given, **more) -> None:
        if tag in written:
            raise RuntimeError("PUT was answered with 409")
        written.append(tag)
        real(self, tag, *given, **more)

    monkeypatch.setattr(Repository, "put_manifest", put)
    return written


def test_no_tag_is_written_twice(store: OciRegistry, monkeypatch):
    """The name of a first event that did not come, and the end of one that somebody else has put out meanwhile."""
    immutable(monkeypatch)
    test_an_interrupted_publisher_leaves_nothing_to_wait_for(store, monkeypatch)
    alone, others = OciRegistry._alone, list[str]()

    def put_out(self, own, *given) -> bool:
        if others:
            return alone(self, own, *given)
        others.append(own)
        self._repository.put_manifest(f"{own}.out")
        return False

    monkeypatch.setattr(OciRegistry, "_alone", put_out)
    assert store.publish(NAME, tiny.data(2)).version == "1.0.1" and others


def test_a_name_whose_tag_was_removed_is_back_after_a_publish(store: OciRegistry, monkeypatch):
    store.publish(NAME, tiny.data(0))
    tags, written = Repository.tags, list[str]()
    with monkeypatch.context() as patched:
        patched.setattr(Repository, "tags", lambda self: tags(self) - (set() if written else {f"n.{NAME}"}))
        assert store.names() == []
        written = immutable(patched)
        assert store.publish(NAME, tiny.data(1)).version == "1.0.1" and written[0] == f"n.{NAME}"
    assert len(store.state(NAME).events) == 2


def test_who_was_put_out_is_not_told_that_it_published(store: OciRegistry, monkeypatch):
    """It slept between its last look and its set; the event that it set counts for nobody, and it publishes again."""
    came = interleaved(
        store, monkeypatch, ".set", lambda: Repository(store.root).put_manifest(came[0].replace(".set", ".out"))
    )
    assert store.publish(NAME, tiny.data()).version == "1.0.0"
    assert len(store.state(NAME).events) == 1 and f"{came[0][:-4]}.out" in store._repository.tags()


def test_who_is_too_late_does_not_set(store: OciRegistry, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    monkeypatch.setattr("kvq_runtime.registry.registry.TRIES", 2)
    with pytest.raises(Conflict, match="other changes"):
        store.publish(NAME, tiny.data())
    assert not [tag for tag in store._repository.tags() if tag.endswith(".set")]


def test_what_is_set_while_a_list_is_on_its_way_is_not_put_out(store: OciRegistry, monkeypatch):
    """Another publisher's machine sleeps longer than the lease while the list comes, by which it waits for this one."""
    put, tags, now, other, made = Repository.put_manifest, Repository.tags, [0.0], OciRegistry(store.root), list[str]()
    monkeypatch.setattr(module, "_clock", lambda: now[0])
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None))

    def set_(self, tag, *given, **more) -> None:
        def listed() -> set[str]:
            found = tags(other._repository)
            if other._seen and not now[0]:
                now[0] = module.LEASE + 1
                put(self, tag)
            return found

        if tag.endswith(".set") and not made:
            made.append(tag)
            monkeypatch.setattr(other._repository, "tags", listed)
            made.append(other.publish(NAME, tiny.data(1)).version)
            now[0] = 0.0  # of this one
        put(self, tag, *given, **more)

    monkeypatch.setattr(Repository, "put_manifest", set_)
    assert store.publish(NAME, tiny.data(0)).version == "1.0.0" and made[1:] == ["1.0.1"]
    assert len(store.state(NAME).events) == 2 and not [tag for tag in tags(store._repository) if tag.endswith(".out")]


def test_an_event_that_is_seen_too_late_is_not_told(store: OciRegistry, monkeypatch):
    """It is set, and not out; but by now another publisher may be about to put it out."""
    now = [0.0]
    monkeypatch.setattr(module, "_clock", lambda: now[0])
    interleaved(store, monkeypatch, ".set", lambda: now.append(now.pop() + module.LEASE - module.PATIENCE + 1))
    with pytest.raises(RuntimeError, match="no answer to event 1 .*; look at its history"):
        store.publish(NAME, tiny.data())
    assert len(store.state(NAME).events) == 1 and store.publish(NAME, tiny.data()).version == "1.0.0"


def test_a_challenge_does_not_delay_the_set(store: OciRegistry, monkeypatch):
    """It takes longer to answer than a publisher may wait: the request is not made again."""
    now, send = [0.0], Repository._send

    def challenge(self, method, address, data, head):
        if not address.endswith(".set"):
            return send(self, method, address, data, head)
        now[0] += module.PATIENCE  # what credentials take
        return SimpleNamespace(status=401, headers=Message(), close=lambda: None)

    monkeypatch.setattr(module, "_clock", lambda: now[0])
    monkeypatch.setattr(Repository, "_send", challenge)
    with pytest.raises(RuntimeError, match="no answer to event 1"):
        store.publish(NAME, tiny.data())
    assert now == [module.PATIENCE]


def test_a_lost_answer_is_looked_for(store: OciRegistry, monkeypatch):
    def lose() -> None:
        raise RuntimeError("no answer")

    interleaved(store, monkeypatch, ".set", lose)
    assert store.publish(NAME, tiny.data()).version == "1.0.0" and len(store.state(NAME).events) == 1


def test_a_registry_whose_list_lags_is_not_used(store: OciRegistry, monkeypatch):
    tags = Repository.tags
    monkeypatch.setattr(Repository, "tags", lambda self: {tag for tag in tags(self) if not tag.endswith(".try")})
    with pytest.raises(RuntimeError, match="its list of tags lags behind"):
        store.publish(NAME, tiny.data())


# ---- damage


def test_two_events_of_one_number_are_refused_by_all(store: OciRegistry):
    store.publish(NAME, tiny.data(0))
    (tag,) = [tag for tag in store._repository.tags() if tag.endswith(".set")]
    data = b"{}"
    twin = f"{tag.rsplit('.', 3)[0]}.00000000.{module._short(sha256(data).hexdigest())}"
    for end in ("try", "set"):
        store._repository.put_manifest(f"{twin}.{end}")
    for action in (lambda: store.state(NAME), lambda: store.collect(0), lambda: store.publish(NAME, tiny.data(1))):
        with pytest.raises(ArtifactError, match="event: not the name of one"):
            action()
    assert store.names() == [NAME] and [one for one in store.examine() if one.level == "fault"]


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:-1] + b"?"])
@pytest.mark.parametrize("which", ["artifact", "event"])
def test_other_bytes_are_refused_and_nothing_of_them_kept(damage, which, store: OciRegistry, tmp_path, monkeypatch):
    data = tiny.data()
    version = store.publish(NAME, data)
    real, pieces = Repository.pieces, {"artifact": version.sha256}

    def sent(self, digest, *given, **more):
        whole = b"".join(real(self, digest, *given, **more))
        hit = (digest == pieces["artifact"]) == (which == "artifact")
        yield damage(whole) if hit else whole

    monkeypatch.setattr(Repository, "pieces", sent)
    with pytest.raises(ArtifactError, match=r"sha256: the (store|registry) sent"):
        resolve.resolve(NAME, store.url)
    kept = [path for path in (tmp_path / "kvq-home").rglob("*") if path.is_file()]
    assert all(sha256(path.read_bytes()).hexdigest() == path.name for path in kept)
    assert any(one.level == "fault" for one in OciRegistry(store.root).examine())
    monkeypatch.setattr(Repository, "pieces", real)
    assert resolve.resolve(NAME, store.url).path.read_bytes() == data and store.examine() == []


def test_a_removed_blob_is_told(store: OciRegistry):
    version = store.publish(NAME, tiny.data())
    address = store._repository._address(f"blobs/sha256:{version.sha256}")
    store._repository._all("DELETE", address, 0)
    (finding,) = store.examine()
    assert finding.level == "fault" and version.sha256 in finding.path and "publish the same bytes" in finding.advice
    store.publish(NAME, tiny.data())  # the same bytes
    assert store.examine() == []


def test_a_damaged_cache_is_fetched_again(store: OciRegistry, tmp_path):
    version = store.publish(NAME, tiny.data(), attachments={"README.md": b"# card"})
    store.state(NAME)
    for path in (tmp_path / "kvq-home").rglob("cache/blobs/*"):
        path.chmod(0o644)
        path.write_bytes(b"# cord")
    assert len(store.state(NAME).events) == 1 and store.attachments(NAME, version) == {"README.md": b"# card"}


def test_a_cache_that_others_use_or_that_cannot_be_written_to(store: OciRegistry, tmp_path, monkeypatch):
    """A draft of a process that is none here may be another machine's."""
    store.publish(NAME, tiny.data())
    draft = tmp_path / "kvq-home" / "cache" / "blobs" / f".99999999-{'0' * 16}.tmp"
    draft.parent.mkdir(parents=True, exist_ok=True)
    for path in draft.parent.iterdir():
        path.unlink()
    draft.write_bytes(b"half of it")
    assert len(store.state(NAME).events) == 1 and draft.exists() and len(list(draft.parent.iterdir())) == 2
    monkeypatch.setenv("KVQ_HOME", str(draft))
    assert len(store.state(NAME).events) == 1


def test_other_tags_of_a_repository_are_left_alone(store: OciRegistry):
    store.publish(NAME, tiny.data())
    for tag in ("latest", "n.UPPER", "e.x.set", "f.z.a.b"):
        store._repository.put_manifest(tag)
    assert store.names() == [NAME] and store.examine() == [] and store.collect(0) == []
