"""Remark on a name beside its events: notes and tags of its versions, and who has to agree before an alias moves.

A remark is a record of the name: a file that is named by its digest and never changed. So none contradicts another,
and a kvq that knows only events passes all of them over, where it would refuse an event of a new kind.

    remarks/<sha256 of the name>/<sha256 of file>.json
    {"schema": 1, "name": "...", "at": "2026-01-31T12:00:00Z", "by": "...", "kind": "note", ..., "replaces": [...]}

    note       version, text
    tag        version, tag
    untag      version, tag
    protect    alias, approvals    how many others have to approve of a promote; 0: the alias is protected no more
    propose    alias, version, after    the number of the event that had moved the alias last; 0: none had
    approve    proposal    the digest of a propose

`replaces` has the digests of remarks that hold no longer, so that no clock decides what does: of a tag and an untag
that came at once, the tag holds; of two protections, the one with more approvals. Only what is about the same counts: a
tag or an untag replaces those of the same version and tag, a protect those of the same alias, and nothing else has any:
what a mirror copies lifts no protection. A proposal lapses when the alias moves. The promote that was approved is an
event as any other, and is written once.

`by` is the name that somebody gives, $KVQ_USER or that of the login. It is not proved: protection keeps publishers
from mistakes, and nobody out who may write to the registry. That is done by its permissions, and by `kvq sign`.
"""

import getpass
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256 as hash_of
from pathlib import PurePath
from typing import Any

from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError, Conflict
from kvq_runtime.registry import events, reference, verdict, webhook
from kvq_runtime.registry.events import Event, Promote, State

SCHEMA = 1
LIMIT = 1 << 13  # bytes of a file
REPLACES = 64  # digests in one
RESTORE = (
    "use a newer kvq; if it is damaged, restore it from a backup, or delete it and note, tag or protect again: it may "
    "be what protects an alias, or removed a tag"
)
FIELDS: dict[str, set[str]] = {
    "note": {"version", "text"},
    "tag": {"version", "tag"},
    "untag": {"version", "tag"},
    "protect": {"alias", "approvals"},
    "propose": {"alias", "version", "after"},
    "approve": {"proposal"},
}
OF_ALIASES = "protect", "propose", "approve"
OF_VERSIONS = "note", "tag", "untag"
_SUBJECTS = {"tag": ("version", "tag"), "untag": ("version", "tag"), "protect": ("alias",)}  # of kinds that replace
_HEAD = {"schema", "name", "at", "by", "kind", "replaces"}
_TAG = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")


@dataclass(frozen=True)
class Remark:
    """A remark: its file, when and by whom it was made, what it is (its kind), and what it says, by field."""

    data: bytes = field(repr=False)
    digest: str
    at: str
    by: str
    what: str
    said: Mapping[str, Any]
    replaces: tuple[str, ...] = ()

    def about(self) -> dict[str, Any]:
        """The fields that it shares with those that it may replace, or that may replace it; none if none may."""
        return {key: self.said[key] for key in _SUBJECTS.get(self.what, ())}


@dataclass(frozen=True)
class Remarks:
    """All remarks on a name, by time."""

    all: tuple[Remark, ...]

    @cached_property
    def _holding(self) -> Mapping[tuple[str, str, Any], list[Remark]]:
        """Those that no other one replaces, by kind and by each field that they say; by kind alone under "", ""."""
        known, found = {one.digest: one for one in self.all}, defaultdict[tuple[str, str, Any], list[Remark]](list)
        pairs = [(one, known[digest]) for one in self.all for digest in one.replaces if digest in known]
        replaced = {old.digest for new, old in pairs if new.about() == old.about()}
        for one in self.all:
            for key, value in [*one.said.items(), ("", "")] if one.digest not in replaced else []:
                found[one.what, key, value].append(one)
        return found

    def holding(self, *kinds: str, **said: Any) -> list[Remark]:
        """Remarks of these kinds, that say this, and that no other one replaces."""
        key, value = next(iter(said.items()), ("", ""))
        found = [one for kind in kinds for one in self._holding.get((kind, key, value), ())]
        return [one for one in found if said.items() <= one.said.items()]

    def tags(self, version: str) -> list[str]:
        """The tags of a version, in order."""
        return sorted({one.said["tag"] for one in self.holding("tag", version=version)})

    def approvals(self, alias: str) -> int:
        """The number of others that have to approve before an alias moves; 0: nobody."""
        return max((one.said["approvals"] for one in self.holding("protect", alias=alias)), default=0)

    def proposals(self, state: State, **said: Any) -> list[Remark]:
        """Proposals, of an alias or a version if that is said, whose alias was not moved since."""
        found = self.holding("propose", **said)
        moved = {alias: state.moved(alias) for alias in {one.said["alias"] for one in found}}
        return [one for one in found if one.said["after"] == moved[one.said["alias"]]]

    def approved_by(self, proposal: Remark) -> list[str]:
        """Who else approves of a proposal, in order."""
        return sorted({one.by for one in self.holding("approve", proposal=proposal.digest)} - {proposal.by})

    def may_move(self, state: State, alias: str, version: str) -> bool:
        """True if an alias is not protected, or enough others approve of a proposal to move it to this version."""
        needed = self.approvals(alias)
        proposals = self.proposals(state, alias=alias, version=version)
        return not needed or any(len(self.approved_by(one)) >= needed for one in proposals)


