"""Tell the loads of a loop apart by where their addresses come from, register by register.

stream   memory that nobody has read before: codes, steps, lows
table    the same in every pass, or in every other one, which a counter's lowest bits choose; or the block table, read
         by address after address, or an engine's, by page after page: in the first-level cache
gather   at places that were read before: codebooks, in the first-level cache
"""

import re
from collections import defaultdict

from benchmarks.sass import Instruction

REGISTER = re.compile(r"\b(U?R)(\d+)(\.64)?")
LOADS = ("LDG", "LDGSTS", "LD")
NO_RESULT = ("STG", "STS", "STSM", "STL", "ST", "BAR", "BRA", "RED", "LDGSTS")
FEW = 16  # addresses that a counter's lowest bits choose among, at most
# What registers come from, beside (i, word), a 32-bit word of the pass's load i: shared memory; pass after pass.
DATA, PASS = (-1, 0), (-2, 0)


def load_kinds(passed: list[Instruction], once: bool = False, pages: bool = False) -> dict[int, str]:
    """The kind of every load from memory, by its place, of a pass through a loop.

    once    it is all of a kernel: no pass before it has read anything
    pages   blocks are pages, which a table of numbers finds

    An address out of the block table is a 64-bit word whose halves go into the halves of another address; the number of
    a page is a 32-bit word that a counter alone finds, and that goes into an address.
    """
    pointers: set[int] = set()
    numbers: set[int] = set()  # what could be of pages
    kinds: dict[int, str] = {}
    comes: defaultdict[str, frozenset] = defaultdict(lambda: frozenset({PASS} if once else ()))
    comes |= {name: frozenset({PASS}) for name in _carried(passed)}
    for _ in range(2):  # the second time, with what the end of a pass hands to the next
        for i, one in enumerate(passed):
            if one.name in LOADS:
                low, high = _address(one, comes)
                both = low | high
                pointers |= {load for load, word in high if word == 1 and (load, 0) in low and (load, 1) not in low}
                if pages:
                    pointers |= {load for load, _ in both if load in numbers}
                    numbers |= {i} if both == {PASS} and one.width == 1 else set()
                read = any(load != PASS[0] and load not in pointers for load, _ in both)
                kinds[i] = "gather" if read else "stream" if both else "table"
            _follow(i, one, comes)
            if not once and _repeats(one):
                comes |= {name: comes[name] - {PASS} for name in _registers(one)[0]}
    return {i: "table" if i in pointers else kind for i, kind in kinds.items()}


def _carried(passed: list[Instruction]) -> set[str]:
    """Registers that a pass reads before it writes them, and writes: what differs from pass to pass."""
    read, written = set(), set()
    for one in passed:
        target, sources = _registers(one)
        read |= {name for name, _ in sources if name not in written}
        written |= set(target)
    return read & written


def _address(one: Instruction, comes: dict[str, frozenset]) -> tuple[frozenset, frozenset]:
    """What the lower and the upper half of a load's address come from."""
    where = next(operand for operand in reversed(one.operands) if "[" in operand).removeprefix("desc[")
    found = REGISTER.findall(where.partition("][")[2] or where)
    low = frozenset().union(*(comes[file + number] for file, number, _ in found))
    high = frozenset().union(*(comes[f"{file}{int(number) + 1}"] for file, number, wide in found if wide))
    return low, high


def _follow(i: int, one: Instruction, comes: dict[str, frozenset]) -> None:
    """Note what the registers come from that an instruction writes; a spilled one keeps its own."""
    if one.name == "STL":
        comes[one.operands[0]] = comes[REGISTER.sub(r"\1\2", one.operands[1])]
        return
    target, sources = _registers(one)
    if one.name in LOADS:
        made = [frozenset({(i, word)}) for word in range(len(target))]
    elif one.name == "LDL":
        made = [comes[one.operands[-1]]] * len(target)
    elif one.name in ("LDS", "LDSM") or one.multiplies_tiles:
        made = [frozenset({DATA})] * len(target)
    else:
        halves = [[comes[name] for name, half in sources if half in (None, word)] for word in (0, 1)]
        made = [frozenset().union(*parts) for parts in halves][: len(target)]
    comes.update(zip(target, made, strict=True))


def _repeats(one: Instruction) -> bool:
    """Whether a result is one of FEW: the lowest bits of something."""
    masks = [int(operand, 16) for operand in one.operands[1:3] if re.fullmatch("0x[0-9a-f]+", operand)]
    return one.name in ("LOP3", "ULOP3") and "0xc0" in one.operands[4:] and any(mask < FEW for mask in masks)


def _registers(one: Instruction) -> tuple[list[str], list[tuple[str, int | None]]]:
    """(registers that are written, (register, the half of a 64-bit result that it goes into; None: both) read)."""
    wide = one.widens or one.pairs
    place_of_result = int(one.name == "SHFL")  # behind a predicate
    first = REGISTER.fullmatch(one.operands[place_of_result]) if one.operands and one.name not in NO_RESULT else None
    target = [f"{first[1]}{int(first[2]) + part}" for part in range(one.results)] if first else []
    sources: list[tuple[str, int | None]] = []
    for place, operand in enumerate(one.operands):
        pair = wide and (one.pairs or place == len(one.operands) - 1)
        for file, number, double in REGISTER.findall(operand) if place != place_of_result or not first else ():
            sources.append((file + number, 0 if pair else None))
            if pair or double:
                sources.append((f"{file}{int(number) + 1}", 1 if pair else None))
    return target, sources
