"""Machine code in the form of nvdisasm, with the control words that a test asks for."""

from benchmarks import sass
from benchmarks.sass import NONE
from benchmarks.simulate import Step


def written(*lines: str) -> list[sass.Instruction]:
    """Instructions from `text | stall sets frees waits`; what is left out is 1 and no scoreboard."""
    found = []
    for i, line in enumerate(lines):
        text, _, control = line.partition("|")
        given = [int(part, 0) for part in control.split()]
        stall, sets, frees, waits = given + [1, NONE, NONE, 0][len(given) :]
        word = (stall | sets << 5 | frees << 8 | waits << 11) << 41
        found.append(f"/*{16 * i:04x}*/ {text.strip()} ; /* 0x{0:016x} */ /* 0x{word:016x} */")
    return sass.instructions("\n".join(found))


def step(
    unit="", busy=0, wavefronts=0, size=0.0, answers=24, stall=1, sets=NONE, frees=NONE, waits=(), **marks
) -> Step:
    """One simulated instruction: what is left out is of no unit, a cycle long and waits for nothing."""
    marks = {"copies": False, "groups": False, "barrier": False} | marks
    return Step(unit, busy, wavefronts, size, answers, stall, sets, frees, waits, **marks)
