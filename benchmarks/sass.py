"""Read a kernel's machine code: a pass through its main loop, and what its instructions ask of a multiprocessor.

An instruction has 128 bits. In 21 of them, 105 to 125, the compiler says when the next may be issued: after `stall`
cycles; and, of instructions whose time is not known beforehand, which of six scoreboards they release once their result
is there (`sets`) or their operands have been read (`frees`), and which scoreboards this one waits for (`waits`).
Source: Jia, Maggioni, Staiger, Scarpazza, Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking (2018);
code for sm_80, sm_90 and sm_100 has the same fields.

A multiprocessor has four schedulers, and each issues one instruction of a warp, 32 lanes, a cycle. Integer and logical
instructions (ALU) and integer products go at half that rate, conversions and exponentials (XU) at an eighth. All
four share the load and store unit (LSU), which passes one wavefront, of up to 128 bytes, a cycle. So a GPU that streams
E elements of the cache per cycle and multiprocessor can afford, per element and lane, 128 / E instructions, 64 / E on
the ALU and 32 / E wavefronts. An H200's memory gives about 63 elements at 2.25 bits: 2.0, 1.0 and 0.5.
Source of rates: NVIDIA, CUDA C++ Programming Guide, throughput of native arithmetic instructions, column 9.0.

Not seen in machine code, and left out: bank conflicts and addresses that are not side by side, except that a gather is
taken to need GATHER wavefronts for each of its 32-bit registers, and that lanes read the same of a table where they
read less than VECTOR registers at once. Loads are told apart by where their addresses come from, register by register:

stream   memory that nobody has read before: codes, steps, lows
table    the same in every pass, or in every other one, which a counter's lowest bits choose; or the block table, read
         by address after address, or an engine's, by page after page: in the first-level cache
gather   at places that were read before: codebooks, in the first-level cache
"""

import re
import subprocess
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

ADDRESS, PREDICATE = r"/\*([0-9a-f]{4,})\*/\s+", r"(?:@!?U?P\w+\s+)?"
TEXT, WORD = r"([A-Z][A-Z0-9_]*)((?:\.\w+)*)\s*([^;]*);\s*", r"/\*\s*0x([0-9a-f]{16})\s*\*/\s*"
LINE = re.compile(rf"{ADDRESS}{PREDICATE}{TEXT}{WORD}{WORD}|^(\.L\w+):", re.MULTILINE)
TARGET = re.compile(r"`\((\.L\w+)\)")
SCOREBOARDS = 6
NONE = 7  # where no scoreboard is named
NAMES = {
    "alu": """LOP3 LOP PRMT SHF IADD3 IADD VIADD VIADDMNMX VIMNMX IMNMX LEA ISETP FSETP HSETP2 SEL FSEL FMNMX HMNMX2
        PLOP3 SGXT BMSK I2FP F2FP I2IP IABS ICMP FCHK VOTE R2P P2R""",
    "fma": "FFMA FMUL FADD HFMA2 HMUL2 HADD2 FFMA2 FMUL2 FADD2",
    "imad": "IMAD IMUL",
    "xu": "MUFU I2F F2I F2F FRND POPC FLO BREV",
    "shared": "LDS STS LDSM STSM SHFL ATOMS MOVM",
    "global": "LDG STG LD ST LDL STL LDGSTS ATOM ATOMG RED",
    "constant": "LDC ULDC LDCU S2R S2UR CS2R",
    "uniform": "R2UR",
}
UNITS = {name: unit for unit, names in NAMES.items() for name in names.split()}
LSU = ("shared", "global")
MULTIPLICATIONS = {"FMUL", "FFMA", "HMUL2", "HFMA2", "FMUL2", "FFMA2", "IMUL"}
VECTOR = 4
GATHER = 5  # of 32 lanes that read 32 bits each anywhere the fullest of 32 banks has 3 or 4, and tags take time too
REGISTER = re.compile(r"\b(U?R)(\d+)(\.64)?")
LOADS = ("LDG", "LDGSTS", "LD")
NO_RESULT = ("STG", "STS", "STSM", "STL", "ST", "BAR", "BRA", "RED", "LDGSTS")
FEW = 16  # addresses that a counter's lowest bits choose among, at most
# What registers come from, beside (i, word), a 32-bit word of the pass's load i: shared memory; pass after pass.
DATA, PASS = (-1, 0), (-2, 0)


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
        """The products of a warp, in m16n8k16; a warp of a group has 16 of its 64 rows: ".64x32x16"."""
        columns = re.match(r"\.64x(\d+)x16", self.modifiers)
        return int(columns[1]) // 8 if columns else int(self.multiplies_tiles)

    @property
    def widens(self) -> bool:
        """True if only the result, and what is added to it, has 64 bits."""
        return ".WIDE" in self.modifiers

    @property
    def pairs(self) -> bool:
        """True if all operands have 64 bits."""
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


