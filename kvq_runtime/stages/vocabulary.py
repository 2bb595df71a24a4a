"""Store which token it is: the first layer's keys before RoPE, and its values, are rows of a table of the vocabulary.

    k₀ = W norm(embedding of the token)      so a key says which token it is, and the token which key

The table is calibrated from the model's weights; a token is found by the nearest row, so that the cache need not be
told ids, and what is no token's (an embedding that was given as such) gets the row that is nearest to it. What the
layers above are predicted from is then exact but for the table's rounding. In bfloat16 the table takes 2 bytes times
vocabulary times width, for keys and for values: 262 MB each for 128,256 tokens and 1024 channels; in 4 bits (`storage`)
74 MB, each row decoded from its codes. It is counted as predictors are.
"""

from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import pack
from kvq_runtime.ops.rotation import Rotation
from kvq_runtime.stages import four_bits
from kvq_runtime.stages.stage import NOTHING, Fields, Quantizer, Site, Specs, Tensors

MAX_BITS = 18  # bits of a token's number: 262,144 tokens
ROWS, TOKENS = 8192, 1024  # of one product


@dataclass(frozen=True)
class Vocabulary(Quantizer):
    """Round a token of the first layer to the nearest row of the table.

    size      tokens of the vocabulary, 2 to 262144; the fit finds it. 0: not known yet, billed at 18 bits a token
    storage   of the table: "bf16", or "rtn4", 4.5 bits a number
    """

    kind: ClassVar[str] = "vocabulary"
    fitted: ClassVar[bool] = True
    size: int = 0
    _: KW_ONLY  # younger than the file format
    storage: Literal["bf16", "rtn4"] = "bf16"

    def __post_init__(self):
        if self.storage not in ("bf16", "rtn4"):
            raise ValueError(f'storage={self.storage!r}; use "bf16" or "rtn4"')
        if self.size != 0 and not 2 <= self.size <= 1 << MAX_BITS:
            raise ValueError(f"size={self.size}; use 2 to {1 << MAX_BITS} tokens, or 0, which the fit fills in")

    @property
    def bits(self) -> int:
        """Bits of a token's number."""
        return (self.size - 1).bit_length() if self.size else MAX_BITS

    @property
    def _rows(self) -> int:
        """Rows of the table; a few while the vocabulary is not known."""
        return self.size or 256

    def tensors(self, site: Site, geometry: Geometry) -> Specs:
        """The row of every token, without the mean."""
        if self.storage == "rtn4":
            return four_bits.specs(geometry.width, self._rows, "table_")
        return {"table": ((self._rows, geometry.width), torch.bfloat16)}

    def of_vocabulary(self, tokens: int) -> "Vocabulary":
        return self if self.size else replace(self, size=tokens)

    def rows(self, tensors: Tensors, width: int, which: Tensor | slice) -> Tensor:
        """Rows of the table, bfloat16 [..., C]."""
        if self.storage == "rtn4":
            return four_bits.rows(tensors, width, which, "table_")
        return tensors["table"][which]

    def check(self, site: Site) -> None:
        if site.layer != 0:
            raise ValueError("only the first layer's keys and values are a function of the token; use it in layer 0")
        if site.role == "key" and site.position != "pre":
            raise ValueError('keys after RoPE depend on the position, too; use position "pre"')
        if site.scheme.rotate is not None or site.scheme.axis != "token" or site.window.block % 8:
            raise ValueError('a vocabulary needs no rotation, axis "token" and a block of a multiple of 8 tokens')
        super().check(site)

    def fields(self, rows: int, width: int, geometry: Geometry, dtype: torch.dtype) -> Specs:
        """The numbers of a block's tokens, packed."""
        return {"ids": ((pack.places_size(rows, self.bits),), torch.uint8)}

    def encode(self, x_NRW: Tensor, rotation: Rotation, tensors: Tensors, geometry: Geometry) -> dict[str, Tensor]:
        """The nearest rows of [N, R, C]: argmin ‖x - t‖² = argmax x t - ‖t‖²/2; the first of equal ones."""
        ids_NR = torch.cat([self._nearest(part, tensors) for part in x_NRW.float().flatten(0, 1).split(TOKENS)])
        return {"ids": pack.pack_places(ids_NR.view(x_NRW.shape[:2]), self.bits)}

    def decode(
        self, fields: Fields, width: int, geometry: Geometry, tensors: Tensors = NOTHING, out: Tensor | None = None
    ) -> Tensor:
        """Decode to bfloat16 [N, R, C]; blocks have a multiple of 8 tokens."""
        packed = fields["ids"]
        ids_NR = pack.unpack_places(packed, self.bits, 8 * packed.shape[-1] // self.bits)
        return self.rows(tensors, width, ids_NR)

    def at(
        self,
        fields: Fields,
        block_N: Tensor,
        token_N: Tensor,
        block: int,
        geometry: Geometry,
        tensors: Tensors = NOTHING,
    ) -> Tensor:
        """Decode single tokens to bfloat16 [N, C]."""
        packed, start = fields["ids"].flatten(), block_N * fields["ids"].shape[1]
        ids_N = torch.zeros_like(token_N)
        for shift in range(0, self.bits, 8):
            bits = min(8, self.bits - shift)
            ids_N |= pack.pick(packed, start, token_N, bits, block).long() << shift
            start = start + pack.packed_size(block, bits)
        return self.rows(tensors, geometry.width, ids_N)

    def memory_kind(self, field: str) -> str:
        return "codes"

    def _nearest(self, x_NC: Tensor, tensors: Tensors) -> Tensor:
        """The number of the nearest row, int64 [N]."""
        place_N = torch.zeros(len(x_NC), dtype=torch.int64, device=x_NC.device)
        best_N = x_NC.new_full((len(x_NC),), -torch.inf)
        for first in range(0, self._rows, ROWS):
            rows_RC = self.rows(tensors, x_NC.shape[1], slice(first, first + ROWS)).float()
            score_N, here_N = (x_NC @ rows_RC.mT - rows_RC.square().sum(1) / 2).max(1)
            place_N = torch.where(score_N > best_N, first + here_N, place_N)
            best_N = torch.maximum(best_N, score_N)
        return place_N
