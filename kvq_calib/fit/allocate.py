"""Share bits out: among latent channels by reverse water-filling, among layers by choosing of what was measured.

    water_fill   minimise Σ λ_r d(b_r)   subject to   Σ b_r = budget,   0 ≤ b_r ≤ most
    choose       minimise Σ e_p(c_p)     subject to   Σ w_p(c_p) ≤ budget,   c_p one of the options of place p

where λ are the variances and d(b) is what b bits leave of a unit variance. d falls convexly, so giving one bit at a
time to the channel that gains most is optimal (Fox, 1966); with d(b) = 4^-b and fractions of bits it is the textbook's
b_r = max(0, ½ log₂ λ_r / θ).

What was measured need not fall convexly, or at all, and options cost what they cost; so `choose` is exact, by dynamic
programming over what may be spent: the multiple-choice knapsack.

Source: Cover and Thomas, 2006, section 10.3.3; Shoham and Gersho, 1988 (whole bits; options of measured error, by a
Lagrangian, which reaches only the budgets on the convex hull); Kellerer, Pferschy and Pisinger, 2004, chapter 11.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def water_fill(variances_R: Tensor, budget: int, distortions: Sequence[float]) -> list[int]:
    """Bits of each channel, in the channels' order. Ties go to the channel that comes first.

    distortions   d(0), d(1), ..., d(most): falling, and by less and less
    """
    most = len(distortions) - 1
    gains = [first - second for first, second in pairwise(distortions)]
    if any(gain <= 0 for gain in gains) or gains != sorted(gains, reverse=True):
        raise ValueError(f"distortions={list(distortions)}; they must fall, by less and less")
    if not 0 <= budget <= most * len(variances_R):
        raise ValueError(f"budget={budget} for {len(variances_R)} channels of at most {most} bits; use less, or 0")
    table_RB = variances_R.cpu().double()[:, None] * torch.tensor(gains, dtype=torch.float64)
    # bit by bit over all channels: on equal gains the lower bit and then the first channel comes first
    order = table_RB.mT.flatten().argsort(descending=True, stable=True)[:budget]
    return (order % len(variances_R)).bincount(minlength=len(variances_R)).tolist()


def counts(bits_R: Sequence[int], widths: Sequence[int]) -> tuple[int, ...]:
    """Count the channels of each of these widths: what a schedule in falling order stores."""
    if any(bits not in widths for bits in bits_R):
        raise ValueError(f"bits {sorted(set(bits_R))}; the schedule has {list(widths)}")
    return tuple(sum(bits == width for bits in bits_R) for width in widths)


def choose(costs: Sequence[Sequence[int]], errors: Sequence[Sequence[float]], budget: int) -> list[int]:
    """The option of each place, so that the errors' sum is least and the costs' sum at most `budget`.

    costs, errors   of each place's options. On equal errors the cheaper option is taken
    """
    least = [min(own) for own in costs]
    room = budget - sum(least)
    if room < 0:
        raise ValueError(f"budget={budget}; the cheapest options cost {sum(least)}: use at least that")
    spare = [[cost - low for cost in own] for own, low in zip(costs, least, strict=True)]
    unit = max(1, math.gcd(*(cost for own in spare for cost in own)))
    orders = [sorted(range(len(own)), key=own.__getitem__) for own in spare]
    best_S = torch.zeros(room // unit + 1, dtype=torch.float64)  # least error of the places so far, by units spent
    picks = []
    for own, error, order in zip(spare, errors, orders, strict=True):
        table_OS = torch.full((len(own), len(best_S)), torch.inf, dtype=torch.float64)
        for row_S, option in zip(table_OS, order, strict=True):
            start = own[option] // unit
            row_S[start:] = best_S[: max(0, len(best_S) - start)] + error[option]
        picks.append(table_OS.argmin(0))
        best_S = table_OS.amin(0)
    left, found = len(best_S) - 1, []
    for own, order, pick_S in zip(reversed(spare), reversed(orders), reversed(picks), strict=True):
        found.append(order[int(pick_S[left])])
        left -= own[found[-1]] // unit
    return found[::-1]
