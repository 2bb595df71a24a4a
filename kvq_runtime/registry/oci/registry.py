"""Keep artifacts in a repository of an OCI registry: see `tree`. Needs no extra.

Every file is a blob, read by its digest alone; a tag says what it is, and its manifest keeps the registry from removing
it. No tag is written twice with other content, so nothing that was written is replaced:

    n.<name>                                              there is such a name
    e.<digest of the name>.<number>.<draw>.<digest>.try   an event is to have this number; its manifest has its files
                                                    .set  it has it
                                                    .out  it has not, whatever else is said
    f.<kind>.<sha256>.<digest>                            a record: kind e, s or r, and what it is about

(Digests are in base64url, to fit into a tag.) OCI knows no write on a condition. So a publisher *tries*: it writes its
try, lists the tags, and *sets* its event only if its try is the only one for this number that is not out. Of two that
try, whoever lists later sees the other one; so one at most sees itself alone. Of several the least in order waits for
the others, which put themselves out and decide again. A try of a killed publisher is put out by whoever has seen it
for LEASE seconds by its own clock; a publisher sets only within PATIENCE seconds of its try, and then looks again.

Guaranteed: all readers who see the same tags see the same state. Of those who claim one number at most one is told that
it has it, and what it was told stays; if a list of tags that is asked for after a tag was written has that tag, which
every change checks for its own; if clocks of machines run alike, to a sixth; and if nobody moves or removes tags, as a
rule of retention does. It is told so only of a list that came within LEASE - PATIENCE seconds of its try; later, that
there was no answer. Two events that are set under one number, which can only come of removed tags or of lists that lag,
are damage that every reader refuses. Whoever may write to the repository can write any event.

What remains: a set that takes effect more than LEASE - PATIENCE seconds after it was begun, as when the publisher's
machine sleeps while it sends, may be put out after readers saw it. Nobody was told of it, but an event that was written
upon it leaves a gap, which every reader refuses.
"""

import base64
import logging
import random
import re
import time
from collections.abc import Mapping, Set
from contextlib import suppress
from hashlib import sha256 as hash_of
from typing import BinaryIO

from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.registry import reference
from kvq_runtime.registry.events import Event, Publish, Version
from kvq_runtime.registry.oci.client import EMPTY, Repository
from kvq_runtime.registry.place import Finding
from kvq_runtime.registry.tree import BLOBS, CachedTree, kept

PATIENCE, LEASE = 30.0, 180.0  # seconds
KINDS = {"e": "evaluations", "s": "signatures", "r": "remarks"}
_log = logging.getLogger(__name__)
_DIGEST = r"([A-Za-z0-9_-]{43})"
_TRY = re.compile(rf"(e\.{_DIGEST}\.([0-9]{{8}})\.[0-9a-f]{{8}}\.{_DIGEST})\.(try|set|out)")
_RECORD = re.compile(rf"f\.([{''.join(KINDS)}])\.{_DIGEST}\.{_DIGEST}")


