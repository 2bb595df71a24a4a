"""Compile every kernel ahead of time for sm_80, sm_90 and sm_100, and hold what it takes against the committed table.

What is compiled is what the host code would launch: its launches are recorded, with types, constants and alignments.
Registers, stack and local memory come from the cubin's resource usage, shared memory from the metadata. Of attention,
the instructions of the main loop are counted, per element of keys and values and lane, and how many of them multiply,
see sass.py. A kernel gets worse if it takes more of anything than the table says, or spills, with the Triton that the
table was made with; with any Triton it has to compile, and to fit into registers and shared memory.

PYTHONPATH=. python benchmarks/kernels_aot.py [--arch 80,90,100] [--only NAME] [--each-kind] [--write | --check]
"""

import argparse
import csv
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before triton is imported
    os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from benchmarks import sass
from kvq_runtime.geometry import Geometry
from kvq_runtime.kernels.attend import host as attention
from kvq_runtime.kernels.attend import launch
from kvq_runtime.kernels.attend.layout import layout
from kvq_runtime.kernels.attend.settings import RoundedSettings
from kvq_runtime.ops import dispatch, feedback, grid, latent, lloyd, pack, polar, rotation, rtn, window
from kvq_runtime.recipe import Recipe, preset
from kvq_runtime.stages.predict import Mean

