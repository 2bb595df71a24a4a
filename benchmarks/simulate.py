"""Simulate one multiprocessor that runs several programs of the same kernel, instruction by instruction. A model.

Each of four schedulers issues, in a warp's own order, one instruction a cycle of one of its warps: that whose turn it
was, else the first that may. A warp may when its last instruction's stall is over, the scoreboards it waits for are
released, its program is past the barrier, and the unit is free. What is assumed, in cycles of 1.755 GHz:

    unit   ALU and integer products 2 cycles an instruction, FMA 1, XU 8, m16n8k16 product 8 (as on an A100), LSU 2;
           results that scoreboards announce after 24
    LSU    one wavefront a cycle for all four schedulers, 40 of them queued; shared memory answers after 26 more, the
           first-level cache after 38
    memory a stream's load after LATENCY, at RATE bytes a cycle and multiprocessor; all that a kernel must read, once
    barrier 20 after the last warp (12 where a program has one)

Left out: misses of the instruction cache, bank conflicts, what programs find in the second-level cache that others have
read, waits for the products of warp groups (16 rows of queries and more), and a clock that falls under load. Nothing
was measured with it; compared with an H200 it may be 35% off.
Latencies are of the order that Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU Architecture (2024), found
on an idle H100; that of memory is longer, as it is under load.
"""

from collections import defaultdict
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil
from typing import NamedTuple

from benchmarks.sass import LSU, NONE, SCOREBOARDS, Instruction, Need, awaited, needs

CLOCK = 1.755e9  # of an H200 under load, Hz
MULTIPROCESSORS = 132
BANDWIDTH = 0.85 * 4.8e12  # bytes a second that a good kernel gets of an H200's memory
RATE = BANDWIDTH / CLOCK / MULTIPROCESSORS
LATENCY = 600  # of memory
SCHEDULERS = 4
BUSY = {"alu": 2, "fma": 1, "imad": 2, "xu": 8, "tensor": 8, "lsu": 2, "constant": 2, "uniform": 2}
ANSWER, ANSWERS = 24, {"shared": 26, "global": 38, "constant": 40}
QUEUE = 40
NEVER = 1 << 62


class Step(NamedTuple):
    """An instruction, as the simulation wants it."""

    unit: str
    busy: int
    wavefronts: int
    bytes: float  # from memory
    answers: int  # cycles after its turn in the queues
    stall: int
    sets: int
    frees: int
    waits: tuple[tuple[int, int], ...]
    copies: bool  # to shared memory, in groups
    groups: bool
    barrier: bool


@dataclass(frozen=True)
class Run:
    """The work of a multiprocessor.

    cycles   until the last instruction was issued
    each     cycles that every warp takes to make a pass
    busy     share of `each` in which all of "issue", "alu", "tensor", "lsu" and "memory" is taken
    """

    cycles: float
    each: float
    busy: dict[str, float]


def steps(
    passed: list[Instruction], size: float | None = None, latency: int = LATENCY, once: bool = False
) -> list[Step]:
    """A pass through a loop, or a whole kernel that runs once, ready to be simulated.

    size      bytes that a warp must read from memory in a pass, in all; None: 32 lanes' of each load
    latency   of memory
    """
    needed = needs(passed, once)
    streams = sum(_bytes(one) for one, need in zip(passed, needed, strict=True) if need.kind == "stream")
    scale = 1.0 if size is None or not streams else size / streams
    return [_step(one, need, scale, latency) for one, need in zip(passed, needed, strict=True)]


def _bytes(one: Instruction) -> int:
    """The bytes that 32 lanes load."""
    small = {".U8": 1, ".S8": 1, ".U16": 2, ".S16": 2}
    return 32 * next((count for name, count in small.items() if name in one.modifiers), 4 * one.width)


def _step(one: Instruction, need: Need, scale: float, latency: int) -> Step:
    stream, unit = need.kind == "stream", "lsu" if need.unit in LSU else need.unit
    answers = latency if stream else ANSWERS.get(need.unit, ANSWER)
    busy = BUSY.get(unit, 0) * max(1, one.products)
    return Step(
        unit, busy, need.wavefronts, scale * _bytes(one) if stream else 0.0, answers, max(1, one.stall),
        one.sets, one.frees, tuple(awaited(one)),
        one.name == "LDGSTS", one.name == "LDGDEPBAR", one.name == "BAR",
    )  # fmt: skip


def simulate(steps: list[Step], programs: int, warps: int = 1, passes: int = 3, rate: float = RATE) -> Run:
    """Let `programs` of a multiprocessor, of so many warps each, make so many passes each; with one pass, end there.

    rate   bytes a cycle from memory

    With more than one pass, a warp that is done goes on, so that there is no end to run out; `each` is by the
    instructions that were issued behind the first pass's.
    """
    machine, all_ = _Multiprocessor(steps, programs, warps, passes == 1, rate), programs * warps * len(steps)
    first, last = machine.run(all_), machine.run((passes - 1) * all_)
    each = (last - first) / (passes - 1) if passes > 1 else float(first)
    return Run(max(first, last), each, _busy(steps, programs * warps, each, rate))