# ---- files -----------------------------------------------------------------------------------------------------------


def read(registry: Any, name: str, *kinds: str, **said: Any) -> Remarks:
    """Remarks on a name, of these kinds, else of all that are known here; ArtifactError for damage of any.

    said   only those that say this, or nothing about it; what one of them may replace says the same
    The others are read and let go: however many there are, they take no memory but that of their names.
    """

    def wanted(path: PurePath, data: bytes) -> Remark | None:
        one = from_bytes(data, path, name)
        if one is None or (kinds and one.what not in kinds):
            return None
        return one if all(one.said.get(key, value) == value for key, value in said.items()) else None

    found = registry.records("remarks", _folder(name), name, wanted)
    return Remarks(tuple(sorted(found, key=lambda one: (one.at, one.digest))))


def from_bytes(data: bytes, path: PurePath, name: str = "") -> Remark | None:
    """Read a remark, of this name if one is given, from the bytes at `path`; None if its kind is not known here."""
    label, digest = f"{path}: remark", hash_of(data).hexdigest()
    if len(data) > LIMIT:
        raise ArtifactError(f"{label}: {len(data)} bytes; at most {LIMIT} are allowed")
    if path.stem != digest:
        raise ArtifactError(f"{label}: sha256 is {digest}, not that of its name; the file was changed")
    fields = strict_json.loads(data, label)
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA or not isinstance(fields.get("kind"), str):
        raise ArtifactError(f"{label}: expected schema {SCHEMA}, got {fields!r:.80}; a newer kvq may have written it")
    if fields["kind"] not in FIELDS:
        return None
    said = FIELDS[fields["kind"]]
    strict_json.keys(fields, _HEAD | said, label, checks=_CHECKS)
    if fields["name"] != name != "" or _folder(fields["name"]) != path.parent.name:
        raise ArtifactError(f"{label}: is about {fields['name']!r:.120}, but stored with another name")
    what, replaces = fields["kind"], tuple(fields["replaces"])
    if replaces and what not in _SUBJECTS:
        raise ArtifactError(f"{label}: replaces must be empty: a {what} replaces nothing")
    return Remark(data, digest, fields["at"], fields["by"].strip(), what, {key: fields[key] for key in said}, replaces)


def add(registry: Any, name: str, kind: str, replaces: list[Remark], **said: Any) -> None:
    """Make a remark, or more if it replaces more than one can, and tell. ValueError for a field that cannot be."""
    for key, value in said.items():
        _CHECKS[key](value)
    head = {"schema": SCHEMA, "name": name, "at": events.now(), "by": who(), "kind": kind}
    for start in range(0, max(len(replaces), 1), REPLACES):
        fields = head | said | {"replaces": [one.digest for one in replaces[start : start + REPLACES]]}
        registry.add_record("remarks", _folder(name), strict_json.record(fields), name)
        webhook.tell(registry.url, fields)


def who() -> str:
    """The name that one gives: $KVQ_USER, else that of the login."""
    try:
        name = os.environ.get("KVQ_USER") or getpass.getuser()
    except (KeyError, OSError):
        raise RuntimeError("this login has no name; set KVQ_USER to yours") from None
    _CHECKS["by"](name)
    return name.strip()


def _folder(name: str) -> str:
    return hash_of(reference.check_name(name).encode()).hexdigest()


