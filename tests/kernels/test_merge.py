"""The merge of partial results is what float64 gives, and reads no split that no block came to."""

import pytest
import torch
from parity import DEVICE, error, normal, poisoned

pytest.importorskip("triton")
from kvq_runtime.kernels.attend.kernel import EXACT, merge_parts

EXACTS, LINES, HEADS, ROWS = EXACT.value, 2, 2, 6


def reference(part, lse, rotation, mean, used) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, log2 of the sum) in float64, of the exact splits and the first `used` of the others."""
    part_LSRD, lse_LRS = (x.double() for x in (part[:, : EXACTS + used], lse[:, :, : EXACTS + used]))
    blocks_LSRD = part_LSRD[:, EXACTS:]
    if rotation is not None:
        blocks_LSRD = blocks_LSRD @ rotation.double()
    if mean is not None:
        blocks_LSRD = blocks_LSRD + mean.double().repeat(LINES // HEADS, 1)[:, None, None]
    level_LR = torch.logsumexp(lse_LRS * torch.log(torch.tensor(2.0)), -1) / torch.log(torch.tensor(2.0))
    weights_LRS = (lse_LRS - level_LR[..., None]).exp2()
    whole_LSRD = torch.cat([part_LSRD[:, :EXACTS], blocks_LSRD], 1)
    return torch.einsum("lrs,lsrd->lrd", weights_LRS, whole_LSRD), level_LR


@pytest.mark.parametrize(
    "size, splits, blocks, turned, centred, levels",
    [
        (80, 300, 290, False, True, 0.0),
        (128, 70, 500, True, True, 300.0),
        (128, 20, 15, True, True, -300.0),
        (64, 9, 0, True, False, 0.0),
    ],
)
def test_merge(size, splits, blocks, turned, centred, levels, monkeypatch):
    """`levels`: how far those of blocks are above the window's; no 2^300 is a float32."""
    used = -(-blocks // max(1, -(-blocks // splits)))  # all as long as the longest, see kernel.py
    part = normal(LINES, EXACTS + splits, ROWS, size)
    lse = 4 * normal(LINES, ROWS, EXACTS + splits, seed=1)
    lse[..., EXACTS:] += levels
    lse[0, 0, 1] = lse[1, 1, EXACTS : EXACTS + used // 2] = -torch.inf  # no token was there
    part[:, EXACTS + used :], lse[..., EXACTS + used :] = torch.nan, torch.nan
    rotation = torch.linalg.qr(normal(size, size, seed=2)).Q.half().contiguous() if turned else None
    mean = normal(HEADS, size, seed=3) if centred else None
    lengths = torch.tensor([blocks, 0, 1], dtype=torch.int32, device=DEVICE)
    with poisoned(monkeypatch):
        held = torch.full((LINES * ROWS + 4, size), 7.0, device=DEVICE)  # there is no query of the last four rows
        out = held[:-4].view(LINES // HEADS, HEADS * ROWS, 1, size)
        level = torch.empty(LINES // HEADS, HEADS * ROWS, 1, device=DEVICE)
        merge_parts(part, lse, rotation, mean, lengths, out, level)
    wanted, levels_LR = reference(part, lse, rotation, mean, used)
    assert error(out.view(LINES, ROWS, size), wanted) < 1e-6 and (held[-4:] == 7).all()
    assert float((level.view(LINES, ROWS).double() - levels_LR).abs().max()) < 1e-4


def test_no_token_at_all():
    part, lse = torch.zeros(1, EXACTS + 1, 1, 64, device=DEVICE), torch.full((1, 1, EXACTS + 1), -torch.inf)
    out, level = torch.ones(1, 1, 1, 64, device=DEVICE), torch.ones(1, 1, 1, device=DEVICE)
    merge_parts(part, lse.to(DEVICE), None, None, torch.ones(3, dtype=torch.int32, device=DEVICE), out, level)
    assert not out.any() and float(level) == -torch.inf
