"""Parameters of the quick tests, and those that are left to the slow ones."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def some(values: Iterable[Any], *quick: Any) -> list:
    """Every value as a parameter; all but these are marked slow."""
    return [pytest.param(value, marks=() if value in quick else pytest.mark.slow) for value in values]


def together(*axes: Sequence[Any]) -> list[tuple]:
    """The fewest combinations that have every value of each axis."""
    return [tuple(axis[number % len(axis)] for axis in axes) for number in range(max(map(len, axes)))]