class OciRegistry(CachedTree):
    """A registry in a repository of an OCI registry, `root` is "host/repository", which the first publish creates.

    Every request may raise PermissionError, or RuntimeError where the registry does not answer.
    """

    kind = reference.OCI
    restore = "ask who runs the registry for a copy; later events are kept, and nothing was removed"

    def __init__(self, root: str):
        super().__init__(root)
        self._repository = Repository(root)
        self._paths: dict[str, str] = {}  # digests by path, as last listed
        self._seen: dict[str, float] = {}  # when a try of another publisher was seen first

    # ---- reading

    def names(self) -> list[str]:
        """Every name with at least one event."""
        return self.entries("names")

    def entries(self, folder: str) -> list[str]:
        """The names right below a folder, in order, as tags say now."""
        self._paths = _paths(self._repository.tags())
        inside = (path.removeprefix(f"{folder}/") for path in self._paths if path.startswith(f"{folder}/"))
        return sorted({path.partition("/")[0] for path in inside})

    def has(self, path: str) -> bool:
        """True if a blob, or what a tag names, is there."""
        if path.startswith(f"{BLOBS}/"):
            return self._repository.has(path.removeprefix(f"{BLOBS}/"))
        return path in _paths(self._repository.tags())

    def content(self, path: str, limit: int) -> bytes:
        """All of a small file, from the cache or the registry, its digest checked."""
        if path not in self._paths:
            self._paths = _paths(self._repository.tags())
        if path not in self._paths:
            raise NotFound(f"{self.address(path)}: no tag has it")
        sha256 = self._paths[path]
        with suppress(ArtifactError):
            data = files.read(kept(sha256), limit)
            if hash_of(data).hexdigest() == sha256:
                return data
        try:
            data = self.first(sha256, limit + 1)
        except NotFound:
            raise NotFound(f"{self.address(path)}: its blob is missing") from None
        if len(data) > limit:
            raise ArtifactError(f"{self.address(path)}: longer than {limit} bytes")
        if hash_of(data).hexdigest() != sha256:
            raise ArtifactError(f"{self.address(path)}: sha256: the registry sent other bytes; nothing was kept")
        with suppress(OSError):  # a cache that cannot be written to is none
            folder = kept(sha256).parent
            files.make_folder(folder)
            files.replace(kept(sha256), data, folder)
        return data

    def first(self, sha256: str, count: int) -> bytes:
        """The first bytes of a blob."""
        return self._repository.retried(lambda: b"".join(self._repository.pieces(sha256, count, first=True)))

    def receive(self, sha256: str, size: int, file: BinaryIO) -> None:
        """Write a blob into a file, as it comes."""

        def whole() -> None:
            file.seek(0)
            file.truncate()
            for chunk in self._repository.pieces(sha256, size):
                file.write(chunk)

        self._repository.retried(whole)

    def check_writable(self) -> None:
        """Raise what asking the registry for its tags ends in; whether it may be written to is not asked."""
        self._repository.tags()

    # ---- changing

    def put(self, path: str, data: bytes) -> None:
        """Store a blob; without a tag that names it the registry may remove it."""
        self._repository.put_blob(data)

    def claim(self, path: str, data: bytes) -> bool:
        """Write a record; False if it is there."""
        if self.has(path):
            return False
        self._repository.put_blob(EMPTY)
        kind, about, _ = path.split("/")
        sha256 = hash_of(data).hexdigest()
        self._repository.put_blob(data)
        tag = f"f.{kind[0]}.{_short(about)}.{_short(sha256)}"
        self._repository.put_manifest(tag, {f"{sha256}.json": (sha256, len(data))})
        return True

    def claim_event(self, event: Event) -> bool:
        """Write the event of a number; False if another publisher was first."""
        repository, number, data = self._repository, event.number, event.to_bytes()
        repository.put_blob(EMPTY)
        of_name = _short(hash_of(event.name.encode()).hexdigest())
        if not self._free(event.name, of_name, number):
            return False
        sha256 = hash_of(data).hexdigest()
        named = {"event.json": (sha256, len(data))}
        if isinstance(event.change, Publish):
            named |= Version.of(event.change, event.at).content
        repository.put_blob(data)
        own = f"e.{of_name}.{number:08}.{random.SystemRandom().getrandbits(32):08x}.{_short(sha256)}"
        began = _clock()
        try:
            repository.put_manifest(f"{own}.try", named)
            alone = self._alone(own, of_name, number, began)
        except BaseException:
            with suppress(Exception):  # it was not set, and is never
                repository.put_manifest(f"{own}.out", tries=1)
            raise
        if not alone:
            self._keep(f"{own}.out")
            time.sleep(random.uniform(0.05, 0.5))
            return False
        with suppress(RuntimeError):  # whether it came is in the list
            repository.put_manifest(f"{own}.set", tries=1, may=lambda: _clock() - began < PATIENCE)
        said = _tries(repository.tags(), of_name, number).get(own, set())
        late = _clock() - began > LEASE - PATIENCE  # another publisher may have had a list without it, and put it out
        if "out" not in said and ("set" not in said or late):
            raise RuntimeError(
                f"{self.url}: no answer to event {number} of {event.name}; look at its history, and retry"
            )
        return "out" not in said

    def _alone(self, own: str, of_name: str, number: int, began: float) -> bool:
        """True as soon as a try is the only one; False if it has to go: another is set or less, or it takes long."""
        while _clock() - began < PATIENCE:
            found = _tries(self._repository.tags(), of_name, number)
            if "try" not in found.get(own, ()):
                raise RuntimeError(
                    f"{self.url}: its list of tags lags behind, by which publishers keep out of each other's way; use "
                    "a registry whose list does not, a bucket or a folder"
                )
            open_ = [one for one, said in found.items() if "out" not in said]
            if open_ == [own]:
                return _clock() - began < PATIENCE
            if own not in open_ or min(open_) != own or any("set" in found[one] for one in open_):
                return False
            time.sleep(random.uniform(0.05, 0.3))
        return False

    def _free(self, name: str, of_name: str, number: int) -> bool:
        """Wait for those who try a number, and put out who died; False if one of them has it then."""
        while True:
            asked = _clock()  # what is set while the list is on its way is not in it
            tags = self._repository.tags()
            found = _tries(tags, of_name, number)
            open_ = {one: said for one, said in found.items() if "out" not in said}
            taken = any("set" in said for said in open_.values())
            if taken or not open_:
                self._keep(f"n.{name}", tags)
                return not taken
            new = min(open_) not in self._seen
            for one in open_:
                if asked - self._seen.setdefault(one, _clock()) > LEASE:
                    self._keep(f"{one}.out", tags)
            if new:
                _log.warning(
                    "%s: somebody else changes %s; waiting, at most %d s if it was killed", self.url, name, LEASE
                )
            time.sleep(random.uniform(0.2, 1.0))

    def _keep(self, tag: str, tags: Set[str] = frozenset()) -> None:
        """Write a tag that others may write too, unless these have it: some registries let none be written twice."""
        if tag in tags:
            return
        try:
            self._repository.put_manifest(tag)
        except (PermissionError, RuntimeError):
            if tag not in self._repository.tags():
                raise

    # ---- upkeep

    def changed(self) -> dict[str, float | None]:
        """Nothing: the blobs of a repository cannot be listed."""
        return {}

    def remove_blobs(self, orphans: list[str], before: float) -> list[str]:
        """Remove nothing: the registry itself removes blobs that no manifest names."""
        return []

    def _examine_blobs(self, named: Mapping[str, tuple[str, Version, str]], readable: bool) -> list[Finding]:
        advice = "publish the same bytes again, or yank the version"
        found = []
        for sha256, version in sorted(named.items()):
            found += self._attempt(f"{BLOBS}/{sha256}", advice, self._check_blob, sha256, *version)
        return found


