"""Read and write rows of keys and values in pages whose inner order is the attention backend's own.

A backend may put a page's elements in any order: a CPU's swaps dimensions of keys for its vector units. The order is
not known here; it is asked: tokens whose every element is a number of its own are written by the backend itself, and
where each number is found is the order. Numbers are written in digits of 8 bits, which every dtype holds exactly.

B pages of the cache · P pages in a row · N tokens of a page · H KV heads · D head size · X = H · N · 2 · D.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DIGIT = 256  # bfloat16 has every whole number up to it

Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]  # keys and values [T, H, D], cache, slots int64 [T]


@dataclass(frozen=True)
class PageOrder:
    """The place of each element of a page's tokens, in a page [H, N, 2 D] as vLLM shows it.

    places   int64 [N · H · 2 · D], by token, head, key or value, element
    """

    tokens: int
    heads: int
    size: int
    places_X: Tensor

    def read(self, cache_BHNC: Tensor, pages: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys and values of pages, [P · N, H · D] each, copied."""
        raw_PX = cache_BHNC[torch.tensor(pages, device=cache_BHNC.device)].flatten(1)
        x_PNH2D = raw_PX[:, self.places_X].view(len(pages), self.tokens, self.heads, 2, self.size)
        k_TC, v_TC = (x_PNH2D[:, :, :, role].reshape(-1, self.heads * self.size) for role in (0, 1))
        return k_TC, v_TC

    def write(self, cache_BHNC: Tensor, pages: Sequence[int], k_THD: Tensor, v_THD: Tensor) -> None:
        """Put keys and values [P · N, H, D] into pages."""
        x_PX = torch.stack([k_THD, v_THD], 2).reshape(len(pages), -1)
        raw_PX = torch.empty_like(x_PX, dtype=cache_BHNC.dtype)
        raw_PX[:, self.places_X] = x_PX.to(cache_BHNC.dtype)
        cache_BHNC[torch.tensor(pages, device=cache_BHNC.device)] = raw_PX.view(-1, *cache_BHNC.shape[1:])


def asked(cache_BHNC: Tensor, heads: int, size: int, write: Write) -> PageOrder:
    """The order of a layer's pages, by what `write` does to page 0, whose content is put back.

    Raises ValueError for a cache that does not hold every element once, in a float dtype: it is quantized or padded.
    """
    tokens, shape = cache_BHNC.shape[2], list(cache_BHNC.shape[1:])
    count = heads * tokens * 2 * size
    if shape != [heads, tokens, 2 * size] or not cache_BHNC.dtype.is_floating_point or cache_BHNC.dtype.itemsize < 2:
        raise ValueError(f"a page is {shape}, {cache_BHNC.dtype}, and not {[heads, tokens, 2 * size]} in 16 or 32 bits")
    before = cache_BHNC[0].clone()
    numbers = torch.arange(count, device=cache_BHNC.device)
    slots = torch.arange(tokens, device=cache_BHNC.device)
    held = torch.zeros_like(numbers)
    try:
        for power in range(-(-(count - 1).bit_length() // 8)):
            x_NH2D = (numbers >> 8 * power).remainder(DIGIT).to(cache_BHNC.dtype).view(tokens, heads, 2, size)
            write(x_NH2D[:, :, 0].contiguous(), x_NH2D[:, :, 1].contiguous(), cache_BHNC, slots)
            held += cache_BHNC[0].flatten().long() << 8 * power
    finally:
        cache_BHNC[0] = before
    places_X = torch.full_like(numbers, -1)
    places_X[held.clamp(0, count - 1)] = numbers
    if not torch.equal(held.sort().values, numbers):
        raise ValueError("the attention backend does not keep keys and values as they are")
    return PageOrder(tokens, heads, size, places_X)
