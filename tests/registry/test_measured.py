"""What windows that were measured say of windows that were not."""

import random

import pytest

from kvq_runtime.registry.measured import Figures, Scores


def figures(kls: list[float]) -> Figures:
    return Figures(perplexity=2.0, relative=0.0, windows=Scores(kl=tuple(kls)))


def test_a_bound_is_a_window_that_was_seen():
    assert figures([float(n) for n in range(19, 0, -1)]).kl_bound(0.95) == (19.0, 0.95)
    assert figures([float(n) for n in range(1, 40)]).kl_bound(0.95) == (38.0, 0.95)
    assert figures([3.0, 1.0]).kl_bound(0.95) == (3.0, pytest.approx(2 / 3))
    assert figures([3.0, 1.0, 2.0]).kl_bound(0.5) == (2.0, 0.5)
    assert figures([]).kl_bound(0.95) is None and Figures(perplexity=2.0, relative=0.0).kl_bound(0.9) is None


@pytest.mark.parametrize("count, level", [(12, 0.9), (19, 0.95), (5, 0.95)])
def test_it_holds_as_often_as_it_says_of_any_distribution(count, level):
    """Heavy tails as well: of 4,000 draws, to four standard errors."""
    draw, kept, trials = random.Random(0), 0, 4000
    for _ in range(trials):
        x, share = figures([draw.paretovariate(0.7) for _ in range(count)]).kl_bound(level)
        kept += draw.paretovariate(0.7) <= x
    assert kept / trials >= share - 4 * (share * (1 - share) / trials) ** 0.5
