"""Settings of the attention kernel describe the scheme they are made from, for every recipe that has a kernel."""

import pytest

pytest.importorskip("triton")
from written import EVERY

from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.kernels.attend import settings
from kvq_runtime.kernels.attend.layout import layout
from kvq_runtime.ops import pack


@pytest.mark.parametrize("size", [64, 128])
def test_slots_are_a_head_or_a_group(size):
    geometry, seen = Geometry(1, 2, size), set()
    for recipe in EVERY.values():
        for role, scheme in zip(ROLES, (recipe.key, recipe.value), strict=True):
            made = layout(scheme, recipe.window.block, geometry, role, recipe.position)
            if made is None:
                continue
            read = made.settings
            seen.add(type(read))
            if isinstance(read, settings.RoundedSettings):
                codes = size // max(1, len(read.TABLES))
                assert recipe.window.block * codes * read.BITS // 8 == read.SUBS * read.BYTES
                assert all(len(table) == 2**read.BITS for table in read.TABLES)
                assert recipe.window.block == read.SUBS * read.TILES * 16
                groups = [run.FIRST + i * run.STEP for run in read.RUNS for i in range(run.COUNT)]
                assert sorted(groups) == list(range(size // 16))
                continue
            assert size == read.SLOTS * read.COLUMNS
            assert max(16, read.COLUMNS) <= read.P and read.P & (read.P - 1) == 0
            if isinstance(read, settings.PolarSettings):
                runs = {(level.RUN, level.BITS): level.COUNT for level in read.LEVELS}
                assert sum(pack.packed_size(count, bits) for (_, bits), count in runs.items()) == read.BYTES
                assert sum(runs.values()) == size - (size >> len(read.LEVELS))
    assert seen == {settings.RoundedSettings, settings.PolarSettings}
