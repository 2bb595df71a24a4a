"""Score queries against keys that are encoded channel by channel, without decoding them.

Group m of tokens of channel c is decoded to  x_c = s_cm · y_c + l_cm  with looked-up values y, a step s and a low end l
(or none). So

  q · x_t = (q ∘ s_m) · y_t + q · l_m     the query is multiplied once a group, tokens never

Y = B · H rows of heads · N queries per head · Z = B · n blocks · M groups of a block ·
H · W tokens of a group
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvq_runtime.codec.block_input import BlockRun
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops.constant import constant
from kvq_runtime.ops.pack import PackedCodes
from kvq_runtime.stages.stage import Scheme


@dataclass(frozen=True)
class ChannelReader:
    """Scores of one codec's keys without decoding them.

    turn   the place, in a group as it is read, of each token, int64; None: groups are read in order
    """

    geometry: Geometry
    packed: PackedCodes
    turn: Tensor | None
    by_group: ClassVar[bool] = False  # how slabs lie

    def view_blocks(self, fields: Mapping[str, Tensor], first: int) -> BlockRun:
        """Return the blocks [B, n, C, M, ...] of a run, from token `first` on."""
        _, blocks, _, groups, _ = fields["codes"].shape
        return BlockRun(fields, first, blocks * groups * self.packed.group - first)

    def scores(self, q_YND: Tensor, packed_blocks: BlockRun, angles: object = None) -> Tensor:
        """Return q · k for every token of the blocks: [Y, N, T]. `angles` are for readers whose keys turn."""
        # group by group, so that what a product reads lies together
        codes_BnMCX = packed_blocks.fields["codes"].transpose(2, 3).contiguous()
        batch, blocks, groups, _, _ = codes_BnMCX.shape
        heads, size = self.geometry.kv_heads, self.geometry.head_size
        y_ZDW = self.packed.read(codes_BnMCX).view(-1, size, self.packed.group)
        step_BnCM, low_BnCM = self.packed.ends(packed_blocks.fields)
        q_B11HND = q_YND.view(batch, 1, 1, heads, -1, size)
        u_BnMHND = q_B11HND * step_BnCM.mT.contiguous().float().unflatten(3, (heads, 1, size))
        s_ZNW = torch.bmm(u_BnMHND.flatten(0, 3), y_ZDW)
        s_ZNW = s_ZNW if self.turn is None else s_ZNW.index_select(2, self.turn)
        s_BHNnMW = s_ZNW.unflatten(0, (batch, blocks, groups, heads)).permute(0, 3, 4, 1, 2, 5)
        if low_BnCM is not None:
            low_YDX = low_BnCM.float().unflatten(2, (heads, size)).permute(0, 2, 3, 1, 4).flatten(3).flatten(0, 1)
            s_BHNnMW = s_BHNnMW + torch.bmm(q_YND, low_YDX).view(*s_BHNnMW.shape[:5], 1)
        return s_BHNnMW.flatten(3).flatten(0, 1)[..., packed_blocks.first :]


def channel_reader(scheme: Scheme, block: int, geometry: Geometry, device: torch.device) -> ChannelReader | None:
    """Return the reader of keys that are encoded channel by channel; None: they have to be decoded."""
    if scheme.axis != "channel" or any((scheme.rotate, scheme.predict, scheme.correct)):
        return None
    codes = scheme.quantize.packed(block, geometry, device)
    if codes is None or codes.order is None:
        return None
    order = codes.order.tolist()
    place = None if order == sorted(order) else _inverse(tuple(order), device)
    return ChannelReader(geometry, codes._replace(order=None), place)


@constant(8)
def _inverse(order: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the inverse of a permutation, int64, which all readers share."""
    return torch.tensor(order).argsort().to(device)