@dataclass(frozen=True)
class Need:
    """The units that one instruction needs.

    unit        of NAMES, or "tensor"; "shared" and "global" are both the LSU's; "": to be issued, no more
    kind        of a load from memory: stream, table or gather; else ""
    wavefronts  of the load and store unit
    """

    unit: str
    kind: str
    wavefronts: int


def needs(passed: list[Instruction], once: bool = False, pages: bool = False) -> list[Need]:
    """The needs of each instruction of a pass through a loop, or of a whole kernel that runs once."""
    kinds = load_kinds(passed, once, pages)
    return [Need(unit(one), kinds.get(i, ""), wavefronts(one, kinds.get(i, ""))) for i, one in enumerate(passed)]


def unit(one: Instruction) -> str:
    """The unit that executes an instruction."""
    if one.multiplies_tiles:
        return "tensor"
    return UNITS.get(one.name) or ("uniform" if one.name.startswith("U") else "")


def wavefronts(one: Instruction, kind: str) -> int:
    """The wavefronts that the load and store unit passes for an instruction on a load of this kind, or on none."""
    if unit(one) not in LSU:
        return 0
    if one.name in ("LDSM", "STSM"):
        return one.tiles
    if kind == "table" and one.width < VECTOR:
        return 1
    return one.width * (GATHER if kind == "gather" else 1)


def awaited(one: Instruction) -> list[tuple[int, int]]:
    """(scoreboard, how many of its newest groups may be outstanding) of all that an instruction waits for."""
    boards = [(board, 0) for board in range(6) if one.waits >> board & 1]
    if one.name == "DEPBAR" and one.operands[0].startswith("SB"):
        boards.append((int(one.operands[0][2]), int(one.operands[1], 16)))
    return boards


def exposed(passed: list[Instruction], needed: list[Need]) -> int:
    """Count a warp's waits for memory in a pass: for a load that was issued since it last did so.

    Loads in flight together count once; those from the first-level cache do not.
    """
    waited = before = 0
    issued: defaultdict[int, list[int]] = defaultdict(list)  # by scoreboard: how often was waited when it was issued
    copied = -1  # of the copies to shared memory that no group has yet
    for _ in range(2):  # the second time, behind another pass
        before = waited
        for one, need in zip(passed, needed, strict=True):
            due = []
            for board, newest in awaited(one):
                kept = issued[board][len(issued[board]) - newest :] if newest else []
                due += issued[board][: len(issued[board]) - len(kept)]
                issued[board] = kept
            waited += waited in due
            if one.name == "LDGSTS":
                copied = waited
            elif one.name == "LDGDEPBAR":
                issued[0].append(copied)
                copied = -1
            elif need.kind == "stream" and one.sets != NONE:
                issued[one.sets].append(waited)
    return waited - before


def counted(passed: list[Instruction], lanes: float, passes: int, pages: bool = False) -> dict[str, float]:
    """The cost of a pass, per element and lane; then, of a block, the waits of a warp, and their length at least.

    lanes    of the program, over the elements of keys and values that a pass reads
    passes   of a block
    pages    as in `load_kinds`
    """
    needed = needs(passed, pages=pages)
    units, wave = Counter(need.unit for need in needed), Counter()
    for need in needed:
        wave["gather" if need.kind == "gather" else need.unit] += need.wavefronts
    each = {
        "instructions": len(passed),
        "multiplications": sum(one.name in MULTIPLICATIONS for one in passed),
        "alu": units["alu"],
        "fma": units["fma"] + units["imad"],
        "tensor": sum(one.products for one in passed),
        **{f"{what}_wavefronts": wave[what] for what in ("shared", "global", "gather")},
    }
    per_element = {f"{name}_per_element": round(count * lanes, 3) for name, count in each.items()}
    return per_element | {
        "exposed_loads": passes * exposed(passed, needed),
        "barriers": passes * sum(one.name == "BAR" for one in passed),
        "stall_cycles": passes * sum(max(1, one.stall) for one in passed),
    }


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
    """The origins of the lower and the upper half of a load's address."""
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
    """True if a result is one of FEW: the lowest bits of something."""
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