def _busy(steps: list[Step], warps: int, each: float, rate: float) -> dict[str, float]:
    scheduled = warps / SCHEDULERS / each
    taken = {name: sum(step.busy for step in steps if step.unit == name) * scheduled for name in ("alu", "tensor")}
    waves, size = (sum(getattr(step, what) for step in steps) for what in ("wavefronts", "bytes"))
    return taken | {"issue": len(steps) * scheduled, "lsu": waves * warps / each, "memory": size * warps / rate / each}


class _Multiprocessor:
    """Its warps: where each is, when it may go on, and when its scoreboards are released."""

    def __init__(self, steps: list[Step], programs: int, warps: int, once: bool, rate: float):
        self.steps, self.warps, self.once, self.rate = steps, warps, once, rate
        count = programs * warps
        apart = sum(step.stall for step in steps) / programs if not once else 0  # programs do not begin together
        self.ready = [int(i // warps * apart) for i in range(count)]
        self.at = [0] * count
        self.boards: list[list[list[float]]] = [[[] for _ in range(SCOREBOARDS)] for _ in range(count)]
        self.copied = [0.0] * count  # when the copies that no group has yet will be there
        self.free = [dict.fromkeys(BUSY, 0) for _ in range(SCHEDULERS)]
        self.mine = [list(range(i, count, SCHEDULERS)) for i in range(SCHEDULERS)]
        self.last = list(range(SCHEDULERS))
        self.turns = [(0, i) for i in range(SCHEDULERS) if self.mine[i]]  # when a scheduler may have one to issue
        self.arrived: defaultdict[int, int] = defaultdict(int)
        self.held = [0] * count  # when a warp could go on, were it not for a barrier
        self.queue = self.memory = 0.0  # when load and store unit, and memory, will have done what they have
        self.next = [0] * SCHEDULERS

    def run(self, issues: int) -> int:
        """Issue so many instructions more; the cycle of the last."""
        now = 0
        while issues:
            now, scheduler = heappop(self.turns)
            if now < self.next[scheduler]:
                continue
            soonest, chosen = NEVER, -1
            for warp in (self.last[scheduler], *self.mine[scheduler]):
                may = self._may(warp, scheduler)
                if may <= now:
                    chosen = warp
                    break
                soonest = min(soonest, may)
            if chosen >= 0:
                issues -= 1
                soonest = now + 1
                for other in self._issue(chosen, scheduler, now):
                    self.next[other] = 0
                    heappush(self.turns, (now + 1, other))
            if soonest < NEVER:
                self.next[scheduler] = soonest
                heappush(self.turns, (soonest, scheduler))
        return now

    def _may(self, warp: int, scheduler: int) -> int:
        """The first cycle in which a warp's next instruction may be issued, as far as is known."""
        ready = self.ready[warp]
        if ready < NEVER:
            unit = self.steps[self.at[warp]].unit
            if unit:
                ready = max(ready, self.free[scheduler][unit])
                if unit == "lsu":
                    ready = max(ready, ceil(self.queue) - QUEUE)
        return ready

    def _issue(self, warp: int, scheduler: int, now: int) -> set[int]:
        """Issue a warp's next instruction; the schedulers whose warps a barrier lets go."""
        self.last[scheduler] = warp
        step = self.steps[self.at[warp]]
        if step.unit:
            self.free[scheduler][step.unit] = now + step.busy
        done = now + step.answers
        if step.wavefronts:
            self.queue = max(self.queue, now) + step.wavefronts
            done = self.queue + step.answers
        if step.bytes:
            self.memory = max(self.memory, now) + step.bytes / self.rate
            done = max(done, self.memory + step.answers)
        boards = self.boards[warp]
        if step.copies:
            self.copied[warp] = max(self.copied[warp], done)
        elif step.groups:
            boards[0].append(self.copied[warp])
        elif step.sets != NONE:
            boards[step.sets].append(done)
        if step.frees != NONE:
            boards[step.frees].append(min(done, now + 20))
        return self._advance(warp, step, now)

    def _advance(self, warp: int, step: Step, now: int) -> set[int]:
        """Go on to a warp's next instruction, and note when it may be issued."""
        self.at[warp] += 1
        ended = self.at[warp] == len(self.steps)
        if ended:
            self.at[warp] = 0
        ready = now + step.stall
        for board, newest in self.steps[self.at[warp]].waits:
            held = self.boards[warp][board]
            due, self.boards[warp][board] = held[: len(held) - newest], held[len(held) - newest :]
            ready = max(ready, *map(ceil, due)) if due else ready
        self.ready[warp] = NEVER if ended and self.once else ready
        return self._arrive(warp, now) if step.barrier else set()

    def _arrive(self, warp: int, now: int) -> set[int]:
        """Wait at a barrier for the program's other warps; the last of them lets all go."""
        program = warp // self.warps
        self.held[warp], self.ready[warp] = self.ready[warp], NEVER
        self.arrived[program] += 1
        if self.arrived[program] < self.warps:
            return set()
        self.arrived[program] = 0
        ours = range(program * self.warps, (program + 1) * self.warps)
        for other in ours:
            self.ready[other] = max(self.held[other], now + (20 if self.warps > 1 else 12))
        return {other % SCHEDULERS for other in ours}
