"""Hold each room to its budget of lines, modules and words: `[tool.kvq.budget]` in pyproject.toml."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUDGET = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["kvq"]["budget"]


def _lines(room: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in (ROOT / room).rglob("*.py"))


def _words(pattern: str) -> int:
    """Count what has a letter or a digit: no bars of tables."""
    return sum(any(map(str.isalnum, word)) for path in ROOT.glob(pattern) for word in path.read_text().split())


@pytest.fixture(scope="module")
def table() -> dict[str, tuple[int, int]]:
    """Budget name → what it is now, and at most."""
    product = ("kvq_runtime", "kvq_calib", "pipelines")
    now = {room: _lines(room) for room in (*product, "tests")}
    now["scripts and benchmarks"] = _lines("scripts") + _lines("benchmarks")
    now["product modules"] = sum(len(list((ROOT / room).rglob("*.py"))) for room in product)
    now["README words"] = _words("README.md")
    now["docs words"], now["docs pages"] = _words("docs/*.md"), len(list((ROOT / "docs").glob("*.md")))
    now["records words"] = _words("benchmarks/records/*.md")
    assert set(now) == set(BUDGET)
    return {name: (amount, BUDGET[name]) for name, amount in now.items()}


def test_every_room_keeps_its_budget(table, record_property):
    rows = [f"{name:24}{now:8,}{most:8,}" for name, (now, most) in table.items()]
    record_property("kvq", "\n".join([f"{'room':24}{'now':>8}{'most':>8}", *rows]))
    over = [row for row, (now, most) in zip(rows, table.values(), strict=True) if now > most]
    assert not over, "\n".join(over)
