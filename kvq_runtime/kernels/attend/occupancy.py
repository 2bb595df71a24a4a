"""Cut a layer's blocks into as many splits as fill the device: by how many programs a multiprocessor runs at once."""

from typing import Any


def splits(lines: int, blocks: int, multiprocessors: int, resident: int) -> int:
    """Into how many parts to cut the blocks at most: what the device runs at once, or fewer where blocks are fewer.

    Splits are equally long (kernel.py), so that a second round would begin when the first one ends: it would read
    lengths and queries again, and leave more partial results to merge. It is rounded down: a few programs more would
    take a round of their own. Nothing here depends on how many tokens there are, so that a recorded step stays right as
    they become more.

    lines      batch rows times KV heads
    blocks     that there is room for
    resident   programs that a multiprocessor runs at once, see `resident`
    """
    return max(1, min(blocks, multiprocessors * resident // max(1, lines)))


def resident(registers: int, shared: int, warps: int, limits: Any) -> int:
    """Return how many programs of a compiled kernel a multiprocessor runs at once.

    registers   of a thread, allocated to warps in eights
    shared      bytes of a program, to which the system adds a KiB
    limits      of the device, as torch.cuda.get_device_properties has them
    """
    by_registers = limits.regs_per_multiprocessor // (-(-registers // 8) * 8 * 32 * warps)
    by_shared = limits.shared_memory_per_multiprocessor // (shared + 1024)
    by_threads = limits.max_threads_per_multi_processor // (32 * warps)
    return max(1, min(by_registers, by_shared, by_threads, 32))
