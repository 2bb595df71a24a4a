"""Note what every forward pass read from a compressed cache, row by row: did an answer depend on what was encoded?

A pass into an empty cache reads its own exact keys and values, and is not noted.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvq_runtime.hf import KVQCache
from kvq_runtime.hf.model import real_tokens


class WitnessCache(KVQCache):
    """A KVQCache in use, with any attention, whose rows may be padded on either side.

    passes   for each pass but the first, of each row, int64 [B or 1]: pairs of a token of the pass and one that it
             reads; and of these the pairs whose second is no exact token: decoded, or evicted. Where layers have
             encoded differently many, what the layer with the fewest has
    """

    def __init__(self, recipe, model: PreTrainedModel, tensors: Mapping[str, Tensor] | None = None):
        super().__init__(recipe, model, tensors)
        self.blocks.decoder.keep = True
        self.passes: list[tuple[Tensor, Tensor]] = []

    def _announce(self, positions_BT, cos_sin, rotary, attention: str | None) -> None:
        if not self._announced and positions_BT is not None and self.blocks.layers and self.blocks.length:
            self._note(positions_BT.shape[-1], positions_BT.device)
        super()._announce(positions_BT, cos_sin, rotary, attention)

    def _note(self, count: int, device: torch.device) -> None:
        """Note a pass of `count` tokens, none of which has been stored yet."""
        places = self.blocks.positions
        encoded, sinks = min(store.encoded for store in self.blocks.layers.values()), self.blocks.recipe.window.sinks
        real_BT = places.real_BT
        if real_BT is None:
            real_BT = torch.ones(1, places.length, dtype=torch.bool, device=device)
        real = real_tokens(self._mask, count)
        new_B = torch.tensor([count], device=device) if real is None else real.sum(1)
        coded_B = (real_BT[:, :encoded].sum(1) - sinks).clamp(min=0) + places.dropped
        read_B = new_B * (real_BT.sum(1) + places.dropped) + new_B * (new_B + 1) // 2
        self.passes.append((read_B, new_B * coded_B))

    def shares(self, rows: int, passes: Sequence[int] | None = None) -> list[float]:
        """Return, for each row, the share of its reads, 0 to 1, of tokens no longer exact; 0 if it read nothing.

        passes   how many of the noted passes, the first ones, count for each row; None: all
        """
        found = []
        for row in range(rows):
            noted = self.passes if passes is None else self.passes[: passes[row]]
            read, coded = (sum(_of_row(one[place], row) for one in noted) for place in (0, 1))
            found.append(coded / read if read else 0.0)
        return found


def _of_row(counts_B: Tensor, row: int) -> int:
    return int(counts_B[row if len(counts_B) > 1 else 0])