def check_tag(tag: Any) -> None:
    """Raise ValueError unless this is a tag of a version."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag):
        raise ValueError(f"tag {tag!r:.80}; use 1 to 32 of a-z 0-9 . _ -, the first a letter or digit")


def _check_replaces(digests: Any) -> None:
    if not isinstance(digests, list) or len(digests) > REPLACES:
        raise ValueError(f"replaces must be a list of digests, {REPLACES} at most")
    for digest in digests:
        reference.check_sha256(digest)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "name": reference.check_name,
    "at": events.check_at,
    "by": lambda by: events.check_line("name of a person, in KVQ_USER,", by, 96),
    "replaces": _check_replaces,
    "version": reference.check_version,
    "text": lambda text: events.check_line("note", text),
    "tag": check_tag,
    "alias": reference.check_alias,
    "approvals": lambda count: events.check_count("approvals", count, 16),
    "after": lambda count: events.check_count("after", count, 10**8),
    "proposal": reference.check_sha256,
}


# ---- versions --------------------------------------------------------------------------------------------------------


def note(registry: Any, name: str, version: str, text: str) -> None:
    """Add a note, one line of 1 to 500 characters, to a version; NotFound if there is none."""
    registry.existing(name).get(version)
    add(registry, name, "note", [], version=version, text=text)


def tag(registry: Any, name: str, version: str, tag: str, remove: bool = False) -> list[str]:
    """Give a version a tag, or take it away; returns its tags. Nothing is written where that is so already."""
    registry.existing(name).get(version)
    check_tag(tag)
    found = read(registry, name, "tag", "untag", version=version)
    if remove == (tag in found.tags(version)):
        replaced = found.holding("tag", "untag", version=version, tag=tag)
        add(registry, name, "untag" if remove else "tag", replaced, version=version, tag=tag)
        found = read(registry, name, "tag", "untag", version=version)
    return found.tags(version)


def copy(source: Any, name: str, versions: Iterable[str], target: Any) -> None:
    """Copy notes and tags of versions, as they were made, to another registry; each is read once, and let go."""
    known, wanted = set[str](), set(versions)

    def know(path: PurePath, data: bytes) -> None:
        from_bytes(data, path, name)
        known.add(path.stem)

    def give(path: PurePath, data: bytes) -> None:
        one = from_bytes(data, path, name)
        if one and one.what in OF_VERSIONS and one.said["version"] in wanted and one.digest not in known:
            target.add_record("remarks", _folder(name), data, name)

    target.records("remarks", _folder(name), name, know)
    source.records("remarks", _folder(name), name, give)


# ---- aliases ---------------------------------------------------------------------------------------------------------


def protect(registry: Any, name: str, alias: str, approvals: int) -> None:
    """Let an alias move only when so many others approve; 0: by anybody again. A promote that was decided before may
    still come after."""
    if not registry.current_state(name).events:  # never from a cache, of which it may be so already
        registry.existing(name)
    found = read(registry, name, "protect", alias=alias)
    if found.approvals(alias) != approvals:
        add(registry, name, "protect", found.holding("protect", alias=alias), alias=alias, approvals=approvals)


def propose(registry: Any, state: State, alias: str, version: str) -> None:
    """Propose to move a protected alias, unless somebody has; raises what an event that moves it now would."""
    state.apply(Event(len(state.events) + 1, state.name, events.now(), Promote(alias, version)))
    found = read(registry, state.name, "propose", alias=alias)
    if not found.proposals(state, alias=alias, version=version):
        after = state.moved(alias)
        add(registry, state.name, "propose", [], alias=alias, version=version, after=after)


def approve(registry: Any, name: str, version: str, alias: str, force: bool = False) -> State:
    """Approve of what somebody else proposed, and move the alias if that is enough; returns the state.

    force   also of a version that is too lossy (`verdict`)
    Raises Conflict if nobody else has proposed it since the alias moved last, or if it is too lossy.
    """
    state, by = registry.current_state(name), who()
    found = read(registry, name, "propose", "approve", alias=alias)
    open_ = found.proposals(state, alias=reference.check_alias(alias), version=version)
    theirs = [one for one in open_ if one.by != by]
    if not theirs and state.at(alias) != version:
        why = f"{by} proposed it, and another one has to approve" if open_ else "nobody has proposed it"
        raise Conflict(f"{name}@{version} as {alias}: {why}; names are $KVQ_USER, and kvq promote proposes")
    if not force and theirs:
        verdict.require(registry, name, state.get(version))
    for one in theirs[:1]:
        mine = [approval for approval in found.holding("approve", proposal=one.digest) if approval.by == by]
        if mine:  # of a process that may have died before it was durable, which it has to be before the event
            registry.add_record("remarks", _folder(name), mine[0].data, name)
        else:
            add(registry, name, "approve", [], proposal=one.digest)
    return registry.promote(name, version, alias, force=True)
