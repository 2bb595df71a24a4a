"""Compare recipes on one model: one pass over the model fits those that need it, one pass over a text measures all.

Nothing is published. The 16-bit model is run once for all; one cache is filled at a time. A comparison that was stopped
goes on where it was, and one with more recipes repeats no measurement.
"""

import hashlib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from kvq_calib import checkpoint
from kvq_calib import run as graph
from kvq_calib.evaluate.subject import Subject
from kvq_calib.job import Job, preflight
from kvq_calib.run import Listener, Run
from kvq_runtime import artifact, recipes
from kvq_runtime.errors import Conflict
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe, preset, presets

# Of each family, some at equal bits, the paper's own among them; a family without one here gives its first.
CHOICE = (
    "aqua-1bit", "aqua-2bit", "aqua-3bit", "aqua-2bit-quarot", "aqua-lloyd-2bit", "aqua-polar-3bit", "aqua-svdq-2bit",
    "aqua-klt-1bit", "aqua-klt-1.5bit", "aqua-klt-2bit", "aqua-h2o-2bit", "h2o", "gear-2bit", "gear-l-2bit-r1",
    "higgs-2bit", "higgs-3bit", "higgs-4bit", "mean-higgs-2bit", "mean-higgs-3bit",
    "kivi-2bit", "kivi-2bit-r32", "kivi-3bit", "kivi-4bit", "kvquant-2bit", "kvquant-3bit",
    "lloyd-2bit", "lloyd-3bit", "turboquant-2bit", "turboquant-3bit",
    "polar-paper", "polar-paper-fitted", "polar-online", "polar-2.5bit", "polar-3bit",
    "quarot-2bit", "quarot-3bit", "rtn-2bit", "rtn-3bit", "rtn-4bit",
    "squat-2bit", "squat-2bit-paper", "squat-online-2bit", "squat-3bit", "squat-pre-2bit", "squat-pre-3bit",
    "squat-hadamard-2bit", "subkv-2bit", "subkv-3bit", "subkv-aqua-2bit",
    "svdq-1.25bit-v4", "svdq-2bit-v4", "svdq-online-2bit-v4", "svdq-shadow-2bit-v4-128",
    "svdq-wf-1bit-v4", "svdq-wf-1.25bit-v4", "svdq-wf-2bit-v4",
)  # fmt: skip


def families() -> dict[str, list[Recipe]]:
    """Recipes by the file of `kvq_runtime/recipes` that they are in."""
    names = sorted(path.stem for path in Path(recipes.__path__[0]).glob("[a-z]*.py"))
    return {name: import_module(f"kvq_runtime.recipes.{name}").recipes() for name in names}


def family(name: str) -> str:
    """The family of a recipe: the file that it is in, or "auto" of bits that were chosen by layer."""
    found = [family for family, own in families().items() if name in {recipe.name for recipe in own}]
    return found[0].replace("_", "-") if found else "auto"


def choose(asked: Sequence[str], geometry: Geometry) -> tuple[list[Recipe], list[str]]:
    """The recipes to compare, and why others are not among them.

    asked   names, each of which must suit the model; ["all"]; or nothing for `CHOICE`
    """
    known = presets()
    if asked and list(asked) != ["all"]:
        found = [preset(name).check(geometry) for name in dict.fromkeys(asked)]
        return found, []
    names = list(known)
    if not asked:
        absent = [family for family in families().values() if not {one.name for one in family} & {*CHOICE, "exact"}]
        names = [name for name in CHOICE if name in known] + [family[0].name for family in absent]
    found, notes = [], []
    for name in names:
        try:
            found.append(known[name].check(geometry))
        except ValueError as error:
            notes.append(f"{name} is left out: {error}")
    return found, notes


def fit(job: Job, listener: Listener = lambda progress: None) -> list[Subject]:
    """Fit the job's recipes in its run folder, and publish nothing; Conflict if another process does just that."""
    files, plan = job.prepare()
    preflight(job, files, plan)
    work = Run(plan, files, job.folder(plan), listener)
    try:
        made = graph.calibrate(work)
    except checkpoint.AlreadyRunning as error:
        raise Conflict(str(error)) from None
    return [
        Subject.of(one, hashlib.sha256(artifact.to_bytes(one)).hexdigest(), name, published=False)
        for name, one in made.items()
    ]
