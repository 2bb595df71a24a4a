"""No kernel takes more registers, stack or shared memory, compiled for a GPU, than the committed table says."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "kernels_aot.py"
FEW = ["attend quarot-head-2bit", "attend higgs-head-1bit", "encode rtn 4 rotated"]


def check(*arguments: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("arch, only", [(90, []), (80, FEW), (100, FEW)])
def test_no_kernel_got_worse(arch, only):
    """One of each kind, on other architectures one of each room; all of them take a quarter of an hour."""
    done = check("--arch", str(arch), "--each-kind", "--check", "--only", *only)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert int(done.stdout.split()[0]) >= (len(only) or 20), "so many were compiled"


@pytest.fixture(scope="module")
def aot():
    spec = importlib.util.spec_from_file_location("kernels_aot", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_kernel_that_got_worse_is_seen(aot):
    row = {"registers": 100, "stack": 0, "local": 0, "shared": 512, "warps": 16}
    table = {(triton.__version__, "attend x", 90): row}
    taken = dict(row)
    assert aot.worse("attend x", 90, taken, table) == []
    assert "registers 101" in aot.worse("attend x", 90, taken | {"registers": 101}, table)[0]
    assert "stack 8" in aot.worse("attend x", 90, taken | {"stack": 8}, table)[0]
    assert "not in" in aot.worse("attend y", 90, taken, table)[0]
    assert "warps 12; at least 16" in aot.worse("attend x", 90, taken | {"warps": 12}, table)[0]
    assert aot.worse("attend x", 90, taken | {"warps": 20}, table) == []
    row["stack"] = 8  # what spills may not grow
    assert aot.worse("attend x", 90, taken | {"stack": 8}, table) == []
    assert "stack 9; at most 8" in aot.worse("attend x", 90, taken | {"stack": 9}, table)[0]
    assert "at most 64" in aot.worse("attend x", 90, taken, table, warps=32)[0]  # they would not fit
    row |= {"stack": 0, "alu_per_element": 1.0, "exposed_loads": 4}
    assert "element 1.1" in aot.worse("attend x", 90, taken | {"alu_per_element": 1.1}, table)[0]
    assert "exposed_loads 5; at most 4" in aot.worse("attend x", 90, taken | {"exposed_loads": 5}, table)[0]


def test_every_triton_has_rows_of_its_own(aot):
    row = {"registers": 100, "stack": 0, "local": 0, "shared": 512, "warps": 16}
    other = {("0", "attend x", 90): row | {"registers": 90}}
    assert aot.worse("attend x", 90, row | {"stack": 8}, other) == []  # held with the Triton of the table; here it fits
    assert "at most 255" in aot.worse("attend x", 90, row | {"registers": 256}, other)[0]
    assert "not in" in aot.worse("attend y", 90, row, other)[0]
    both = other | {(triton.__version__, "attend x", 90): row}
    assert aot.worse("attend x", 90, row, both) == []
    assert "registers 101" in aot.worse("attend x", 90, row | {"registers": 101}, both)[0]


def test_the_table_keeps_the_oldest_triton_and_this_one(aot, tmp_path, monkeypatch):
    monkeypatch.setattr(aot, "TABLE", tmp_path / "table.csv")
    rest = [1] * (len(aot.COLUMNS) - 3)

    def written(version: str, rows: dict[str, int], names: set[str] | None) -> set[tuple[str, str, int]]:
        monkeypatch.setattr(triton, "__version__", version)
        aot.write([[version, name, 90, value, *rest[1:]] for name, value in rows.items()], names)
        return {(version, name, int(row["registers"])) for (version, name, _), row in aot.stored().items()}

    assert written("3.6.0", {"a": 1, "b": 1}, {"a", "b"}) == {("3.6.0", "a", 1), ("3.6.0", "b", 1)}
    written("3.9.0", {"a": 2, "b": 2}, {"a", "b"})
    newest = written("3.10.0", {"a": 3}, {"a", "b"})
    assert newest == {("3.6.0", "a", 1), ("3.6.0", "b", 1), ("3.10.0", "a", 3)}
    assert written("3.6.0", {"a": 1}, {"a", "b"}) == newest
    assert written("3.10.0", {"b": 4}, None) == newest | {("3.10.0", "b", 4)}
    assert written("3.10.0", {"b": 5}, {"b"}) == {("3.6.0", "b", 1), ("3.10.0", "b", 5)}


def test_the_table_has_what_binds(aot):
    """Every row of attention, with both Tritons: the newest spills little, and there are the products of a block."""
    from benchmarks.compiled import programs

    table = aot.stored()
    assert len({version for version, *_ in table}) == 2
    newest = max((version for version, *_ in table), key=aot._order)
    spilling = {name for (version, name, _), row in table.items() if version == newest and row["stack"] >= 400}
    assert spilling <= {
        "attend higgs-head-2bit d256",
        "attend lloyd-3bit d256",  # tables in registers, twice the channels
    }
    assert all(row["local"] == 0 for (version, *_), row in table.items() if version == newest)
    attends = {key: row for key, row in table.items() if key[1].startswith("attend") and "merge" not in key[1]}
    assert len(attends) > 80 and all(set(aot.COUNTED) <= set(row) for row in attends.values())
    for (_, _, arch), row in table.items():
        assert row["warps"] in {
            w * programs(int(row["registers"]), int(row["shared"]), w, arch) for w in (1, 2, 4, 8, 16)
        }
    parts = ("alu", "fma", "tensor")
    for (_, name, arch), row in attends.items():  # a product has 256 elements of a block, and 8 query rows
        assert arch == 100 or row["tensor_per_element"] >= 32 / 256, name
        assert sum(row[f"{part}_per_element"] for part in parts) < row["instructions_per_element"]
        assert row["exposed_loads"] > 0


@pytest.mark.parametrize(
    "registers, shared, warps, arch, held",
    [
        (255, 18432, 1, 90, 8),  # two warps a scheduler
        (169, 0, 1, 90, 8),
        (168, 0, 1, 90, 12),  # three
        (128, 0, 2, 90, 8),
        (32, 0, 1, 90, 32),  # programs
        (32, 0, 4, 90, 16),  # warps
        (64, 100_000, 4, 90, 2),  # shared memory
        (64, 100_000, 4, 80, 1),
    ],
)
def test_how_many_programs_a_multiprocessor_holds(registers, shared, warps, arch, held):
    from benchmarks.compiled import programs

    assert programs(registers, shared, warps, arch) == held
