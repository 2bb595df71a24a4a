"""Mark each chunk of encoded keys by its mean, and keep the keys of those that a mean does not describe.

    landmark = mean of the chunk's keys after RoPE, by head         outlier: smallest min_t cos(key_t, landmark)

Landmarks are stored with the block they belong to. As many outlier chunks as the recipe says are kept, by row and head,
of all that have been encoded so far; a chunk that others push out is still there, encoded like all.

Source: Sun et al., 2024 (ShadowKV), algorithm 1.
Differs: outliers are found as blocks are encoded, in the prompt and after it, theirs once, in the prompt; sinks and
padding count neither for a landmark nor for its cosines; only keys are kept exact, values are read from their blocks.
"""

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.stages.select import Chunks

State = tuple[Tensor, Tensor, Tensor]


class Outliers:
    """The outlier chunks of one layer: O of them in each row (B) and head (H), each of K tokens.

    chunk_BHO   which chunk; -1: none yet       cosine_BHO   its smallest cosine       k_BHOKD   its keys after RoPE
    """

    def __init__(self, select: Chunks, geometry: Geometry, batch: int, dtype: torch.dtype, device: torch.device):
        self.select, self.geometry = select, geometry
        shape = (batch, geometry.kv_heads, select.outliers)
        self.chunk_BHO = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.cosine_BHO = torch.full(shape, torch.inf, device=device)
        self.k_BHOKD = torch.zeros(*shape, select.chunk, geometry.head_size, dtype=dtype, device=device)
        self._kept: State | None = None

    @property
    def state(self) -> State:
        """What is held."""
        return self.chunk_BHO, self.cosine_BHO, self.k_BHOKD

    def add(self, block: int, x_BTC: Tensor, valid_BT: Tensor) -> dict[str, Tensor]:
        """Take in a block's exact keys; its landmarks [B, chunks, C], zero where no token of a chunk is valid."""
        size, count = self.select.chunk, x_BTC.shape[1] // self.select.chunk
        k_BHNKD = x_BTC.unflatten(-1, (self.geometry.kv_heads, -1)).transpose(1, 2).unflatten(2, (count, size))
        valid = valid_BT.expand(len(x_BTC), -1).unflatten(1, (count, size))[:, None, :, :, None]
        keys = k_BHNKD.float()
        mark_BHND = (keys * valid).sum(3) / valid.sum(3).clamp(min=1)
        cosine = torch.cosine_similarity(keys, mark_BHND[:, :, :, None], dim=-1)
        cosine_BHN = cosine.masked_fill(~valid[..., 0], torch.inf).amin(-1)
        number = torch.arange(block * count, (block + 1) * count, dtype=torch.int32, device=x_BTC.device)
        number_BHN = number.expand_as(cosine_BHN).masked_fill(cosine_BHN == torch.inf, -1)
        if self.select.outliers:
            new = (number_BHN, cosine_BHN, k_BHNKD)
            self._keep_lowest(*(torch.cat(pair, 2) for pair in zip(self.state, new, strict=True)))
        return {"landmarks": mark_BHND.transpose(1, 2).flatten(2).to(x_BTC.dtype)}

    def _keep_lowest(self, chunk_BHN: Tensor, cosine_BHN: Tensor, k_BHNKD: Tensor) -> None:
        best = cosine_BHN.argsort(dim=-1, stable=True)[..., : self.select.outliers]
        self.chunk_BHO, self.cosine_BHO = chunk_BHN.gather(2, best), cosine_BHN.gather(2, best)
        self.k_BHOKD = k_BHNKD.gather(2, best[..., None, None].expand(-1, -1, -1, *k_BHNKD.shape[3:]))

    def keep(self) -> None:
        """Keep what is held now, until `release`."""
        self._kept = self.state

    def release(self) -> None:
        """Drop what `keep` kept."""
        self._kept = None

    def undo(self) -> None:
        """Go back to what `keep` kept."""
        if self._kept is not None:
            self.chunk_BHO, self.cosine_BHO, self.k_BHOKD = self._kept
            self._kept = None

    def crop(self, tokens: int) -> None:
        """Forget all but the chunks of the first tokens; what the others had pushed out does not come back."""
        gone = self.chunk_BHO >= tokens // self.select.chunk
        self.chunk_BHO = self.chunk_BHO.masked_fill(gone, -1)
        self.cosine_BHO = self.cosine_BHO.masked_fill(gone, torch.inf)
        self._kept = None

    def take_rows(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        self.chunk_BHO, self.cosine_BHO, self.k_BHOKD = (x.index_select(0, rows) for x in self.state)
        self._kept = None

    def bytes(self) -> int:
        """Allocated bytes."""
        tensors = {x.untyped_storage().data_ptr(): x for x in (*self.state, *(self._kept or ()))}
        return sum(x.untyped_storage().nbytes() for x in tensors.values())
