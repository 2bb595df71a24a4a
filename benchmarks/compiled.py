"""Record the launches that host code would make, and compile them for an architecture, without a GPU.

A launch is kept with types, constants and alignments, as Triton would specialize the kernel for it.
"""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
TYPES = {
    torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
}  # fmt: skip
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
REGISTERS = 65536  # of a multiprocessor
SHARED = {80: 166912, 90: 232448, 100: 232448}  # bytes that a program can have


@dataclass(frozen=True, eq=False)
class Recorded:
    """One launch, ready to be compiled; equal to another if the machine code is. `grid` is that of its programs."""

    function: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[tuple[int, ...], list]
    options: dict[str, int]
    grid: tuple[int, ...]

    @property
    def warps(self) -> int:
        """Of a program."""
        return self.options.get("num_warps", 4)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recorded) and self._code == other._code

    def __hash__(self) -> int:
        return hash(self._code)

    @cached_property
    def _code(self) -> tuple[Any, str]:
        return self.function, repr((self.signature, self.constants, self.attributes, self.options))


@contextmanager
def recorded() -> Iterator[list[Recorded]]:
    """Collect launches instead of making them."""
    found: list[Recorded] = []
    run = JITFunction.run
    JITFunction.run = lambda self, *args, **options: found.append(_bound(self, args, options))  # type: ignore
    try:
        yield found
    finally:
        JITFunction.run = run


def _bound(function: Any, args: tuple, options: dict[str, Any]) -> Recorded:
    signature, constants, attributes = {}, {}, {}
    for i, (parameter, given) in enumerate(zip(function.params, args, strict=True)):
        if parameter.is_constexpr:
            constants[(i,)] = given
            signature[parameter.name] = "constexpr"
        elif parameter.do_not_specialize:
            signature[parameter.name] = "i32" if isinstance(given, int) else _kind(given, (i,), {}, {})
        else:
            signature[parameter.name] = _kind(given, (i,), constants, attributes)
    assert "enable_fp_fusion" in options, f"{function.__name__}: launch with tile.FUSED; defaults differ among Tritons"
    kept = {name: options[name] for name in OPTIONS if name in options}
    return Recorded(function, signature, constants, attributes, kept, _grid(options["grid"], function, args))


def _grid(given: Any, function: Any, args: tuple) -> tuple[int, ...]:
    names = (parameter.name for parameter in function.params)
    return tuple(given(dict(zip(names, args, strict=True))) if callable(given) else given)


def _kind(given: Any, path: tuple[int, ...], constants: dict, attributes: dict) -> Any:
    """The type of an argument as a launch would specialize it."""
    if isinstance(given, tuple):
        kinds = [_kind(part, (*path, i), constants, attributes) for i, part in enumerate(given)]
        return type(given)(*kinds) if hasattr(given, "_fields") else tuple(kinds)
    if given is None or (isinstance(given, int) and given == 1):
        constants[path] = given
        return "constexpr"
    if isinstance(given, Tensor):
        if given.data_ptr() % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return TYPES[given.dtype]
    if isinstance(given, int):
        if given % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32" if abs(given) < 2**31 else "i64"
    return "fp32"


@dataclass(frozen=True)
class Compiled:
    """Registers a lane; bytes of stack, local and shared memory of a program."""

    registers: int
    stack: int
    local: int
    shared: int


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
    return Compiled(int(taken["REG"]), int(taken["STACK"]), int(taken["LOCAL"]), made.metadata.shared)
