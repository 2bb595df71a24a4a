"""Compile the jobs of recipes in processes, then launch their cases here, on the driver of fake_cuda.c.

python compiling_cpu.py RECIPE ...    says how many kernels Triton compiled while the cases were launched
python compiling_cpu.py               is such a process: takes jobs, as `python -m benchmarks.compiling` does
"""

import sys

import no_device  # noqa: F401
import torch

from benchmarks import cases, compiling
from benchmarks.clock import Deadline

CPU = torch.device("cpu")


def launched(case: cases.Case) -> list[str]:
    """What Triton compiled while the case was launched."""
    with compiling.watched() as found:
        cases.built(case, CPU)(cases.queries(case, CPU))
    return found


def main(recipes: list[str]) -> None:
    steps = [cases.Case(cases.MODELS[0], recipe, 4096, 2) for recipe in recipes]
    done, _ = compiling.stage([compiling.job_of(case) for case in steps], Deadline(300), (sys.executable, __file__))
    assert all(each.error is None for each in done.values()), done
    meanwhile = [name for case in steps for name in launched(case)]
    other = launched(cases.Case(cases.MODELS[1], recipes[0], 4096, 2))
    print(f"{len(meanwhile)} compiled meanwhile; without a job: {', '.join(sorted(other))}")


if len(sys.argv) > 1:
    main(sys.argv[1:])
else:
    compiling.serve(CPU)
