"""Untrusted JSON is read in time proportional to its bytes, whatever they are: a small file stops nobody."""

import json
import time
from collections.abc import Callable

import pytest

from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError

KEYS = [f'"k{i:07}":0' for i in range(1 << 17)]


def list_of(items: list[str]) -> str:
    return f"[{','.join(items)}]"


def object_of(items: list[str]) -> str:
    return f"{{{','.join(items)}}}"


SHAPES: dict[str, tuple[Callable[[int], str], str]] = {  # {name: (text of some n bytes, the error or "")}
    "an unclosed string of quotes": (lambda n: '"' + '\\"' * (n // 2), "Unterminated string"),
    "a key that appears twice, often": (lambda n: list_of(['{"a":0,"a":0}'] * (n // 14)), "appears twice"),
    "opening brackets": (lambda n: "[" * n, "levels deep"),
    "brackets in a string": (lambda n: f'"{"[" * n}"', ""),
    "digits": (lambda n: "1" * n, "4300 digits"),
    "digits of an exponent": (lambda n: "1e" + "1" * n, "not a finite number"),
}  # fmt: skip


def seconds(text: str, error: str, times: int) -> float:
    """The least time of several readings, which is that of the work alone."""
    taken = []
    for _ in range(times):
        begun = time.thread_time()
        if error:
            with pytest.raises(ArtifactError, match=error):
                strict_json.loads(text, "x")
        else:
            strict_json.loads(text, "x")
        taken.append(time.thread_time() - begun)
        if taken[-1] > 1:
            break
    return min(taken)


@pytest.mark.parametrize("make, error", SHAPES.values(), ids=SHAPES)
def test_ten_times_the_bytes_take_ten_times_as_long(make, error):
    sizes, before = [10_000, 100_000], None
    for size, times in zip(sizes, (20, 5), strict=True):
        text = make(size)
        assert 0.8 * size < len(text) < 1.2 * size
        taken = seconds(text, error, times)
        assert before is None or taken < 50 * before, f"{size} bytes: {taken} s after {before} s"  # quadratic: 100
        before = taken


def test_a_string_hides_its_brackets_and_nothing_else_does():
    deep = '[[[["]]]]\\"]]"]]]]'
    assert strict_json.loads(deep, "x", depth=4) == json.loads(deep)
    with pytest.raises(ArtifactError, match="x: invalid JSON: nested 4 levels deep; at most 3 are allowed"):
        strict_json.loads(deep, "x", depth=3)
    for text in ('{"a":"\\\\"}', '["\\\\\\"["]', '["\\u005b\\"", {"]": 1}]'):
        assert strict_json.loads(text, "x", depth=2) == json.loads(text)


def test_a_long_key_is_not_copied_for_each_thing_below_it():
    long = ["k" * 100_000 + end for end in "ab"]
    flat = strict_json.flatten({long[0]: {str(i): i for i in range(1000)}, long[1]: 1, "short": {"x": 2}})
    assert len(flat) == 1002 and flat["short.x"] == 2
    assert sum(map(len, flat)) < 200_000
