"""Balance the variance of a tile, the tokens of a block times the channels of a head, then round: KVarN's quantizer."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import pack, product, rtn, sinkhorn
from kvq_runtime.ops.rotation import Rotation, rotate
from kvq_runtime.stages.stage import NOTHING, Fields, Quantizer, Site, Specs, Tensors


@dataclass(frozen=True)
class Sinkhorn(Quantizer):
    """Divide one axis of a tile by scales that balance it, and round along that axis, between the ends of each row.

    bits   1 to 8
    rows   "channel": rounded along the tokens, a row is a channel · "token": rounded along the channels of a head

        x̂_rc = b_c · (low_r + step_r · code_rc)

    Rows are rounded between their own ends, so the scale that balances them is part of step and low. All three are
    float16, and codes are those of x / b with the stored b.

    Source: Müller et al., 2026 (KVarN): keys by channel, values by token.
    Differs: codes are chosen with the stored numbers, and b has geometric mean 1, so that float16 holds it.
    """

    kind: ClassVar[str] = "sinkhorn"
    bits: int = 4
    rows: Literal["token", "channel"] = "token"

    def __post_init__(self):
        super().__post_init__()
        if self.bits not in range(1, 9):
            raise ValueError(f"bits={self.bits}; use 1 to 8")

    def check(self, site: Site) -> None:
        if site.scheme.axis != "token":
            raise ValueError('sinkhorn has an axis of its own; use axis "token", and rows "channel" or "token"')
        super().check(site)

    def fields(self, rows: int, width: int, geometry: Geometry, dtype: torch.dtype) -> Specs:
        """Packed codes, step and low end of every row, and the scale of every column, by head."""
        token, channel = (geometry.kv_heads, rows), (geometry.kv_heads, geometry.head_size)
        row, column = (token, channel) if self.rows == "token" else (channel, token)
        codes = (*row, pack.packed_size(column[1], self.bits))
        return {"codes": (codes, torch.uint8)} | {
            name: (shape, torch.float16) for name, shape in (("step", row), ("low", row), ("scale", column))
        }

    def encode(self, x_NRW: Tensor, rotation: Rotation, tensors: Tensors, geometry: Geometry) -> dict[str, Tensor]:
        """Rotate tokens of any float dtype, divide the columns of tiles [N, H, rows, columns], and round."""
        x = self._turned(rotate(x_NRW, rotation).unflatten(-1, (geometry.kv_heads, -1)).transpose(1, 2))
        scale = sinkhorn.column_scales(x).half()
        codes, step, low = rtn.encode((x * product.inverse(scale.float())).contiguous(), self.bits)
        return {"codes": codes, "step": step, "low": low, "scale": scale[..., 0, :]}

    def decode(
        self, fields: Fields, width: int, geometry: Geometry, tensors: Tensors = NOTHING, out: Tensor | None = None
    ) -> Tensor:
        """Decode to float32 [N, R, W]."""
        codes = pack.unpack(fields["codes"], self.bits, fields["scale"].shape[-1])
        x = rtn.decode(codes, fields["step"], fields["low"], self.bits).mul_(fields["scale"].float()[..., None, :])
        return self._turned(x).transpose(1, 2).flatten(-2)

    def _turned(self, x_NHTD: Tensor) -> Tensor:
        """Exchange tokens and channels of tiles where rows are channels."""
        return x_NHTD if self.rows == "token" else x_NHTD.mT
