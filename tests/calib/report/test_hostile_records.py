"""A record that anybody may add stops no page, card or command: it is read, or left out and counted."""

import io
import random
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from datetime import UTC, datetime
from typing import Any

import many_versions as many
import mutate
import pytest
import tiny_artifact as tiny

from kvq_calib.report import registry_page, version_page
from kvq_runtime.cli import diff
from kvq_runtime.cli import main as cli
from kvq_runtime.cli.version import evaluation_tables
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry import card, rating
from kvq_runtime.registry.card import UNMEASURED
from kvq_runtime.registry.evaluation_records import readable, text_records, to_bytes
from kvq_runtime.registry.local import LocalRegistry

NAME = "tiny-2bit"
NOW = datetime(2026, 7, 1, tzinfo=UTC)
CARD = f"---\nlibrary_name: kvq\n---\n# card\n{UNMEASURED}\n"
BAD = {  # {what is wrong: (path of a field of the record, its value)}
    "a number of 400 digits": ("result.layers.0.key_error", 10**400),
    "a large number": ("result.protocols.full.kl", 1e308),
    "a large number that no reader knows": ("result.protocols.full.more", [1e308]),
    "a number below zero": ("result.layers.0.attention_error", -1e200),
    "text for a number": ("result.protocols.full.relative", "0.1"),
    "a list for a part": ("result.protocols.full", []),
    "no parts": ("result.protocols", 3),
    "a text that is none": ("protocol.text", [1]),
    "a model that is none": ("protocol.model", "m"),
    "bits that are none": ("result.bits", [2]),
    "windows that are none": ("result.protocols.full.windows.kl", [None]),
    "a text that nothing is said of": ("protocol.texts", {}),
    "shares that are none": ("result.protocols.full.decoded", {"attention": []}),
}


def seeds(digest: str) -> list[dict[str, Any]]:
    """A record of each protocol, and one of a weekly check."""
    verdict = {"bounds": {"kl": 0.01}, "protocol": "full", "failed": ["KL divergence"]}
    usual, week = many.record(digest, 0.02, gate=verdict), many.record(digest, 0.03, seed=202614)
    named = {"tasks": {"arc": {"metrics": {"acc,none": {"value": 0.5, "se": 0.1}}, "texts": 30}}}
    own = many.tasks(needle=0.25) | {"reference": {"needle": {"accuracy": 1.0, "se": 0.0}}}
    others = [
        many.asked(digest, named | {"reference": named["tasks"]}, name="lm-eval"),
        many.asked(digest, own),
    ]
    return [usual, usual, week, *others]


def one_field(digest: str) -> Iterator[dict[str, Any]]:
    """Records in which one field of protocol or result is missing, null, or of another kind."""
    for record in seeds(digest)[1:]:
        for parents, name in _fields(record, ()):
            for value in (None, [], {}, "x", 7, [None], {"x": {}}, ...):
                found = mutate.copied(record)
                place: Any = found
                for parent in parents:
                    place = place[parent]
                place[name] = value
                if value is ...:
                    del place[name]
                yield found


def _fields(value: Any, parents: tuple) -> Iterator[tuple[tuple, Any]]:
    """(where it is, its name) of every field below protocol and result; of lists the first."""
    below = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for name, one in below:
        if parents:
            yield parents, name
        if parents or name in ("protocol", "result"):
            yield from _fields(one, (*parents, name))


def mutants(digest: str, count: int, first: int = 0) -> Iterator[dict[str, Any]]:
    """Records with one to eight changes below protocol, result or environment that a registry accepts."""
    originals = seeds(digest)
    known = mutate.vocabulary(originals)
    for number in range(first, first + count):
        draw = random.Random(77_000 + number)
        record = mutate.copied(draw.choice(originals))
        for _ in range(draw.choice((1, 1, 2, 4))):
            mutate.some_json(record[draw.choice(("protocol", "result", "result", "environment"))], known, draw)
        try:
            to_bytes(record)
        except (ArtifactError, ValueError):
            continue
        yield record


