"""Memory that lasts from one forward pass to the next: allocate it for any mode, count it as allocated, and list it for
a kernel: a layer's index on the device.

A slab holds 32 blocks; only a layer's last grows, by doubling.

What a decode step changes on the device depends on block tables, counts, and a window that stays in its place, not on
what the host counts, so that the step can be recorded as a graph. The host sends its changes when it next publishes
(`attention/fused.py`), and waits for nothing then.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from kvq_runtime.codec.kernel_order import KernelOrder
from kvq_runtime.codec.latent_order import LatentOrder
from kvq_runtime.geometry import SLAB
from kvq_runtime.ops import dispatch
from kvq_runtime.ops.constant import lasting

Slab = dict[str, Tensor]
Order = KernelOrder | LatentOrder | None
SLACK = 64  # tokens that one step may add where the window is


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of their storages, each once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def put(slabs: list[Slab], first: int, fields: Slab, by_group: bool) -> None:
    """Store the fields of blocks from number `first` on, all of one slab: [B, count, ...] each.

    by_group   whether a packed reader takes the ends of groups by group
    """
    place = first % SLAB
    stop = place + next(iter(fields.values())).shape[1]
    needed = 1 << (stop - 1).bit_length()  # SLAB is a power of two
    if place == 0 and first // SLAB == len(slabs):
        slabs.append({name: _room(field, needed, by_group) for name, field in fields.items()})
    slab = slabs[first // SLAB]
    for name, field in fields.items():
        if stop > slab[name].shape[1]:
            grown = _room(field, needed, by_group)
            grown[:, :place] = slab[name][:, :place]
            slab[name] = grown
        slab[name][:, place:stop] = field


def _room(field: Tensor, blocks: int, by_group: bool) -> Tensor:
    """Memory for `blocks` blocks of a field [B, n, ...]; for the ends of groups [B, n, block, M], which a packed reader
    takes by group, by group."""
    batch, _, *shape = field.shape
    if not by_group or len(shape) != 2 or dispatch.runs_kernel(field):
        return field.new_empty(batch, blocks, *shape)
    return field.new_empty(batch, shape[1], blocks, shape[0]).permute(0, 2, 3, 1)


class DeviceIndex:
    """The kernel's index of one layer.

    counts       int32 [4]: blocks, the window's first place in its buffer, its tokens, and what `append` counts
                 with; a row of a tensor of all layers
    tables       of keys and of values, the addresses of their slabs: see kernels/attend/arguments.py
    sinks_2BSC   a copy of the exact first tokens, keys and values
    window_2BTC  where sinks and window are, but for a prompt that has no room there; None before they first are
    orders       how the codes of keys and of values lie in slabs, for its kernel; None: as they are encoded
    stale        whether the device does not know yet how many blocks and tokens there are, and where
    sinks_stale  whether it has other sinks
    """

    @lasting
    def __init__(
        self,
        counts: Tensor,
        columns: tuple[int, int],
        slabs: int,
        sinks_2BSC: Tensor,
        orders: tuple[Order, Order] = (None, None),
    ):
        self.orders = orders
        self.counts = counts
        self.columns = columns
        self.make_tables(slabs)
        self.sinks_2BSC = sinks_2BSC.clone()
        self.window_2BTC: Tensor | None = None
        self.stale = self.sinks_stale = True

    @lasting
    def make_tables(self, slabs: int) -> None:
        """Make room for the addresses of `slabs` slabs."""
        device = self.counts.device
        self.tables = [torch.zeros(slabs, columns, dtype=torch.int64, device=device) for columns in self.columns]
        self.forget_slabs()

    def forget_slabs(self) -> None:
        """Slabs are elsewhere: list them all anew."""
        self.listed: list[list[tuple[int, int]]] = [[], []]
        self.stale = True

    @property
    def tensors(self) -> list[Tensor]:
        """Return the stored tensors, without window and counts."""
        return [*self.tables, self.sinks_2BSC]


@dispatch.paired("window.append")
def append(k_BTC: Tensor, v_BTC: Tensor, window_2BWC: Tensor, counts: Tensor) -> None:
    """Write keys and values of T tokens behind the window's last, and count them.

    window_2BWC   the buffer of keys and values that the window is in, with room for them
    counts        int32 [4]: encoded blocks, the window's first place in the buffer, its tokens, which become T more,
                  and a number that is 0 between launches
    """
    places = counts[1:3].sum() + torch.arange(k_BTC.shape[1], device=counts.device)
    for window_BWC, x_BTC in zip(window_2BWC, (k_BTC, v_BTC), strict=True):
        window_BWC.index_copy_(1, places, x_BTC)
    counts[2:3].add_(k_BTC.shape[1])


def send(rows: Tensor, place: Tensor) -> None:
    """Copy rows from the host to the same rows on a device, without waiting for it."""
    place.copy_(rows.pin_memory() if place.is_cuda else rows, non_blocking=True)


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a host's tensor on a device, without waiting for it; for the host the tensor itself."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
