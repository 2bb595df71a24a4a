"""Turn machine code into the cycles of a grid on an H200: attention by its main loop, any other kernel as a whole.

Attention's programs run in waves of as many as fit. A program takes START, and its blocks at the speed that simulate.py
finds for as many programs on a multiprocessor. The window's programs fill what the last wave leaves free. Any other
kernel is simulated from its first instruction to its last exit, each loop turning as often as CHUNK, a compile-time
argument, says; both sides of branches are run; it finds what attention wrote in the second-level cache (L2_LATENCY).
"""

from dataclasses import dataclass
from functools import cache
from math import ceil, prod

from benchmarks import sass
from benchmarks.compiled import compiled, programs
from benchmarks.recorded import Recorded
from benchmarks.simulate import MULTIPROCESSORS, Run, Step, simulate, steps

ARCH = 90
START = 1500  # cycles of a program beside its blocks: it reads lengths, starts and queries in turn, and stores
WINDOW = 2000  # cycles that a share of the window takes, beside
L2_LATENCY = 300
POINTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # programs on a multiprocessor that are simulated; between them, a line


@dataclass(frozen=True, eq=False)
class Loop:
    """A kernel's main loop.

    steps    of a warp in a pass
    passes   through it, of a block
    warps    of a program
    room     programs that a multiprocessor holds
    """

    steps: list[Step]
    passes: int
    warps: int
    room: int

    def each(self, count: int) -> float:
        """Cycles of a block with so many programs on a multiprocessor, 1 to `room`."""
        known = sorted({min(point, self.room) for point in POINTS})
        below, above = max(n for n in known if n <= count), min(n for n in known if n >= count)
        low, high = (_simulated(self, n).each for n in (below, above))
        return self.passes * (low + (high - low) * (count - below) / max(1, above - below))

    def taken(self) -> dict[str, float]:
        """Cycles of a multiprocessor that a program's block takes of everything it may be bound by."""
        run = _simulated(self, 1)
        return {name: share * run.each * self.passes for name, share in run.busy.items()}


def used_splits(blocks: int, splits: int) -> int:
    """Programs that a line's blocks take of at most `splits`, as kernel.py shares them out."""
    return ceil(blocks / ceil(blocks / splits)) if blocks else 0


@cache
def _simulated(loop: Loop, count: int) -> Run:
    return simulate(loop.steps, count, loop.warps)


@cache
def loop_of(one: Recorded, passes: int, turns: int, size: float) -> Loop:
    """The main loop of a launch.

    passes   of a block
    turns    of an inner loop
    size     bytes of a block
    """
    made = compiled(one, ARCH)
    passed = steps(sass.main_loop(made.instructions(), turns), size / passes / one.warps)
    return Loop(passed, passes, one.warps, programs(made.registers, made.shared, one.warps, ARCH))


def attend_cycles(loop: Loop, lines: int, blocks: int, splits: int, window: int) -> float:
    """Cycles of attention's grid.

    lines    batch rows times KV heads
    blocks   of a line, shared out over at most `splits` programs as kernel.py does; `window` more attend to what is
             exact
    """
    each = ceil(blocks / splits)
    used = used_splits(blocks, splits)
    left, places, cycles, free = used * lines, loop.room * MULTIPROCESSORS, 0.0, 0
    while left > 0:
        now = min(left, places)
        longest = each if left > lines else blocks - (used - 1) * each  # a line's last program is the shorter one
        cycles += START + longest * loop.each(ceil(now / MULTIPROCESSORS))
        left, free = left - now, places - now
    last = START + WINDOW if window else 0
    return max(cycles, last) if window * lines <= free else cycles + last


def whole_cycles(one: Recorded, parts: int) -> float:
    """Cycles of another kernel's grid; its loops go through `parts` partial results.

    ValueError: it has loops, and no CHUNK that says how many they take at a time.
    """
    code, room = _code(one)
    chunk = one.named("CHUNK")
    if sass.loops(code) and chunk is None:
        raise ValueError(f"{one.function.__name__} has loops and no CHUNK, so how often they turn is unknown")
    each = ceil(prod(one.grid) / MULTIPROCESSORS)
    return ceil(each / room) * _ran(one, ceil(parts / chunk) if chunk else 1, min(each, room))


@cache
def _code(one: Recorded) -> tuple[list[sass.Instruction], int]:
    """(instructions, programs that a multiprocessor holds)."""
    made = compiled(one, ARCH)
    return made.instructions(), programs(made.registers, made.shared, one.warps, ARCH)


@cache
def _ran(one: Recorded, turns: int, count: int) -> float:
    code = steps(sass.whole(_code(one)[0], turns), latency=L2_LATENCY, once=True)
    return simulate(code, count, one.warps, passes=1).cycles