@pytest.fixture
def store(tmp_path) -> LocalRegistry:
    return LocalRegistry(tmp_path / "registry")


def changed(record: dict, path: str, value) -> dict:
    *parents, last = path.split(".")
    place = record
    for name in parents:
        place = place[int(name) if isinstance(place, list) else name]
    place[last] = value
    return record


def readers(store: LocalRegistry, digest: str, given: list):
    """Whoever reads records, by name."""

    def show() -> None:
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            assert cli.main(["show", NAME, "--registry", store.url]) == 0

    yield "a page", lambda: version_page.page(version_page.of_version(store, NAME, "1.0.0", []))
    yield "the index", lambda: registry_page.page(registry_page.of_registry(store, NOW))
    yield "a card", lambda: card.with_results(CARD, NAME, readable(store.evaluations(digest)))
    yield "kvq show", show
    yield (
        "--compare",
        lambda: version_page.page(version_page.of_version(store, NAME, "1.0.0", text_records(readable(given)))),
    )


@pytest.mark.parametrize("path, value", BAD.values(), ids=BAD)
def test_a_record_that_is_not_sound_is_left_out_and_counted(path, value, store, kvq):
    digest = store.publish(NAME, tiny.data(), attachments={"README.md": CARD.encode()}).sha256
    good, bad = many.record(digest, 0.25), changed(many.record(digest, 0.5), path, value)
    for record in (good, bad):
        store.add_evaluation(record)
    assert len(readable([good, bad])) == 1
    for _, read in readers(store, digest, [bad]):
        read()
    found = version_page.of_version(store, NAME, "1.0.0")
    (row,) = [row for row in found["health"] if row["check"] == "evaluations"]
    assert (
        row["result"] == "failed" and "2 records" in row["what"] and "1 are of a form that is not read" in row["what"]
    )
    assert {one["kl"] for one in found["losses"] if one["protocol"] == "full" and one["main"]} == {0.25}
    assert "1 evaluations are of a form" in kvq("show", NAME, "--registry", store.url)[2]


def test_what_kvq_writes_is_sound():
    given = seeds("a" * 64)
    assert [one.raw for one in readable(given)] == given


def test_no_field_of_a_record_stops_a_card_a_verdict_or_a_comparison():
    (good,), left_out, stopped = readable([many.record("a" * 64, 0.25)]), 0, set()
    for given in one_field("a" * 64):
        if not (found := readable([given])):
            left_out += 1
            continue
        (record,) = found
        for read in (
            lambda record=record: card._table(card.eval_results([record])),
            lambda record=record: rating.rate_records([record, good], "x"),
            lambda record=record: diff._pairs([record, good], [good, record]),
            lambda record=record: evaluation_tables([record]),
        ):
            try:
                read()
            except Exception as error:
                stopped.add(f"{type(error).__name__} {error}, line {error.__traceback__.tb_next.tb_lineno}")  # type: ignore
    assert not stopped, "\n".join(sorted(stopped))
    assert left_out > 100


@pytest.mark.slow
def test_no_mutant_of_a_record_stops_a_reader(store):
    digest = store.publish(NAME, tiny.data(), attachments={"README.md": CARD.encode()}).sha256
    folder, left_out, stopped = store.root / "evaluations" / digest, 0, []
    for number, record in enumerate(mutants(digest, 300)):
        for path in folder.glob("*"):
            path.unlink()
        store.add_evaluation(record)
        left_out += not readable([record])
        for name, read in readers(store, digest, [record]):
            try:
                read()
            except Exception as error:
                if name == "--compare" and str(error).startswith("--compare: records of "):
                    continue
                stopped.append(f"{number}, {name}: {type(error).__name__} {error}")
    assert not stopped, "\n".join(stopped)
    assert 50 < left_out < 250
