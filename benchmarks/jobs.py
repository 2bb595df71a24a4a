"""Launch once, in small, what will be timed, so that Triton compiles it; a process that does so for others.

A job has as few tokens as the kernel takes, but the heads of the case it stands for: the very kernel that will be
timed, which serves any batch and number of splits; and every merge, for each serves a class of splits, and of a large
batch others do. `python -m benchmarks.jobs` takes jobs, a line of JSON each, and answers each.
"""

import json
import os
import sys
from dataclasses import dataclass

import torch

from benchmarks import cases

SHORT = 512  # tokens of a case that is launched to be compiled


@dataclass(frozen=True)
class Job:
    """Something to launch once.

    kind    attend: a decode step; encode: a flush; paged: the bfloat16 kernel of paged.py; generate: a model's steps
    batch   of paged and generate, whose kernels depend on it
    role    of encode: key or value
    launch  of attend: tile, warps, stages, registers; None: the package's choice
    prompt  of generate: tokens
    """

    kind: str
    model: str
    recipe: str = ""
    batch: int = 1
    role: str = ""
    launch: tuple[int, ...] | None = None
    prompt: int = 0

    def __str__(self) -> str:
        batch = f"batch {self.batch}" if self.kind in ("paged", "generate") else ""
        parts = (self.kind, self.model, self.recipe, self.role, batch, self.launch)
        return " ".join(str(part) for part in parts if part)


def job_of(case: cases.Case, launch: tuple[int, ...] | None = None) -> Job:
    """What compiles a case's kernel, for all its tokens and batches."""
    return Job("attend", case.model.name, case.recipe, launch=launch)


def launched(job: Job, device: torch.device) -> None:
    """Launch what a job names, once."""
    if job.kind == "generate":
        from benchmarks import steps

        return steps.rehearse(job.model, job.recipe, job.batch, job.prompt, device)
    model = next(model for model in cases.MODELS if model.name == job.model)
    if job.kind == "encode":
        cases.encoder(model, job.recipe, job.role, device)[0]()
        return None
    if job.kind == "paged":
        from benchmarks import paged

        paged.built(cases.Case(model, job.recipe, SHORT, job.batch), device)()
        return None
    from kvq_runtime.kernels.attend.launch import Launch
    from kvq_runtime.kernels.attend.merge import CLASSES

    how = job.launch and Launch(*job.launch)
    for batch in (min(cases.BATCHES), max(cases.BATCHES)):
        case = cases.Case(model, job.recipe, SHORT, batch)
        step, q = cases.built(case, device), cases.queries(case, device)
        for splits in (None, *CLASSES):
            step(q, how, splits)
    return None


def serve(device: torch.device) -> None:
    """Take jobs from stdin until it ends; what else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        given = json.loads(line)
        error = None
        try:
            launched(Job(**given | {"launch": given["launch"] and tuple(given["launch"])}), device)
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"[:400]
        answers.write(json.dumps({"error": error}) + "\n")
        answers.flush()


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    serve(torch.device("cuda"))
