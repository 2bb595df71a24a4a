"""The bfloat16 kernel over pages that ours are compared with is right, and its shapes are those that are named."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity import DEVICE, error

pytest.importorskip("triton")
from benchmarks import baselines, cases
from benchmarks.clock import Timing

ROOT = Path(__file__).parents[2]
SMALL = cases.Case(cases.Model("small", 8, 2, 64), "rtn-2bit", 320, 2)


@pytest.mark.parametrize("q_heads, tokens, batch", [(8, 320, 2), (14, 304, 1), (2, 64, 3)])
def test_pages_give_what_softmax_gives(q_heads, tokens, batch):
    case = replace(SMALL, model=cases.Model("small", q_heads, 2, 64), tokens=tokens, batch=batch)
    device = torch.device(DEVICE)
    k, v, table = (x.half() if x.is_floating_point() else x for x in baselines.in_pages(case, device))
    q = cases.queries(case, device).half()
    assert sorted(table.flatten().tolist()) == list(range(batch * tokens // baselines.PAGE))
    rows = [x[table.long()].flatten(1, 2).transpose(1, 2).double() for x in (k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(q.double(), *rows, enable_gqa=True)
    assert error(baselines.attend_pages(q, k, v, table, tokens), wanted) < 2e-3


def test_fewer_tiles_than_splits():
    """Splits without a token weigh nothing."""
    case = replace(SMALL, tokens=64, batch=1)
    device = torch.device(DEVICE)
    k, v, table = (x.half() if x.is_floating_point() else x for x in baselines.in_pages(case, device))
    q = cases.queries(case, device).half()
    rows = [x[table.long()].flatten(1, 2).transpose(1, 2).double() for x in (k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(q.double(), *rows, enable_gqa=True)
    assert error(baselines.attend_pages(q, k, v, table, 64), wanted) < 2e-3


def test_heads_as_rows_are_the_same_attention():
    results = {}
    for name, call in baselines.sdpa(replace(SMALL, batch=1), torch.device("cpu")):
        backend = call.__defaults__[-1]
        if backend == "FLASH_ATTENTION":
            results[name] = call()
    assert set(results) == {"flash", "flash rows"}
    assert torch.allclose(results["flash"].flatten(), results["flash rows"].flatten(), atol=2e-2)


def test_what_a_backend_refuses_is_listed():
    times = iter(range(1, 100))
    found = baselines.measured(SMALL, torch.device("cpu"), lambda call: call() is None or Timing(next(times), 0, 0))
    assert {"flash", "flash rows", "cudnn", "efficient rows", "pages"} <= set(found)
    assert isinstance(found["flash"], Timing) and str(found["cudnn"]).startswith("RuntimeError")
    assert baselines.fastest(found) == ("flash", Timing(1, 0, 0))
    assert baselines.fastest({"cudnn": "RuntimeError"}) is None


class Library:
    """A stand-in for an installed library: what it was called with."""

    def __init__(self):
        self.given = []

    def flash_attn_with_kvcache(self, q, k, v, **given):
        self.given.append((q.shape, k.shape, v.shape, given))

    def BatchDecodeWithPagedKVCacheWrapper(self, workspace, layout, **buffers):
        self.layout, self.buffers = layout, buffers
        return self

    def plan(self, *given, **settings):
        self.planned = given

    def run(self, q, pages):
        self.given.append((q.shape, pages[0].shape))


@pytest.mark.parametrize("name, table", [("flash_attn", "block_table"), ("flash_attn_interface", "page_table")])
def test_flash_attention_where_it_is_installed(name, table, monkeypatch):
    library = Library()
    monkeypatch.setitem(sys.modules, name, library)
    monkeypatch.setattr(baselines, "find_spec", lambda asked: asked == name)
    case = replace(SMALL, tokens=512)
    names = [name for name, call in baselines.flash_attn(case, torch.device("cpu")) if call() is None]
    assert names == ["flash-attn", "flash-attn pages"]
    (q, k, _, given), (_, pages, _, paging) = library.given
    assert (q, k, pages) == ((2, 1, 8, 64), (2, 512, 2, 64), (4, 256, 2, 64))
    assert given["cache_seqlens"].tolist() == [512, 512] and sorted(paging[table].flatten().tolist()) == [0, 1, 2, 3]


def test_flashinfer_where_it_is_installed(monkeypatch):
    library = Library()
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(baselines, "find_spec", lambda asked: asked == "flashinfer")
    ((name, call),) = baselines.flashinfer(SMALL, torch.device("cpu"))
    call()
    assert name == "flashinfer" and library.given == [((2, 8, 64), (40, 16, 2, 64))]
    starts, pages, full, *shape = library.planned
    assert starts.tolist() == [0, 20, 40] and len(pages) == 40 and full.tolist() == [16, 16] and shape[:3] == [8, 2, 64]


def test_libraries_are_not_required(monkeypatch):
    monkeypatch.setattr(baselines, "find_spec", lambda asked: None)
    assert list(baselines.flash_attn(SMALL, torch.device("cpu"))) == []
    assert list(baselines.flashinfer(SMALL, torch.device("cpu"))) == []


COMPILE = """
import torch
from benchmarks import baselines, cases, kernels_aot
for model in cases.MODELS:
    with kernels_aot.recorded() as made:
        baselines.paged_step(cases.Case(model, "rtn-2bit", 512, 1), torch.device("cpu"))()
    for one in made:
        name, one.function.__name__ = one.function.__name__, "other"
        print(model.name, name, kernels_aot.usage(one, 90))
"""


@pytest.mark.slow
def test_pages_compile_for_sm_90_without_a_spill():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = done.stdout.splitlines()
    assert len(found) == 4 and all("'stack': 0, 'local': 0" in line for line in found), found
