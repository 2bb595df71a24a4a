"""Read a kernel's machine code: a pass through its main loop, and what its instructions ask of a multiprocessor.

An instruction has 128 bits. In 21 of them, 105 to 125, the compiler says when the next may be issued: after `stall`
cycles; and, of instructions whose time is not known beforehand, which of six scoreboards they release once their result
is there (`sets`) or their operands have been read (`frees`), and which scoreboards this one waits for (`waits`).
Source: Jia, Maggioni, Staiger, Scarpazza, Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking (2018);
code for sm_80, sm_90 and sm_100 has the same fields.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ADDRESS, PREDICATE = r"/\*([0-9a-f]{4,})\*/\s+", r"(?:@!?U?P\w+\s+)?"
TEXT, WORD = r"([A-Z][A-Z0-9_]*)((?:\.\w+)*)\s*([^;]*);\s*", r"/\*\s*0x([0-9a-f]{16})\s*\*/\s*"
LINE = re.compile(rf"{ADDRESS}{PREDICATE}{TEXT}{WORD}{WORD}|^(\.L\w+):", re.MULTILINE)
TARGET = re.compile(r"`\((\.L\w+)\)")
SCOREBOARDS = 6
NONE = 7  # where no scoreboard is named


@dataclass(frozen=True)
class Instruction:
    """One instruction of a warp.

    name, modifiers, operands   "LDG", ".E.128", ("R36", "desc[UR10][R36.64]")
    target                      the address that a branch goes to
    stall                       cycles until the warp's next, 0 to 15
    sets, frees                 scoreboards, 0 to 5; or NONE
    waits                       a mask of scoreboards
    """

    address: int
    name: str
    modifiers: str
    operands: tuple[str, ...]
    target: int | None
    stall: int
    sets: int
    frees: int
    waits: int

    @property
    def width(self) -> int:
        """The 32-bit registers of a lane that a load, a store or a vector instruction moves."""
        return next((count for count in (4, 2) if f".{32 * count}" in self.modifiers), 1)

    @property
    def multiplies_tiles(self) -> bool:
        return self.name.endswith("MMA")

    @property
    def products(self) -> int:
        """What a warp multiplies, in m16n8k16 products; a warp of a group has 16 of its 64 rows: ".64x32x16"."""
        columns = re.match(r"\.64x(\d+)x16", self.modifiers)
        return int(columns[1]) // 8 if columns else int(self.multiplies_tiles)

    @property
    def widens(self) -> bool:
        """Whether only the result, and what is added to it, has 64 bits."""
        return ".WIDE" in self.modifiers

    @property
    def pairs(self) -> bool:
        """Whether all operands have 64 bits."""
        return ".64" in self.modifiers and self.name in ("IADD", "MOV", "LEA", "UIADD", "UMOV", "ULEA")

    @property
    def results(self) -> int:
        """The 32-bit registers of a lane that are written, if any are."""
        if self.multiplies_tiles:
            return 4
        return self.tiles if self.name == "LDSM" else 2 if self.widens or self.name == "CS2R" else self.width

    @property
    def tiles(self) -> int:
        """8 x 8 tiles of a load or store of tiles, one register of a lane each."""
        return next((count for count in (4, 2) if self.modifiers.endswith(f".{count}")), 1)


def disassembled(disassembler: Path, cubin: Path) -> str:
    """The machine code as nvdisasm prints it, with its words."""
    command = [str(disassembler), "--print-code", "--no-dataflow", "-hex", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(text: str) -> list[Instruction]:
    """All instructions of disassembled code, in the order of their addresses."""
    found, labels, here = [], {}, []
    for at, name, modifiers, operands, _, word, label in LINE.findall(text):
        if label:
            here.append(label)
            continue
        labels |= dict.fromkeys(here, int(at, 16))
        here.clear()
        found.append((int(at, 16), name, modifiers, operands.strip(), int(word, 16)))
    return [Instruction(at, name, modifiers, _parts(operands), _target(operands, labels), *control(word))
            for at, name, modifiers, operands, word in found]  # fmt: skip


def control(word: int) -> tuple[int, int, int, int]:
    """(stall, sets, frees, waits) of an instruction's upper 64 bits."""
    bits = word >> 41
    return bits & 15, bits >> 5 & 7, bits >> 8 & 7, bits >> 11 & 63


def _parts(operands: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in operands.split(",")) if operands else ()


def _target(operands: str, labels: dict[str, int]) -> int | None:
    label = TARGET.search(operands)
    return labels.get(label[1]) if label else None


def loops(found: list[Instruction]) -> list[tuple[int, int]]:
    """(first address, last) of each loop."""
    return [(one.target, one.address) for one in found
            if one.name == "BRA" and one.target is not None and one.target < one.address]  # fmt: skip


def main_loop(found: list[Instruction], turns: int) -> list[Instruction]:
    """A pass through the largest loop with float16 products; where one is inside another, that turns so often.

    Products in bfloat16 are of what is held exactly. ValueError: there is no such loop.
    """
    every = loops(found)
    bodies = {loop: _body(found, *loop) for loop in every}
    products = [loop for loop in every if _products(bodies[loop])]
    if not products:
        raise ValueError(
            "no loop of this kernel has float16 products; its main loop is not what sass.main_loop looks for"
        )
    inner = max(products, key=lambda loop: _weight(loop, bodies))
    outer = [loop for loop in every if loop[0] <= inner[0] and loop[1] > inner[1]]
    if not outer or turns == 1:
        return bodies[inner]
    start, stop = min(outer, key=lambda loop: loop[1] - loop[0])
    before, after = _body(found, start, inner[0] - 1), _body(found, inner[1] + 1, stop)
    return before + turns * bodies[inner] + after


def whole(found: list[Instruction], turns: int) -> list[Instruction]:
    """All of a kernel, up to its last exit: every loop turns so often."""
    last = max(i for i, one in enumerate(found) if one.name == "EXIT")
    outermost = [loop for loop in loops(found)
                 if not any(other[0] <= loop[0] and loop[1] < other[1] for other in loops(found))]  # fmt: skip
    passed, at = [], 0
    for start, stop in sorted(outermost):
        passed += _body(found, at, start - 1) + turns * _body(found, start, stop)
        at = stop + 1
    return passed + _body(found, at, found[last].address)


def _body(found: list[Instruction], start: int, stop: int) -> list[Instruction]:
    return [one for one in found if start <= one.address <= stop]


def _products(body: list[Instruction]) -> int:
    return sum(one.multiplies_tiles and ".BF16" not in one.modifiers for one in body)


def _weight(loop, bodies) -> tuple[bool, int]:
    """Innermost loops first, then by size."""
    nested = any(loop[0] <= other[0] and other[1] < loop[1] and _products(bodies[other]) for other in bodies)
    return not nested, len(bodies[loop])
