"""Read and write rows of vLLM's pages, in whatever order the backend puts them.

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
class Rows:
    """A layer's cache, [B, H, N, 2 D] as vLLM shows it, and the inner order of its pages.

    places   where in a page each element of its tokens is, int64 [N · H · 2 · D], by token, head, key or value, element
    parts    pages of the cache that make up one of the engine's
    """

    cache_BHNC: Tensor
    places_X: Tensor
    parts: int = 1

    @property
    def device(self) -> torch.device:
        return self.cache_BHNC.device

    def read(self, pages: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys and values of the engine's pages, [tokens, H · D] each, copied."""
        heads, tokens, width = self.cache_BHNC.shape[1:]
        raw_PX = self.cache_BHNC[self._own(pages)].flatten(1)
        x_TH2D = raw_PX[:, self.places_X].view(len(raw_PX) * tokens, heads, 2, width // 2)
        return x_TH2D[:, :, 0].flatten(1), x_TH2D[:, :, 1].flatten(1)

    def write(self, pages: Sequence[int], k_THD: Tensor, v_THD: Tensor) -> None:
        """Put keys and values into the engine's pages, all of their tokens."""
        own_P, cache_BHNC = self._own(pages), self.cache_BHNC
        x_PX = torch.stack([k_THD, v_THD], 2).reshape(len(own_P), -1)
        raw_PX = torch.empty_like(x_PX, dtype=cache_BHNC.dtype)
        raw_PX[:, self.places_X] = x_PX.to(cache_BHNC.dtype)
        cache_BHNC[own_P] = raw_PX.view(-1, *cache_BHNC.shape[1:])

    def _own(self, pages: Sequence[int]) -> Tensor:
        own = [first * self.parts + n for first in pages for n in range(self.parts)]
        return torch.tensor(own, device=self.cache_BHNC.device)


def asked(cache_BHNC: Tensor, heads: int, size: int, write: Write) -> Tensor:
    """The `places` of a layer's pages, by what `write` does to page 0, whose content is put back.

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
    return places_X
