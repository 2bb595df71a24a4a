"""Attention with a cap on scores and a learned logit, against the formulas written out in float64."""

import pytest
import torch

from kvq_runtime.ops import dense
from kvq_runtime.ops.dense import Softmax

LOGIT = torch.tensor([0.5, -2.0, 30.0, -30.0])


def drawn(queries: int, read: int):
    random = torch.Generator().manual_seed(queries)
    return (torch.randn(2, heads, count, 16, generator=random) for heads, count in ((4, queries), (2, read), (2, read)))


@pytest.mark.parametrize("softmax", [Softmax(), Softmax(cap=2.0), Softmax(logit_H=LOGIT), Softmax(2.0, LOGIT)], ids=str)
@pytest.mark.parametrize("queries, read", [(9, 9), (4, 9)])
@pytest.mark.parametrize("masked", [None, "bool", "added"])
def test_formulas(softmax, queries, read, masked, monkeypatch):
    monkeypatch.setattr(dense, "SCORES", 2 * 4 * read * 3)  # three queries at a time
    q, k, v = drawn(queries, read)
    seen = torch.ones(queries, read).tril(read - queries).bool().expand(2, 1, -1, -1).clone()
    if masked:
        seen[1, :, int(queries == read) :, 0] = False  # padding on the left
    least = torch.finfo(torch.float32).min
    mask = {None: None, "bool": seen, "added": torch.zeros(seen.shape).masked_fill(~seen, least)}[masked]
    found = dense.attention(q, k, v, mask, 0.3, softmax)
    for row in range(2):
        for head in range(4):
            s = q[row, head].double() @ k[row, head // 2].double().T * 0.3
            s = s if softmax.cap is None else 2.0 * torch.tanh(s / 2.0)
            s = s.masked_fill(~seen[row, 0], -torch.inf)
            own = s[:, :0] if softmax.logit_H is None else softmax.logit_H[head].double().expand(queries, 1)
            p = torch.cat([s, own], 1).softmax(-1)[:, :read]
            torch.testing.assert_close(found[row, head], (p @ v[row, head // 2].double()).float(), rtol=1e-4, atol=1e-5)


def test_sums_of_parts_are_the_softmax_of_the_whole_however_large_scores_are():
    """Parts of a text one after another, the first unseen by some rows, against torch's softmax of all of it."""
    generator = torch.Generator().manual_seed(0)
    q_YND, v_YTD = torch.randn(2, 5, 8, generator=generator), torch.randn(2, 30, 8, generator=generator)
    s_YNT = 400 * torch.randn(2, 5, 30, generator=generator)
    s_YNT[:, 3:, :10] = -torch.inf
    sums = dense.OnlineSoftmax(q_YND)
    for part in (slice(0, 10), slice(10, 17), slice(17, 30)):
        sums.add(s_YNT[..., part].clone(), lambda w_YNT, part=part: w_YNT @ v_YTD[:, part])
    torch.testing.assert_close(sums.attended_YND, s_YNT.softmax(-1) @ v_YTD)
    torch.testing.assert_close(sums.top_YN + sums.total_YN.log(), s_YNT.logsumexp(-1))
    unseen = dense.OnlineSoftmax(q_YND)
    unseen.add(torch.full((2, 5, 4), -torch.inf), lambda w_YNT: w_YNT @ v_YTD[:, :4])
    assert not unseen.attended_YND.any()
