"""Say what the instructions of a loop ask of a multiprocessor: which unit, how many wavefronts, how often to wait.

A multiprocessor has four schedulers, and each issues one instruction of a warp, 32 lanes, a cycle. Integer and logical
instructions (ALU) and integer products go at half that rate, conversions and exponentials (XU) at an eighth. All
four share the load and store unit (LSU), which passes one wavefront, of up to 128 bytes, a cycle. So a GPU that streams
E elements of the cache per cycle and multiprocessor can afford, per element and lane, 128 / E instructions, 64 / E on
the ALU and 32 / E wavefronts. An H200's memory gives about 63 elements at 2.25 bits: 2.0, 1.0 and 0.5.
Source of rates: NVIDIA, CUDA C++ Programming Guide, throughput of native arithmetic instructions, column 9.0.

Not seen in machine code, and left out: bank conflicts and addresses that are not side by side, except that a gather is
taken to need GATHER wavefronts for each of its 32-bit registers, and that lanes read the same of a table where they
read less than VECTOR registers at once.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

from benchmarks.addresses import load_kinds
from benchmarks.sass import NONE, Instruction

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


@dataclass(frozen=True)
class Need:
    """What one instruction needs.

    unit        of NAMES, or "tensor"; "shared" and "global" are both the LSU's; "": to be issued, no more
    kind        of a load from memory, see addresses.py; else ""
    wavefronts  of the load and store unit
    """

    unit: str
    kind: str
    wavefronts: int


def needs(passed: list[Instruction], once: bool = False, pages: bool = False) -> list[Need]:
    """What each instruction of a pass through a loop, or of a whole kernel that runs once, needs."""
    kinds = load_kinds(passed, once, pages)
    return [Need(unit(one), kinds.get(i, ""), wavefronts(one, kinds.get(i, ""))) for i, one in enumerate(passed)]


def unit(one: Instruction) -> str:
    """The unit that executes an instruction."""
    if one.multiplies_tiles:
        return "tensor"
    return UNITS.get(one.name) or ("uniform" if one.name.startswith("U") else "")


def wavefronts(one: Instruction, kind: str) -> int:
    """How many wavefronts the load and store unit passes for an instruction on a load of this kind, or on none."""
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
    """How often a warp waits for memory in a pass: for a load that was issued since it last did so.

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
    """What a pass takes, per element and lane; then, of a block, how often a warp waits, and for how long at least.

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
