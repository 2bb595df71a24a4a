"""Cut a layer's blocks into as many splits as fill the device: by how many programs a multiprocessor runs at once."""

from typing import Any

WAVES = 2  # rounds of programs


def splits(lines: int, blocks: int, multiprocessors: int, resident: int) -> int:
    """How many parts to cut the blocks into: WAVES rounds of programs, or fewer where there are fewer blocks.

    All splits of a step are equally long, to within a block. One round, full, would be as fast if all programs took the
    same time; of two, early ones make room for later ones. More rounds mean more partial results to write and merge. It
    is rounded down: a few programs more than fill the rounds would take one more, almost empty. Nothing here depends on
    how many tokens there are, so that a recorded step stays right as they become more.

    lines      batch rows times KV heads
    blocks     that there is room for
    resident   programs that a multiprocessor runs at once, see `resident`
    """
    return max(1, min(blocks, WAVES * multiprocessors * resident // max(1, lines)))


def resident(registers: int, shared: int, warps: int, limits: Any) -> int:
    """How many programs of a compiled kernel a multiprocessor runs at once.

    registers   of a thread, which are given out to warps in eights
    shared      bytes of a program, to which the system adds a KiB
    limits      of the device, as torch.cuda.get_device_properties has them
    """
    by_registers = limits.regs_per_multiprocessor // (-(-registers // 8) * 8 * 32 * warps)
    by_shared = limits.shared_memory_per_multiprocessor // (shared + 1024)
    by_threads = limits.max_threads_per_multi_processor // (32 * warps)
    return max(1, min(by_registers, by_shared, by_threads, 32))
