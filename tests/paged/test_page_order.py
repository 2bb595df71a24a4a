"""Rows in pages of an order that is asked, not known."""

import pytest
import torch
from torch import Tensor

from kvq_runtime.vllm.page import Rows, places_of

HEADS, SIZE, TOKENS = 3, 8, 4


def plain(k_THD: Tensor, v_THD: Tensor, cache_BHNC: Tensor, slots_T: Tensor) -> None:
    """Rows as they are: keys, then values."""
    cache_BHNC[slots_T // TOKENS, :, slots_T % TOKENS] = torch.cat([k_THD, v_THD], -1)


def turned(k_THD: Tensor, v_THD: Tensor, cache_BHNC: Tensor, slots_T: Tensor) -> None:
    """Keys by dimension instead of by token, before all values, and values backwards."""
    raw_BHX = cache_BHNC.view(len(cache_BHNC), HEADS, -1)
    for slot, k_HD, v_HD in zip(slots_T.tolist(), k_THD, v_THD, strict=True):
        page, place = divmod(slot, TOKENS)
        raw_BHX[page, :, place : TOKENS * SIZE : TOKENS] = k_HD
        start = TOKENS * SIZE + place * SIZE
        raw_BHX[page, :, start : start + SIZE] = v_HD.flip(-1)


def strided(dtype: torch.dtype) -> Tensor:
    """A cache whose heads are the innermost but one, as on a GPU."""
    return torch.zeros(6, TOKENS, HEADS, 2 * SIZE, dtype=dtype).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("write", "make"), [
    (plain, strided), (turned, lambda dtype: strided(dtype).contiguous()),
])  # fmt: skip
def test_rows_come_back_from_where_the_backend_put_them(write, make, dtype):
    """Read what a backend wrote; write what the same backend would; page 0 is as it was."""
    cache = make(dtype)
    cache[0] = 7
    places = places_of(cache, HEADS, SIZE, write)
    assert bool((cache == 7).all(-1).all(-1).all(-1)[0]) and not cache[1:].any()
    k, v = torch.randn(2, 2 * TOKENS, HEADS, SIZE).to(dtype)
    pages = [4, 2]
    write(k, v, cache, torch.tensor([4, 2]).repeat_interleave(TOKENS) * TOKENS + torch.arange(TOKENS).repeat(2))
    found = Rows(cache, places).read(pages)
    assert torch.equal(found[0], k.flatten(1)) and torch.equal(found[1], v.flatten(1))
    again = make(dtype)
    again[0] = 7
    Rows(again, places).write(pages, k, v)
    assert torch.equal(again, cache)


def test_more_elements_than_a_digit_counts_are_told_apart():
    """256 · 256 and more: three digits."""
    cache = torch.zeros(2, 8, 128, 2 * 64, dtype=torch.bfloat16)

    def write(k_THD, v_THD, cache_BHNC, slots_T):
        cache_BHNC[slots_T // 128, :, slots_T % 128] = torch.cat([k_THD, v_THD], -1)

    places = places_of(cache, 8, 64, write)
    k, v = torch.randn(2, 128, 8, 64).bfloat16()
    write(k, v, cache, 128 + torch.arange(128))
    assert torch.equal(Rows(cache, places).read([1])[0], k.flatten(1))


def test_a_cache_that_does_not_keep_rows_is_refused():
    """Rounded, or of another size."""

    def rounding(k_THD, v_THD, cache_BHNC, slots_T):
        plain((k_THD / 16).round() * 16, v_THD, cache_BHNC, slots_T)

    with pytest.raises(ValueError, match="as they are"):
        places_of(strided(torch.float32), HEADS, SIZE, rounding)
    with pytest.raises(ValueError, match="16 or 32 bits"):
        places_of(strided(torch.float32)[..., :-1], HEADS, SIZE, plain)
    with pytest.raises(ValueError, match="16 or 32 bits"):
        places_of(strided(torch.uint8), HEADS, SIZE, plain)