def _paths(tags: set[str]) -> dict[str, str]:
    """{path: digest} of all that tags name; two events of one number have paths that are those of none."""
    paths, names = dict[str, str](), {}
    tries = dict[tuple[str, str], list[str]]()
    for tag in tags:
        if tag.startswith("n.") and reference.is_name(tag[2:]):
            names[_short(hash_of(tag[2:].encode()).hexdigest())] = tag[2:]
        elif found := _RECORD.fullmatch(tag):
            digest = _long(found[3])
            paths[f"{KINDS[found[1]]}/{_long(found[2])}/{digest}.json"] = digest
        elif (found := _TRY.fullmatch(tag)) and found[5] == "set" and f"{found[1]}.out" not in tags:
            tries.setdefault((found[2], found[3]), []).append(_long(found[4]))
    for (of_name, number), digests in tries.items():
        for digest in digests if of_name in names else []:
            twice = f" of {digest}" if len(digests) > 1 else ""
            paths[f"names/{names[of_name]}/events/{number}{twice}.json"] = digest
    return paths


def _tries(tags: set[str], of_name: str, number: int) -> dict[str, set[str]]:
    """{try: what is said of it, "try", "set" or "out"} of all for a number."""
    found = dict[str, set[str]]()
    for tag in tags:
        if tag.startswith(f"e.{of_name}.{number:08}.") and (match := _TRY.fullmatch(tag)):
            found.setdefault(match[1], set()).add(match[5])
    return found


def _clock() -> float:
    """Seconds, those in which the machine sleeps among them where the system counts them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _short(sha256: str) -> str:
    """A digest as tags have it, 43 characters."""
    return base64.urlsafe_b64encode(bytes.fromhex(sha256)).decode().rstrip("=")


def _long(short: str) -> str:
    """A digest as paths have it, 64 hexadecimal digits."""
    return base64.urlsafe_b64decode(f"{short}=").hex()
