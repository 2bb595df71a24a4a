"""Compile a recorded launch for an architecture, without a GPU, and say what the multiprocessor must hold of it."""

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks import sass
from benchmarks.recorded import Recorded

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
REGISTERS = 65536  # of a multiprocessor, a quarter for each scheduler
UNIT = 256  # registers that a warp is given at a time
SHARED = {80: 166912, 90: 232448, 100: 232448}  # bytes that a program can have; a multiprocessor has 1 KB more
RESERVED = 1024  # bytes of them, of each program
WARPS, PROGRAMS = 64, 32  # of a multiprocessor, at most


@dataclass(frozen=True)
class Compiled:
    """Machine code, and what a program of it takes: registers a lane; bytes of stack, local and shared memory."""

    cubin: bytes
    registers: int
    stack: int
    local: int
    shared: int

    def instructions(self) -> list[sass.Instruction]:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(self.cubin)
            return sass.instructions(sass.disassembled(TOOLS / "nvdisasm", Path(file.name)))


def compiled(one: Recorded, arch: int) -> Compiled:
    """A launch, compiled for an architecture."""
    source = ASTSource(one.function, one.signature, one.constants, one.attributes)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=one.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pairs = (word.split(":") for line in printed.splitlines() if "REG:" in line for word in line.split() if ":" in word)
    taken = {name: number for name, number in pairs}
    return Compiled(
        made.asm["cubin"], int(taken["REG"]), int(taken["STACK"]), int(taken["LOCAL"]), made.metadata.shared
    )


def programs(registers: int, shared: int, warps: int, arch: int) -> int:
    """How many programs a multiprocessor holds at a time.

    registers, shared   of a lane, and bytes of a program
    warps               of a program
    """
    of_warp = -(-registers * 32 // UNIT) * UNIT
    held = 4 * (REGISTERS // 4 // of_warp)
    return min(held // warps, WARPS // warps, PROGRAMS, (SHARED[arch] + RESERVED) // (shared + RESERVED))
