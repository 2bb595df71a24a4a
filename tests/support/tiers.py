"""Parameters that `make test` takes, those that it leaves to `make test-all`, and those of --every-pair alone."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def some(values: Iterable[Any], *quick: Any) -> list:
    """Every value as a parameter, of which `make test` takes these."""
    return [pytest.param(value, marks=() if value in quick else pytest.mark.slow) for value in values]


def each_once(*axes: Sequence[Any]) -> list:
    """Every combination as parameters. `make test` takes so many that each value of each axis is there, `make test-all`
    also every sixth of the others, the rest is left to --every-pair."""
    length = max(map(len, axes))
    quick = {tuple(number % len(axis) for axis in axes) for number in range(length)}
    places = list(itertools.product(*(range(len(axis)) for axis in axes)))
    others = [chosen for chosen in places if chosen not in quick]
    marks = {chosen: () if chosen in quick else pytest.mark.slow for chosen in places}
    marks |= {chosen: pytest.mark.every_pair for number, chosen in enumerate(others) if number % 6}
    return [
        pytest.param(*(axis[place] for axis, place in zip(axes, chosen, strict=True)), marks=marks[chosen])
        for chosen in places
    ]


def together(*axes: Sequence[Any]) -> list[tuple]:
    """So many combinations that each value of each axis is there, and no more."""
    return [tuple(axis[number % len(axis)] for axis in axes) for number in range(max(map(len, axes)))]
