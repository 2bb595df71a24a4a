"""Compile every kernel ahead of time for sm_80, sm_90 and sm_100, and hold what it takes against the committed table.

What is compiled is what the host code would launch: its launches are recorded (compiled.py). Of every kernel the table
has registers, stack, local and shared memory, and the warps that a multiprocessor holds at a time. Of attention it has
what the main loop takes (sass.py), for keys and values of one head:

    per element and lane   instructions; of them multiplications, those of the ALU, of the FMA pipe (with integer
                           products), of the tensor cores; and wavefronts of shared memory, of global memory, of gathers
    of a warp and block    exposed_loads, how often it waits for memory; barriers; stall_cycles, which it takes at least

A kernel gets worse if it takes more of anything than the table says, or leaves room for fewer warps. The table has rows
of two Tritons, the newest of its time and the oldest allowed; what spills is in it. With any other a kernel has to
compile and to fit.

PYTHONPATH=. python benchmarks/kernels_aot.py [--arch 80,90,100] [--only NAME ...] [--each-kind] [--write | --check]
"""

import argparse
import csv
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before triton is imported
    os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton

from benchmarks import sass
from benchmarks.cases import layouts
from benchmarks.compiled import REGISTERS, SHARED, Recorded, compiled, programs, recorded
from kvq_calib.fit import gptq
from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.kernels.attend import launch
from kvq_runtime.kernels.attend.kernel import ENOUGH, EXACT, merge_parts
from kvq_runtime.kernels.attend.kernel import SHARED as SHARED_ROWS
from kvq_runtime.kernels.attend.settings import RoundedSettings
from kvq_runtime.ops import dispatch, feedback, fragment, grid, latent, lloyd, pack, polar, rotation, rtn, trellis
from kvq_runtime.recipe import Recipe, preset
from kvq_runtime.stages.predict import Mean
from kvq_runtime.store import storage
from kvq_runtime.vllm.page import page_of

TABLE = Path(__file__).parent / "results" / "kernels_aot.csv"
COUNTED = (
    *(f"{what}_per_element" for what in ("instructions", "multiplications", "alu", "fma", "tensor")),
    *(f"{what}_wavefronts_per_element" for what in ("shared", "global", "gather")),
    *("exposed_loads", "barriers", "stall_cycles"),
)
COLUMNS = ("triton", "kernel", "arch", "registers", "stack", "local", "shared", "warps", *COUNTED)
ARCHS = (80, 90, 100)
FAMILIES = (
    *("kivi-2bit-g128", "kivi-4bit-g128", "kivi-2bit", "kivi-3bit", "kivi-4bit"),
    *("squat-pre-2bit", "squat-pre-3bit", "squat-pre-4bit"),
    *("rtn-2bit", "rtn-3bit", "rtn-4bit", "rtn-8bit", "rtn-absmax-4bit"),
    *("quarot-head-2bit", "quarot-head-4bit", "higgs-head-1bit", "higgs-head-1.5bit", "higgs-head-2bit"),
    *("higgs-head-3bit", "higgs-head-4bit", "turboquant-3bit", "lloyd-2bit", "lloyd-3bit", "lloyd-4bit"),
    "lloyd-even-2bit",
    *("mean-higgs-head-1bit-post", "mean-higgs-head-2bit-post", "mean-higgs-head-3bit-post"),
    *("mean-higgs-head-4bit-post", "mean-lloyd-2bit-post", "mean-lloyd-3bit-post", "mean-lloyd-4bit-post"),
    *("polar-paper", "polar-radius8", "polar-2.5bit", "polar-3bit", "polar-4bit"),
)
PAGES = ("kivi-2bit-g128", "kivi-2bit", "quarot-head-2bit")  # over a serving engine's pages as well


