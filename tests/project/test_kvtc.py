"""The baseline of files: its groups are the cheapest of all there are, and its bytes and numbers what it says."""

import zlib

import pytest
import torch

from scripts import kvtc


@pytest.fixture(scope="module")
def x_NF() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.linalg.qr(torch.randn(48, 48, generator=generator))[0]
    return torch.randn(600, 48, generator=generator) * torch.logspace(1, -2, 48) @ mixing + 3


def _partitions(start: int, width: int, options: dict) -> list[tuple[float, float]]:
    """(bits, error) of every way to cover what is left."""
    if start == width:
        return [(0.0, 0.0)]
    return [
        (bits + more, error + left)
        for group, bits, error in options.get(start, ())
        for more, left in _partitions(start + group.size, width, options)
    ]


def test_no_partition_costs_less_at_the_same_price(x_NF, monkeypatch):
    monkeypatch.setattr(kvtc, "SINGLE", 0)
    choice = kvtc.Choice(kvtc.fit(x_NF))
    every = _partitions(0, 48, choice.options)
    assert len(every) > 60
    for price in (1e-4, 1e-2, 0.1, 1.0):
        groups, bits = choice.priced(price)
        assert [g.start for g in groups] == [sum(g.size for g in groups[:n]) for n in range(len(groups))]
        error = sum(e for g in groups for found, _, e in choice.options[g.start] if found == g)
        assert error + price * bits == pytest.approx(min(e + price * b for b, e in every), rel=1e-6)


@pytest.mark.parametrize("bits", [3.0, 4.0, 6.0])
def test_a_budget_is_kept_and_more_bits_lose_less(bits, x_NF):
    basis = kvtc.fit(x_NF)
    choice = kvtc.Choice(basis)
    groups = choice.within(bits)
    spent = sum(g.size * g.bits + kvtc.RANGE for g in groups if g.bits)
    assert 0 < spent <= bits * 48
    size, found = kvtc.coded(x_NF, basis, groups)
    error = (found - x_NF).square().sum() / (x_NF - x_NF.mean(0)).square().sum()
    assert error < {3.0: 0.02, 4.0: 0.01, 6.0: 2e-3}[bits]
    assert size <= len(x_NF) * spent / 8 + 100, "DEFLATE makes nothing longer but for its header"


def test_bytes_hold_the_codes(x_NF, monkeypatch):
    """What is counted is what zlib was given: codes and ranges can be read back from it."""
    seen = []
    real = zlib.compress
    monkeypatch.setattr(kvtc.zlib, "compress", lambda data, level: seen.append(data) or real(data, level))
    basis, group = kvtc.fit(x_NF), kvtc.Group(0, 16, 4)
    kvtc.coded(x_NF, basis, [group])
    plain, packed, ranges = map(bytearray, seen)
    codes = torch.frombuffer(plain, dtype=torch.uint8).view(600, 16)
    halves = torch.frombuffer(packed, dtype=torch.uint8).view(600, 8)
    assert codes[:, 0::2].equal(halves & 15) and codes[:, 1::2].equal(halves >> 4)
    low, high = torch.frombuffer(ranges, dtype=torch.float16).view(2, 600)
    z_NK = ((x_NF - basis.mean) @ basis.vectors)[:, :16]
    step = (high.float() - low.float())[:, None] / 15
    assert (codes * step + low.float()[:, None] - z_NK).abs().le(0.51 * step + 0.02).all()
