"""Laws of the statistics: chunks merged are one pass over everything; means cost no digits; samples know no chunks."""

import numpy as np
import torch

from kvq_calib.fit.statistics import CrossMoments, Moments, Sample


def _data(rows: int = 96, width: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 8, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _relative(found: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.abs(found.numpy() - expected).max() / np.abs(expected).max())


def test_moments_of_chunks_are_those_of_everything():
    x, mask = _data(), torch.rand(96, 8, generator=torch.Generator().manual_seed(1)) < 0.7
    total = Moments(6)
    for part, kept in zip(x.split(10), mask.split(10), strict=True):
        partial = Moments(6)
        partial.update(part[:4], kept[:4])
        partial.update(part[4:], kept[4:])
        total.merge(partial)
    rows = x[mask].numpy()
    value = total.value()
    assert value.count == mask.sum()
    assert _relative(value.mean_C, rows.mean(0)) < 1e-9
    assert _relative(value.variance_C, rows.var(0)) < 1e-9


def _covariances(x: np.ndarray, y: np.ndarray):
    x, y = x - x.mean(0), y - y.mean(0)
    return x.T @ x / len(x), x.T @ y / len(x), (y * y).mean(0)


def test_cross_moments_of_chunks_are_those_of_everything():
    # multiples of 1/8: their products are exact in float32, so that only the sums are tested
    x, y = ((_data(seed=s) * 8).round() / 8 for s in (1, 2))
    mask = torch.ones(96, 8, dtype=torch.bool)
    mask[:, :2] = False
    total = CrossMoments(x[0, 0].float(), y[0, 0].float())
    for parts in zip(x.split(7), y.split(7), mask.split(7), strict=True):
        partial = CrossMoments(x[0, 0].float(), y[0, 0].float())
        partial.update(*parts)
        total.merge(partial)
    value = total.value()
    xx, xy, yy = _covariances(x[mask].numpy(), y[mask].numpy())
    assert value.count == mask.sum()
    for found, expected in ((value.xx_II, xx), (value.xy_IO, xy), (value.yy_O, yy)):
        assert _relative(found, expected) < 1e-9
    assert torch.equal(value.xx_II, value.xx_II.mT)


def test_cross_moments_keep_small_covariances_under_large_means():
    x, y = (((_data(2000, seed=s) + 1e3).float()) for s in (3, 4))
    y = y + x  # so that there is something to find
    sums = CrossMoments(x[:1].mean((0, 1)), y[:1].mean((0, 1)))
    sums.update(x, y)
    value = sums.value()
    xx, xy, yy = _covariances(x.flatten(0, 1).double().numpy(), y.flatten(0, 1).double().numpy())
    assert _relative(value.xx_II, xx) < 1e-6
    assert _relative(value.xy_IO, xy) < 1e-6
    assert _relative(value.yy_O, yy) < 1e-6


def test_what_a_map_leaves_has_a_moment_that_follows():
    x, y = (_data(seed=s)[..., :width] for s, width in ((5, 5), (6, 3)))
    sums = CrossMoments(torch.zeros(5), torch.zeros(3))
    sums.update(x, y)
    weight_IO, bias_O = torch.randn(5, 3, generator=torch.Generator().manual_seed(7)), torch.tensor([1.0, 0.0, -2.0])
    left = (y - x @ weight_IO.double() - bias_O).flatten(0, 1)
    torch.testing.assert_close(sums.value().left(weight_IO, bias_O), left.mT @ left / len(left), rtol=1e-5, atol=1e-5)


def test_a_sample_among_so_many_is_the_same_and_looks_at_few():
    x, rows, asked = _data(4000, 2), torch.arange(4000), []

    def made(places_K: torch.Tensor) -> torch.Tensor:
        asked.append(len(places_K))
        return x.flatten(0, 1)[places_K]

    plain, found = Sample(400, 2), Sample(400, 2, among=32_000)
    plain.update(x.flatten(0, 1).__getitem__, rows, 8)
    for start in range(0, 4000, 1000):
        found.update(lambda places_K, start=start: made(places_K + 8 * start), rows[start : start + 1000], 8)
    assert torch.equal(found.value(), plain.value()) and 400 < sum(asked) < 700


def _sample(x: torch.Tensor, chunk: int, order: list[int], seed: int = 0) -> Sample:
    total = Sample(40, 6, seed)
    starts = range(0, len(x), chunk)
    for place in order or range(len(starts)):
        rows = torch.arange(starts[place], min(starts[place] + chunk, len(x)))
        partial = Sample(40, 6, seed)
        partial.update(x[rows].flatten(0, 1).__getitem__, rows, x.shape[1])
        total.merge(partial)
    return total


def test_a_sample_does_not_depend_on_chunks_or_order():
    x = _data()
    expected = _sample(x, 96, []).value()
    for chunk, order in ((7, []), (24, [3, 1, 0, 2]), (1, [])):
        assert torch.equal(_sample(x, chunk, order).value(), expected), chunk
    assert len(set(map(tuple, expected.tolist())) & set(map(tuple, x.float().flatten(0, 1).tolist()))) == 40
    assert not torch.equal(_sample(x, 96, [], seed=1).value(), expected)


def test_a_sample_is_spread_evenly_and_respects_its_mask():
    sample = Sample(4000, 1)
    mask = torch.ones(512, 64, dtype=torch.bool)
    mask[:, :4] = False
    sample.update(torch.arange(64.0).repeat(512)[:, None].__getitem__, torch.arange(512), 64, mask_NT=mask)
    position_R = sample.value()[:, 0].long()
    assert len(position_R) == 4000 and position_R.min() == 4
    # of 60 positions each has 66.7 ± 8 rows; six deviations
    counts = torch.bincount(position_R, minlength=64)[4:]
    assert (counts - 4000 / 60).abs().max() < 6 * (4000 / 60) ** 0.5
