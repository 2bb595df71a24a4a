"""The bfloat16 kernel over pages that ours are compared with is right, and its shapes are those that are named."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity import DEVICE, error

pytest.importorskip("triton")
from benchmarks import baselines, cases

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