TABLE = Path(__file__).parent / "results" / "kernels_aot.csv"
COLUMNS = (
    *("triton", "kernel", "arch", "registers", "stack", "local", "shared"),
    *("instructions_per_element", "multiplications_per_element"),
)
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
ARCHS = (80, 90, 100)
REGISTERS = 65536  # of a multiprocessor
SHARED = {80: 166912, 90: 232448, 100: 232448}  # bytes that a program can have
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
FAMILIES = (
    *("kivi-2bit-g128", "kivi-4bit-g128", "kivi-2bit", "kivi-3bit", "kivi-4bit"),
    *("squat-pre-2bit", "squat-pre-3bit", "squat-pre-4bit"),
    *("rtn-2bit", "rtn-3bit", "rtn-4bit", "rtn-8bit", "rtn-absmax-4bit"),
    *("quarot-head-2bit", "quarot-head-4bit", "higgs-head-1bit", "higgs-head-1.5bit", "higgs-head-2bit"),
    *("higgs-head-3bit", "higgs-head-4bit", "turboquant-3bit", "lloyd-2bit", "lloyd-3bit", "lloyd-4bit"),
    *("mean-higgs-head-1bit-post", "mean-higgs-head-2bit-post", "mean-higgs-head-3bit-post"),
    *("mean-higgs-head-4bit-post", "mean-lloyd-2bit-post", "mean-lloyd-3bit-post", "mean-lloyd-4bit-post"),
    *("polar-paper", "polar-radius8", "polar-2.5bit", "polar-3bit", "polar-4bit"),
)
TYPES = {
    torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """One launch, ready to be compiled."""

    function: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[tuple[int, ...], list]
    options: dict[str, int]


@contextmanager
def recorded() -> Iterator[list[Compiled]]:
    """Collect launches instead of making them."""
    found: list[Compiled] = []
    run = JITFunction.run
    JITFunction.run = lambda self, *args, **options: found.append(_bound(self, args, options))  # type: ignore
    try:
        yield found
    finally:
        JITFunction.run = run


def _bound(function: Any, args: tuple, options: dict[str, int]) -> Compiled:
    signature, constants, attributes = {}, {}, {}
    for i, (parameter, given) in enumerate(zip(function.params, args, strict=True)):
        if parameter.is_constexpr:
            constants[(i,)] = given
            signature[parameter.name] = "constexpr"
        elif parameter.do_not_specialize:
            signature[parameter.name] = "i32"
        else:
            signature[parameter.name] = _kind(given, (i,), constants, attributes)
    assert "enable_fp_fusion" in options, f"{function.__name__}: launch with tile.FUSED; defaults differ among Tritons"
    kept = {name: options[name] for name in OPTIONS if name in options}
    return Compiled(function, signature, constants, attributes, kept)


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


def attends(
    recipe: Recipe,
    size: int = 128,
    heads: int = 8,
    ratio: int = 4,
    tokens: int = 1,
    position: str = "",
    batch: int = 2,
    splits: int = 32,
) -> Callable[[], None] | None:
    """A decode step over one slab of this recipe, as the host would launch it; None where there is no kernel."""
    geometry, position = Geometry(1, heads, size), position or recipe.position
    layouts = [
        layout(recipe.key, recipe.window.block, geometry, "key", position),
        layout(recipe.value, recipe.window.block, geometry, "value"),
    ]
    if None in layouts:
        return None

    def call() -> None:
        schemes = []
        for one, scheme in zip(layouts, (recipe.key, recipe.value), strict=True):
            addresses = torch.zeros(4, 1 + len(one.names), dtype=torch.int64)
            mean = None if scheme.predict is None else torch.zeros(geometry.width)
            schemes.append(replace(attention.Encoded.of(one, addresses), mean=mean))
        held, sinks = torch.zeros(batch, 256, geometry.width, dtype=torch.bfloat16), recipe.window.sinks
        exact = attention.Exact(held, held, held[:, :sinks].clone(), held[:, :sinks].clone())
        q = torch.zeros(batch, heads * ratio, tokens, size, dtype=torch.bfloat16)
        lengths, starts = torch.zeros(4, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
        rope = None
        if position == "pre" or recipe.key.predict is not None:
            rope = attention.RopeTables.of(torch.ones(size // 2), 1.0, recipe.window.block, 8, starts, position)
        how = launch.default(*layouts, launch.heads_per_launch(*layouts, ratio, tokens) * tokens)
        attention.attend(q, *schemes, exact, lengths, starts, size**-0.5, splits, rope, how)

    return call


def calls() -> dict[str, Callable[[], Any]]:
    """Everything that is compiled, by name."""
    found: dict[str, Any] = {f"attend {name}": attends(preset(name)) for name in FAMILIES}
    for size in (64, 80, 96, 256):
        for name in ("kivi-2bit-g128", "rtn-4bit", "higgs-head-2bit", "lloyd-3bit", "polar-paper"):
            found[f"attend {name} d{size}"] = attends(preset(name), size)
    for name in ("mean-higgs-head-2bit-post", "mean-lloyd-3bit-post"):
        found |= {f"attend {name} d{size}": attends(preset(name), size) for size in (64, 80)}
    kivi = preset("kivi-2bit-g128")
    found["attend kivi-2bit-g128 mean"] = attends(replace(kivi, key=replace(kivi.key, predict=Mean())))
    for bits in (2, 4):
        found[f"attend kivi-{bits}bit-g128 pre"] = attends(preset(f"kivi-{bits}bit-g128"), position="pre")
    for name in ("kivi-2bit-g128", "rtn-4bit", "higgs-head-2bit", "lloyd-3bit"):
        for tokens in (2, 4, 8) if not name.startswith("kivi") else (8,):
            found[f"attend {name} m{8 * tokens}"] = attends(preset(name), ratio=8, tokens=tokens)
    return {name: call for name, call in found.items() if call is not None} | _ops()


def _ops() -> dict[str, Callable[[], Any]]:
    x, c = torch.randn(64, 8, 128), torch.zeros(64, 8, 128, dtype=torch.uint8)
    s, z = torch.ones(64, 8).half(), torch.randn(2, 64, 128)
    signed, matrix = rotation.SignedHadamard(128, 0), torch.eye(128)
    tokens, counts = torch.zeros(2, 64, 1, 1024, dtype=torch.bfloat16).unbind(0), torch.zeros(4, dtype=torch.int32)
    angles = [polar.points_on(x.device, level, bits, "unit") for level, bits in enumerate((4, 2, 2, 2), start=1)]
    return {
        "pack 3": lambda: pack.pack(c, 3),
        "unpack 3": lambda: pack.unpack(c, 3, 128),
        "hadamard 128": lambda: rotation.hadamard(x, 128, 0),
        "hadamard 1024": lambda: rotation.hadamard(x.view(64, 1024), 1024, 0),
        "encode rtn 2 per channel": lambda: rtn.encode(z.mT.unflatten(-1, (1, 64)), 2),
        "encode rtn 4 rotated": lambda: rtn.encode(x, 4, "minmax", signed),
        "encode grid 2 256 rotated": lambda: grid.encode(x, 2, 256, signed),
        "encode lloyd 3 matrix": lambda: lloyd.encode(x, 3, "norm", matrix),
        "encode polar": lambda: polar.angles(x, (4, 2, 2, 2)),
        "encode polar packed": lambda: polar.encode(x, (4, 2, 2, 2), matrix),
        "encode polar fitted": lambda: polar.angles(x, (4, 2), [torch.zeros(15), torch.zeros(3)]),
        "decode rtn": lambda: rtn.decode(c, s, s, 2),
        "decode polar": lambda: polar.decode([c[..., : 128 >> i] for i in range(1, 5)], s[..., None], angles),
        "encode latent": lambda: latent.encode_gaussian(z, torch.ones(64), 4),
        "decode latent": lambda: latent.decode_uniform(z, torch.ones(64), torch.ones(64), 4),
        "feedback": lambda: feedback.follow(z.view(2, 1, 64, 128), torch.zeros(1, 32, 32), z[:, None, :32].clone()),
        "append": lambda: window.append(*tokens, torch.zeros(2, 64, 8, 1024, dtype=torch.bfloat16), counts),
    }


def launches(only: str) -> dict[str, Compiled]:
    """Every launch once, under the first name that makes it; attention under all of them."""
    found: dict[str, Compiled] = {}
    with dispatch.forced(True):
        for name, call in calls().items():
            if only not in name:
                continue
            with recorded() as made:
                call()
            for one in made:
                inner = one.function.__name__.strip("_")
                label = name if inner in name else f"{name} {inner}"
                if inner == "attend" or not any(_same(one, other) for other in found.values()):
                    found[label] = one
    return found


def _same(one: Compiled, other: Compiled) -> bool:
    both = ((x.signature, x.constants, x.options) for x in (one, other))
    return one.function is other.function and next(both) == next(both)


def of_each_kind(found: dict[str, Compiled]) -> dict[str, Compiled]:
    """The first launch of each kind: same kernel, same readers, settings of the same types; bits and sizes differ."""
    chosen: dict[Any, str] = {}
    for name, one in found.items():
        parts = [(type(part), getattr(part, "__name__", None)) for part in one.constants.values()]
        chosen.setdefault((one.function, tuple(zip(one.constants, parts, strict=True))), name)
    return {name: found[name] for name in chosen.values()}


def usage(one: Compiled, arch: int) -> dict[str, Any]:
    """What a launch takes on an architecture."""
    source = ASTSource(one.function, one.signature, one.constants, one.attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=one.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        counts = per_element(one, Path(file.name)) if one.function.__name__ == "attend" else ("", "")
    pairs = (word.split(":") for line in printed.splitlines() if "REG:" in line for word in line.split() if ":" in word)
    values = {name: number for name, number in pairs}
    taken = {"registers": int(values["REG"]), "stack": int(values["STACK"]), "local": int(values["LOCAL"])}
    return taken | {"shared": compiled.metadata.shared} | dict(zip(COLUMNS[-2:], counts, strict=True))


def per_element(one: Compiled, cubin: Path) -> tuple[float, float]:
    """(instructions, multiplications) of a lane per element of keys and values."""
    given = {name: one.constants.get((i,)) for i, name in enumerate(one.signature)}
    layer, rounded = given["L"], isinstance(given["KS"], RoundedSettings)
    size, block = layer.D, 16 * given["KS"].TILES if rounded else layer.T
    turns = 1 if rounded else -(-block // layer.N)
    loop = sass.main_loop(sass.instructions(TOOLS / "nvdisasm", cubin), turns)
    lanes = 32 * one.options["num_warps"] / (2 * block * size)
    multiplying = sum(loop[name] for name in sass.MULTIPLICATIONS)
    return round(loop.total() * lanes, 2), round(multiplying * lanes, 2)


def stored() -> dict[tuple[str, int], dict[str, Any]]:
    """The committed table."""
    found = {}
    for row in csv.DictReader(io.StringIO(TABLE.read_text())):
        version, name, arch = row.pop("triton"), row.pop("kernel"), int(row.pop("arch"))
        found[name, arch] = {"triton": version} | {what: float(amount) for what, amount in row.items() if amount}
    return found


def worse(name: str, arch: int, taken: dict[str, Any], table: dict, warps: int = 4) -> list[str]:
    """What is wrong with a kernel, against the table."""
    before = table.get((name, arch))
    if before is None:
        return [f"{name}, sm_{arch}: not in {TABLE.name}; run with --write"]
    most = dict(before) | {"stack": 0, "local": 0} if before["triton"] == triton.__version__ else {}
    most["shared"] = min(most.get("shared", SHARED[arch]), SHARED[arch])
    most["registers"] = min(most.get("registers", 255), REGISTERS // (32 * warps))
    return [f"{name}, sm_{arch}: {what} {amount}; at most {most[what]:g}"
            for what, amount in taken.items() if amount != "" and amount > most.get(what, amount)]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arch", default=",".join(map(str, ARCHS)), help="compute capabilities")
    parser.add_argument("--only", default="", help="kernels whose name has this")
    parser.add_argument("--each-kind", action="store_true", help="one kernel of each kind, not every width and size")
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a kernel got worse")
    given = parser.parse_args()
    table = stored() if TABLE.exists() else {}
    rows, wrong, measured = [], [], {}
    found = launches(given.only)
    for name, one in (of_each_kind(found) if given.each_kind else found).items():
        for arch in map(int, given.arch.split(",")):
            key = (one.function, repr((one.signature, one.constants, one.attributes, one.options)), arch)
            taken = measured[key] = measured.get(key) or usage(one, arch)  # some recipes launch the same kernel
            rows.append([triton.__version__, name, arch, *taken.values()])
            if given.check:
                wrong += worse(name, arch, taken, table, one.options.get("num_warps", 4))
            else:
                print(*(f"{key} {value}" for key, value in zip(COLUMNS, rows[-1], strict=True)), sep="  ", flush=True)
    if given.write:  # what was not compiled now stays
        kept = list(csv.reader(TABLE.open()))[1:] if given.only or given.each_kind else []
        both = {(row[1], int(row[2])): row for row in [*kept, *rows]}
        with TABLE.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *both.values()])
    print(*wrong, f"{len(rows)} compiled with Triton {triton.__version__}, {len(wrong)} got worse", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