def attends(
    recipe: Recipe, size: int = 128, heads: int = 8, ratio: int = 4, tokens: int = 1, position: str = "",
    batch: int = 2, splits: int = 32,
):  # fmt: skip
    """A decode step over one slab of this recipe, as the host would launch it; None where there is no kernel."""
    geometry, position = Geometry(1, heads, size), position or recipe.position
    read = layouts(recipe, geometry, position)
    if None in read:
        return None

    def call() -> None:
        schemes = []
        for one, scheme in zip(read, (recipe.key, recipe.value), strict=True):
            addresses = torch.zeros(4, 1 + len(one.names), dtype=torch.int64)
            mean = None if scheme.predict is None else torch.zeros(geometry.width)
            schemes.append(replace(launch.Encoded.of(one, addresses), mean=mean))
        held, sinks = torch.zeros(batch, 256, geometry.width, dtype=torch.bfloat16), recipe.window.sinks
        exact = launch.Exact(held, held, held[:, :sinks].clone(), held[:, :sinks].clone())
        q = torch.zeros(batch, heads * ratio, tokens, size, dtype=torch.bfloat16)
        lengths, starts = torch.zeros(4, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
        rope = None
        if position == "pre" or recipe.key.predict is not None:
            rope = launch.RopeTables.of(torch.ones(size // 2), 1.0, recipe.window.block, 8, starts, position)
        how = launch.default(*read, ratio * tokens)
        launch.attend(q, *schemes, exact, lengths, starts, size**-0.5, splits, rope, how)

    return call


def attends_pages(recipe: Recipe):
    """A decode step over a serving engine's pages of this recipe, as the host would launch it."""
    size, heads, ratio, batch, splits = 128, 8, 4, 2, 32
    geometry, tokens = Geometry(1, heads, size), recipe.window.block
    read = layouts(recipe, geometry)
    orders = dict(zip(ROLES, (one and one.order for one in read), strict=True))
    page = page_of(recipe, 0, geometry, torch.bfloat16, orders)
    views = page.views(torch.zeros(4, page.tokens * page.per_token, dtype=torch.uint8))

    def call() -> None:
        table = torch.zeros(batch, 256, dtype=torch.int32)
        schemes = []
        for one, role in zip(read, ROLES, strict=True):
            encoded = launch.Encoded.of(one, torch.empty(0))
            schemes.append(replace(encoded, addresses=launch.Pages.of(views[role], one.names, table)))
        tails, sinks = (
            torch.zeros(8, 2, count, geometry.width, dtype=torch.bfloat16) for count in (tokens, recipe.window.sinks)
        )
        exact = launch.Exact(*tails.unbind(1), *sinks.unbind(1))
        q, lengths = torch.zeros(batch, heads * ratio, 1, size, dtype=torch.bfloat16), torch.zeros(batch, 4).int()
        rope = None
        if recipe.position == "pre" or recipe.key.predict is not None:
            starts = torch.zeros(batch, dtype=torch.int32)
            rope = launch.RopeTables.of(torch.ones(size // 2), 1.0, tokens, 8, starts, recipe.position)
        how = launch.default(*read, ratio)
        launch.attend(q, *schemes, exact, lengths, None, size**-0.5, splits, rope, how)

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
    found |= {f"attend {name} pages": attends_pages(preset(name)) for name in PAGES}
    return {name: call for name, call in found.items() if call is not None} | _ops()


def _ops() -> dict[str, Callable[[], Any]]:
    x, c = torch.randn(64, 8, 128), torch.zeros(64, 8, 128, dtype=torch.uint8)
    s, z = torch.ones(64, 8).half(), torch.randn(2, 64, 128)
    signed, matrix = rotation.SignedHadamard(128, 0), torch.eye(128)
    tokens, counts = torch.zeros(2, 64, 1, 1024, dtype=torch.bfloat16).unbind(0), torch.zeros(4, dtype=torch.int32)
    lines, parts, rows = ENOUGH, EXACT.value + 4, SHARED_ROWS
    part, level = torch.zeros(lines, parts, rows, 128), torch.zeros(lines, rows, parts)
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
        "order codes": lambda: fragment.arrange(c.view(2, 4, 64, 128), fragment.order(2, 64, 128), "tokens"),
        "decode rtn": lambda: rtn.decode(c, s, s, 2),
        "decode polar": lambda: polar.decode([c[..., : 128 >> i] for i in range(1, 5)], s[..., None], angles),
        "encode latent": lambda: latent.encode_gaussian(z, torch.ones(64), 4),
        "decode latent": lambda: latent.decode_uniform(z, torch.ones(64), torch.ones(64), 4),
        "try gains": lambda: latent.errors_with_gains(z, torch.ones(64), 4, torch.ones(8)),
        "round matrix": lambda: gptq.round_group(
            z[0].double(), torch.eye(64).double(), s.view(-1)[:128], s.view(-1)[:128]
        ),
        "encode path": lambda: latent.encode_path(z, torch.ones(64), 2, torch.ones(2, 128)),
        "encode trellis": lambda: trellis.best_path(x, s.float(), trellis.table(2, 10).float(), 2),
        "feedback": lambda: feedback.follow(z.view(2, 1, 64, 128), torch.zeros(1, 32, 32), z[:, None, :32].clone()),
        "merge rotated": lambda: merge_parts(
            part, level, matrix.half(), None, counts, part[:, 0].bfloat16(), level[..., 0].contiguous()
        ),
        "append": lambda: storage.append(*tokens, torch.zeros(2, 64, 8, 1024, dtype=torch.bfloat16), counts),
    }


def launches(only: Sequence[str] = ()) -> dict[str, Recorded]:
    """Every launch once, under the first name that makes it; attention under all of them."""
    found: dict[str, Recorded] = {}
    with dispatch.forced(True):
        for name, call in calls().items():
            if only and not any(part in name for part in only):
                continue
            with recorded() as made:
                call()
            for one in made:
                inner = one.function.__name__.strip("_")
                label = name if inner in name else f"{name} {inner}"
                if inner == "attend" or not any(_same(one, other) for other in found.values()):
                    found[label] = one
    return found


def _same(one: Recorded, other: Recorded) -> bool:
    both = ((x.signature, x.constants, x.options) for x in (one, other))
    return one.function is other.function and next(both) == next(both)


def of_each_kind(found: dict[str, Recorded]) -> dict[str, Recorded]:
    """The first launch of each kind: same kernel, same readers, settings of the same types, with tables or without;
    bits and sizes differ."""
    chosen: dict[Any, str] = {}
    for name, one in found.items():
        parts = [
            (type(part), getattr(part, "__name__", None), bool(getattr(part, "TABLES", ())))
            for part in one.constants.values()
        ]
        chosen.setdefault((one.function, tuple(zip(one.constants, parts, strict=True))), name)
    return {name: found[name] for name in chosen.values()}


@cache  # some recipes launch the same kernel
def usage(one: Recorded, arch: int) -> dict[str, Any]:
    """The cost of a launch on an architecture: the table's columns from "registers" on, "" without a main loop."""
    made = compiled(one, arch)
    counts = dict.fromkeys(COUNTED, "")
    if one.function.__name__ == "attend":
        layer, (tokens, turns) = one.named("L"), main_pass(one)
        passed = sass.main_loop(made.instructions(), turns)
        counts = sass.counted(passed, 32 * one.warps / (2 * tokens * layer.D), layer.T // tokens, bool(layer.PAGED))
    taken = {name: getattr(made, name) for name in ("registers", "stack", "local", "shared")}
    held = one.warps * programs(made.registers, made.shared, one.warps, arch)
    return taken | {"warps": held} | {name: counts[name] for name in COUNTED}


def main_pass(one: Recorded) -> tuple[int, int]:
    """Of attention's main loop: (tokens of a pass through it, how often a loop inside turns, where there is one)."""
    layer, keys = one.named("L"), one.named("KS")
    return (16 * keys.TILES, 1) if isinstance(keys, RoundedSettings) else (layer.T, -(-layer.T // layer.N))


def stored() -> dict[tuple[str, str, int], dict[str, float]]:
    """The committed table, by Triton, kernel and architecture."""
    rows = csv.DictReader(io.StringIO(TABLE.read_text()))
    return {
        (row["triton"], row["kernel"], int(row["arch"])): {name: float(row[name]) for name in COLUMNS[3:] if row[name]}
        for row in rows
    }


def worse(name: str, arch: int, taken: dict[str, Any], table: dict, warps: int = 4) -> list[str]:
    """Regressions of a kernel, of programs of so many warps, against the table."""
    versions = {version for version, *_ in table}
    before = table.get((triton.__version__, name, arch))
    if before is None and (triton.__version__ in versions or (name, arch) not in {key[1:] for key in table}):
        return [f"{name}, sm_{arch}: not in {TABLE.name} with Triton {triton.__version__}; run with --write"]
    most = dict(before or {})
    most["shared"] = min(most.get("shared", SHARED[arch]), SHARED[arch])
    most["registers"] = min(most.get("registers", 255), REGISTERS // (32 * warps))
    least = most.pop("warps", 0)
    found = [f"{name}, sm_{arch}: {what} {amount}; at most {most[what]:g}"
             for what, amount in taken.items() if amount != "" and amount > most.get(what, amount)]  # fmt: skip
    if taken["warps"] < least:
        found.append(f"{name}, sm_{arch}: warps {taken['warps']}; at least {least:g}")
    return found


def write(rows: list[list[Any]], names: set[str] | None) -> None:
    """Put rows of this Triton into the table; keep others of kernels that there are, of the oldest and newest Triton.

    names   of all kernels that there are; None: keep all
    """
    kept = list(csv.reader(io.StringIO(TABLE.read_text())))[1:] if TABLE.exists() else []
    versions = sorted({row[0] for row in [*kept, *rows]}, key=_order)
    known = {versions[0], versions[-1], triton.__version__}
    kept = [row for row in kept if row[0] in known and (names is None or row[1] in names)]
    both = {(_order(row[0]), row[1], int(row[2])): row for row in [*kept, *rows]}
    with TABLE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *(both[key] for key in sorted(both))])


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arch", default=",".join(map(str, ARCHS)), help="compute capabilities")
    parser.add_argument("--only", nargs="*", default=[], help="kernels whose name has one of these")
    parser.add_argument("--each-kind", action="store_true", help="one kernel of each kind, not every width and size")
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a kernel got worse")
    given = parser.parse_args()
    table = stored() if TABLE.exists() else {}
    rows, wrong = [], []
    found = launches(given.only)
    for name, one in (of_each_kind(found) if given.each_kind else found).items():
        for arch in map(int, given.arch.split(",")):
            taken = usage(one, arch)
            rows.append([triton.__version__, name, arch, *taken.values()])
            if given.check:
                wrong += worse(name, arch, taken, table, one.warps)
            else:
                print(*(f"{key} {value}" for key, value in zip(COLUMNS, rows[-1], strict=True)), sep="  ", flush=True)
    if given.write:
        write(rows, None if given.only else set(found))
    print(*wrong, f"{len(rows)} compiled with Triton {triton.__version__}, {len(wrong)} got worse", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
