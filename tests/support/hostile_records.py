"""Mutants of evaluation records of every protocol."""

import random
from collections.abc import Iterator
from typing import Any

import many_versions as many
import mutate

from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry import sound


def seeds(digest: str) -> list[dict[str, Any]]:
    """A record of each protocol, one of a weekly check, one of the first version."""
    verdict = {"bounds": {"kl": 0.01}, "protocol": "full", "failed": ["KL divergence"]}
    usual, week = many.record(digest, 0.02, gate=verdict), many.record(digest, 0.03, seed=202614)
    first = mutate.copied(usual)
    first["result"] |= first["result"].pop("protocols")["in-use"]
    named = {"tasks": {"arc": {"metrics": {"acc,none": {"value": 0.5, "se": 0.1}}, "texts": 30}}}
    own = many.tasks(needle=0.25) | {"reference": {"needle": {"accuracy": 1.0, "se": 0.0}}}
    bins = [
        {"from": n, "to": n + 1, "kl": 0.1, "kl_se": 0.2, "kl_worst": 1, "entropy": 2, "decoded": 0.5} for n in (0, 1)
    ]
    part = {"kl": 0.05, "kl_se": 0.01, "top1": 0.875, "trend": {"kl_per_1000": 1.5, "se": 0.5}, "bins": bins}
    followed = many.greedy(digest, part | {"windows": [{"first": 5, "kl": 0.1}, {"first": None, "kl": 0.0}]})
    others = [
        many.asked(digest, named | {"reference": named["tasks"]}, name="lm-eval"),
        many.asked(digest, own),
        followed,
    ]
    return [usual, usual, week, first, *others]


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
            sound.to_bytes(record)
        except (ArtifactError, ValueError):
            continue
        yield record
