"""The merge of partial results is what float64 gives, and reads no split that no block came to."""

import pytest
import torch
from parity import DEVICE, error, normal, poisoned

pytest.importorskip("triton")
from kvq_runtime.kernels.attend import kernel
from kvq_runtime.kernels.attend.kernel import EXACT, merge_parts, merged

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
    "size, splits, blocks, turned, centred, shared, levels",
    [
        (80, 300, 290, False, True, 1, 0.0),
        (128, 70, 500, True, True, 1, 300.0),
        (
            128,
            20,
            15,
            True,
            True,
            4,
            -300.0,
        ),  # the second program of a head has two rows
        (80, 3, 3, True, False, 4, 0.0),
        (64, 9, 0, True, True, 4, 0.0),
    ],
)
def test_merge(size, splits, blocks, turned, centred, shared, levels, monkeypatch):
    """`levels`: how far those of blocks are above the window's; no 2^300 is a float32."""
    monkeypatch.setattr(kernel, "ENOUGH", LINES * ROWS // shared)
    assert merged(size, splits, turned, LINES * ROWS)[3] == shared or not turned
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


def test_a_large_batch_shares_a_rotation():
    """Four rows a program where that leaves a program for each multiprocessor of an H200."""
    assert [merged(128, 4, True, rows)[3] for rows in (32, 527, 528, 4096)] == [1, 1, 4, 4]
    assert merged(128, 4, True, 528)[1:3] == (32, 8)  # as many elements at once as of one row: 128 channels, 32 splits
    assert merged(256, 4, True, 4096)[3] == 1 and merged(128, 4, False, 4096)[3] == 1


def test_no_token_at_all():
    part, lse = torch.zeros(1, EXACTS + 1, 1, 64, device=DEVICE), torch.full((1, 1, EXACTS + 1), -torch.inf)
    out, level = torch.ones(1, 1, 1, 64, device=DEVICE), torch.ones(1, 1, 1, device=DEVICE)
    merge_parts(part, lse.to(DEVICE), None, None, torch.ones(3, dtype=torch.int32, device=DEVICE), out, level)
    assert not out.any() and float(level) == -torch.inf
