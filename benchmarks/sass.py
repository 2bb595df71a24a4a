"""Count the instructions of a kernel's main loop in its machine code, per element of what it reads.

An instruction of a warp counts 32, one per lane; a multiprocessor issues 128 lanes' a cycle. So a GPU that streams E
elements of the cache per cycle and multiprocessor can afford 128 / E of them: an H100 about 4 at 4 bits, 2 at 2 bits.
"""

import re
import subprocess
from collections import Counter
from pathlib import Path

PREDICATE, NAME, TARGET = r"(?:@!?U?P\w+\s+)?", r"([A-Z][A-Z0-9_]*)((?:\.[A-Z0-9_]+)*)", r"(?:`\((\.L\w+)\)\s*)?"
LINE = re.compile(rf"/\*([0-9a-f]{{4,}})\*/\s+{PREDICATE}{NAME}[^;]*?{TARGET};|^(\.L\w+):", re.MULTILINE)
MULTIPLICATIONS = {"FMUL", "FFMA", "HMUL2", "HFMA2", "FMUL2", "FFMA2", "IMUL"}


def instructions(disassembler: Path, cubin: Path) -> list[tuple[int, str, int | None]]:
    """(address, name, address it may jump to) of every instruction; a product in bfloat16 says so in its name."""
    command = [str(disassembler), "--print-code", "--no-dataflow", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found, labels, here = [], {}, []
    for at, name, more, to, label in LINE.findall(text):
        if label:
            here.append(label)
            continue
        labels |= dict.fromkeys(here, int(at, 16))
        here.clear()
        found.append((int(at, 16), name + (".BF16" if ".BF16" in more else ""), to))
    return [(at, name, labels.get(to)) for at, name, to in found]


def main_loop(found: list[tuple[int, str, int | None]], turns: int) -> Counter[str]:
    """Instructions by name of a pass through the largest loop with float16 products; one inside another turns so often.

    Those in bfloat16 are of what is held exactly.
    """
    loops = [(to, at) for at, name, to in found if name == "BRA" and to is not None and to < at]
    bodies = {loop: _body(found, *loop) for loop in loops}
    inner = max((loop for loop in loops if _products(bodies[loop])), key=lambda loop: _weight(loop, loops, bodies))
    outer = [loop for loop in loops if loop[0] <= inner[0] and loop[1] > inner[1]]
    counted = Counter(bodies[inner])
    if outer and turns > 1:
        counted = bodies[min(outer, key=lambda loop: loop[1] - loop[0])].copy()
        for name, count in bodies[inner].items():
            counted[name] += (turns - 1) * count
    return counted


def _body(found, start: int, stop: int) -> Counter[str]:
    return Counter(name for at, name, _ in found if start <= at <= stop)


def _products(body: Counter[str]) -> int:
    return sum(count for name, count in body.items() if name.endswith("MMA"))


def _weight(loop, loops, bodies) -> tuple[bool, int]:
    """Innermost loops first, then by size."""
    nested = any(loop[0] <= other[0] and other[1] < loop[1] and _products(bodies[other]) for other in loops)
    return not nested, bodies[loop].total()
