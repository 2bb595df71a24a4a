"""Compile every kernel ahead of time for sm_80, sm_90 and sm_100, and check that it fits the architecture.

Recorded launches of the host code (compiled.py) are compiled. Printed are registers a lane and bytes of stack, local
and shared memory. A kernel fails if its program does not fit, or spills more than SPILLED, or WIDE, allows.

PYTHONPATH=. python benchmarks/kernels_aot.py [--arch 80,90,100] [--only NAME ...] [--each-kind]
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

if __name__ == "__main__":  # before triton is imported
    os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton

from benchmarks.cases import counted, layouts
from benchmarks.compiled import REGISTERS, SHARED, Recorded, compiled, recorded
from kvq_calib.fit import predict
from kvq_runtime.artifact.recipe_text import read
from kvq_runtime.attention.fused import segment_of
from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.kernels.attend import launch
from kvq_runtime.kernels.attend.kernel import EXACT, merge_parts
from kvq_runtime.ops import dispatch, grid, lloyd, polar, rotation, rtn, token_gain, trellis
from kvq_runtime.recipe import Recipe
from kvq_runtime.stages.predict import Mean
from kvq_runtime.store import storage
from kvq_runtime.vllm.page import page_of

SPILLED = 400  # bytes of stack a lane, at most
WIDE = {"attend higgs-head-2bit d256": 2048, "attend lloyd-3bit d256": 2048}  # tables in registers, twice the channels
_LATENTS = ("2.5bit", "2.5bit pages", "3bit d64", "3bit d80", "3bit d256")
WIDE |= {f"attend fisher-head-{name}": 2048 for name in _LATENTS}  # once a block
ARCHS = (80, 90, 100)
FAMILIES = (
    *("kivi-2bit-g128", "kivi-4bit-g128", "kivi-2bit", "kivi-4bit"),
    *("rtn-2bit", "rtn-4bit", "rtn-8bit", "quarot-head-2bit", "quarot-head-4bit"),
    *("lloyd-2bit", "lloyd-3bit", "lloyd-4bit", "higgs-head-2bit"),
    *("mean-higgs-head-2bit-post", "mean-lloyd-3bit-post", "polar-paper", "polar-3bit", "fisher-head-2.5bit"),
)
# over a serving engine's pages as well
PAGES = ("kivi-2bit-g128", "kivi-2bit", "quarot-head-2bit", "fisher-head-2.5bit")


def attends(
    recipe: Recipe, size: int = 128, heads: int = 8, ratio: int = 4, tokens: int = 1, batch: int = 2, splits: int = 32,
):  # fmt: skip
    """A decode step over one slab of this recipe, as the host would launch it; None where there is no kernel."""
    geometry = Geometry(1, heads, size)
    recipe = counted(recipe, geometry)
    read = layouts(recipe, geometry)
    if None in read:
        return None

    def call() -> None:
        schemes = []
        for one, scheme in zip(read, (recipe.key, recipe.value), strict=True):
            addresses = torch.zeros(4, 1 + len(one.names), dtype=torch.int64)
            mean = None if scheme.predict is None else torch.zeros(geometry.width)
            schemes.append(replace(one, addresses=addresses, mean=mean))
        held, sinks = torch.zeros(batch, 256, geometry.width, dtype=torch.bfloat16), recipe.window.sinks
        exact = launch.Exact(held, held, held[:, :sinks].clone(), held[:, :sinks].clone())
        q = torch.zeros(batch, heads * ratio, tokens, size, dtype=torch.bfloat16)
        lengths, starts = torch.zeros(4, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
        rope = None
        if recipe.key.predict is not None:
            block, segment = recipe.window.block, segment_of(recipe)
            rope = launch.RopeTables.of(torch.ones(size // 2), 1.0, block, 8, starts, segment)
        launch.attend(q, *schemes, exact, lengths, starts, size**-0.5, splits, rope)

    return call


def attends_pages(recipe: Recipe):
    """A decode step over a serving engine's pages of this recipe, as the host would launch it."""
    size, heads, ratio, batch, splits = 128, 8, 4, 2, 32
    geometry, tokens = Geometry(1, heads, size), recipe.window.block
    recipe = counted(recipe, geometry)
    read = layouts(recipe, geometry)
    orders = dict(zip(ROLES, (one and one.order for one in read), strict=True))
    page = page_of(recipe, 0, geometry, torch.bfloat16, orders)
    views = page.views(torch.zeros(4, page.tokens * page.per_token, dtype=torch.uint8))

    def call() -> None:
        table = torch.zeros(batch, 256, dtype=torch.int32)
        schemes = []
        for one, role in zip(read, ROLES, strict=True):
            mean = None if recipe.scheme(0, role).predict is None else torch.zeros(geometry.width)
            schemes.append(replace(one, addresses=launch.Pages.of(views[role], one.names, table), mean=mean))
        tails, sinks = (
            torch.zeros(8, 2, count, geometry.width, dtype=torch.bfloat16) for count in (tokens, recipe.window.sinks)
        )
        exact = launch.Exact(*tails.unbind(1), *sinks.unbind(1))
        q, lengths = torch.zeros(batch, heads * ratio, 1, size, dtype=torch.bfloat16), torch.zeros(batch, 4).int()
        rope = None
        if recipe.key.predict is not None:
            starts = torch.zeros(batch, dtype=torch.int32)
            rope = launch.RopeTables.of(torch.ones(size // 2), 1.0, tokens, 8, starts, segment_of(recipe))
        launch.attend(q, *schemes, exact, lengths, None, size**-0.5, splits, rope)

    return call


def calls() -> dict[str, Callable[[], Any]]:
    """Everything that is compiled, by name."""
    found: dict[str, Any] = {f"attend {name}": attends(read(name)) for name in FAMILIES}
    for size in (64, 80, 96, 256):
        for name in ("kivi-2bit-g128", "rtn-4bit", "higgs-head-2bit", "lloyd-3bit", "polar-paper"):
            found[f"attend {name} d{size}"] = attends(read(name), size)
    for name in ("mean-higgs-head-2bit-post", "mean-lloyd-3bit-post"):
        found |= {f"attend {name} d{size}": attends(read(name), size) for size in (64, 80)}
    found |= {f"attend fisher-head-3bit d{size}": attends(read("fisher-head-3bit"), size) for size in (64, 80, 256)}
    kivi = read("kivi-2bit-g128")
    found["attend kivi-2bit-g128 mean"] = attends(replace(kivi, key=replace(kivi.key, predict=Mean())))
    for name in ("kivi-2bit-g128", "rtn-4bit", "higgs-head-2bit", "lloyd-3bit"):
        for tokens in (2, 4, 8) if not name.startswith("kivi") else (8,):
            found[f"attend {name} m{8 * tokens}"] = attends(read(name), ratio=8, tokens=tokens)
    found |= {f"attend {name} pages": attends_pages(read(name)) for name in PAGES}
    return {name: call for name, call in found.items() if call is not None} | _ops()


def _ops() -> dict[str, Callable[[], Any]]:
    x = torch.randn(64, 8, 128)
    s, z = torch.ones(64, 8).half(), torch.randn(2, 64, 128)
    signed, matrix = rotation.SignedHadamard(128, 0), torch.eye(128)
    tokens, counts = torch.zeros(2, 64, 1, 1024, dtype=torch.bfloat16).unbind(0), torch.zeros(4, dtype=torch.int32)
    lines, parts, rows = 2, EXACT.value + 4, 4
    part, level = torch.zeros(lines, parts, rows, 128), torch.zeros(lines, rows, parts)
    return {
        "encode rtn 2 per channel": lambda: rtn.encode(z.mT.unflatten(-1, (1, 64)), 2),
        "encode rtn 4 rotated": lambda: rtn.encode(x, 4, "minmax", signed),
        "encode grid 2 256 rotated": lambda: grid.encode(x, 2, 256, signed),
        "encode lloyd 3 matrix": lambda: lloyd.encode(x, 3, "norm", matrix),
        "encode polar": lambda: polar.encode(x, (4, 2, 2, 2), matrix),
        "encode polar fitted": lambda: polar.encode(x, (4, 2), None, [torch.zeros(15), torch.zeros(3)]),
        "round matrix": lambda: predict.round_group(
            z[0].double(), torch.eye(64).double(), s.view(-1)[:128], s.view(-1)[:128]
        ),
        "encode path": lambda: trellis.encode_path(z, torch.ones(64), 2, torch.ones(2, 128)),
        "encode latent": lambda: token_gain.encode(
            z, torch.ones(64), ((8, 6), (24, 3), (32, 2)), torch.ones(2, 2), 3, torch.arange(64) % 2, True
        ),
        "encode trellis": lambda: trellis.best_path(x, s.float(), trellis.table(2).float(), 2),
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


def faults(name: str, one: Recorded, arch: int) -> tuple[dict[str, int], list[str]]:
    """Compile a launch for an architecture; return what it takes, and why it does not fit."""
    made = compiled(one, arch)
    taken = {what: getattr(made, what) for what in ("registers", "stack", "local", "shared")}
    most = {
        "registers": min(255, REGISTERS // (32 * one.warps)),
        "stack": WIDE.get(name, SPILLED),
        "local": 0,
        "shared": SHARED[arch],
    }
    return taken, [
        f"{name}, sm_{arch}: {what} {taken[what]}; at most {most[what]}" for what in most if taken[what] > most[what]
    ]


def main() -> int:
    """Compile, print a line a kernel and architecture, and return 1 if one does not fit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arch", default=",".join(map(str, ARCHS)), help="compute capabilities")
    parser.add_argument("--only", nargs="*", default=[], help="kernels whose name has one of these")
    parser.add_argument("--each-kind", action="store_true", help="one kernel of each kind, not every width and size")
    given = parser.parse_args()
    found, wrong, count = launches(given.only), [], 0
    for name, one in (of_each_kind(found) if given.each_kind else found).items():
        for arch in map(int, given.arch.split(",")):
            taken, faulty = faults(name, one, arch)
            print(name, f"sm_{arch}", *(f"{what} {amount}" for what, amount in taken.items()), sep="  ", flush=True)
            wrong, count = wrong + faulty, count + 1
    print(*wrong, f"{count} compiled with Triton {triton.__version__}, {len(wrong)} do not fit", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
