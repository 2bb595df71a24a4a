"""Round to nearest after a clip: of each group, elements beyond an order statistic of the magnitudes are cut to it."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import rtn
from kvq_runtime.ops.rotation import Rotation, rotate
from kvq_runtime.stages import groups
from kvq_runtime.stages.rtn import Rtn
from kvq_runtime.stages.stage import Quantizer, Tensors


@dataclass(frozen=True)
class Clipped(Rtn):
    """Round to `bits` in groups whose largest magnitudes are cut.

    keep   share of a group's magnitudes, in ascending order, below the one that all are cut to: of K elements the one
           with floor(keep · K) below it

    At 2 bits a finer step for the bulk of a group is worth more than its few largest elements.

    Source: Zhou et al., 2026 (OSCAR), the clipping thresholds; the authors' kernels take the order statistic.
    """

    kind: ClassVar[str] = "rtn_clipped"
    papers: ClassVar[tuple[str, ...]] = ("2605.17757",)
    papers_in = Quantizer.papers_in
    keep: float = 0.96

    def __post_init__(self):
        super().__post_init__()
        if not 0.5 <= self.keep < 1:
            raise ValueError(f"keep={self.keep}; use at least 0.5 and less than 1, or quantize by rtn")

    def encode(self, x_NRW: Tensor, rotation: Rotation, tensors: Tensors, geometry: Geometry) -> dict[str, Tensor]:
        """Rotate, clip and encode rows of any float dtype: the fields, [N, R, W/group, ...] each."""
        size = groups.size(self.group, x_NRW.shape[-1], geometry)
        x = rotate(x_NRW.unflatten(-1, (-1, size)), rotation)
        reach = x.abs().sort(-1).values[..., int(self.keep * size), None]
        encoded = rtn.encode(x.clamp(-reach, reach), self.bits, self.range)
        return dict(zip(("codes", "step", "low"), encoded, strict=False))

    def one_launch(self, rotation: Rotation, width: int, geometry: Geometry) -> bool:
        """No kernel clips: encoding takes several launches."""
        return False
