"""Choose the recipes that `kvq compare` compares on one model."""

from collections.abc import Sequence

from kvq_runtime.artifact import recipe_text
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe, families, presets

# Of each family, some at equal bits, the paper's own among them; a family without one here gives its first.
CHOICE = (
    "aqua-1bit", "aqua-2bit", "aqua-3bit", "aqua-2bit-quarot", "aqua-lloyd-2bit", "aqua-polar-3bit", "aqua-svdq-2bit",
    "aqua-klt-1bit", "aqua-klt-1.5bit", "aqua-klt-2bit", "aqua-trellis-2bit", "aqua-h2o-2bit", "h2o",
    "aqua-fisher-0.5bit", "aqua-fisher-1bit", "aqua-fisher-2bit", "aqua-fisher-3bit",
    "aqua-metric-0.25bit-vocab", "aqua-metric-0.5bit-vocab", "aqua-metric-0.75bit-vocab", "aqua-metric-1bit-vocab",
    "aqua-metric-1.5bit-vocab", "aqua-metric-2bit-vocab", "aqua-metric-0.5bit-all", "aqua-metric-0.5bit",
    "aqua-metric-1bit", "aqua-metric-1.5bit", "aqua-metric-2bit", "gear-2bit", "gear-l-2bit-r1",
    "higgs-2bit", "higgs-3bit", "higgs-4bit", "mean-higgs-2bit", "mean-higgs-3bit",
    "kivi-2bit", "kivi-2bit-r32", "kivi-3bit", "kivi-4bit", "kvquant-2bit", "kvquant-3bit",
    "lloyd-2bit", "lloyd-3bit", "turboquant-2bit", "turboquant-3bit",
    "trellis-head-1bit", "trellis-head-2bit", "trellis-head-3bit",
    "oscar-2bit", "oscar-output-2bit", "oscar-3bit", "wush-2bit", "wush-higgs-2bit", "wush-3bit",
    "polar-paper", "polar-paper-fitted", "polar-online", "polar-2.5bit", "polar-3bit",
    "quarot-2bit", "quarot-3bit", "rtn-2bit", "rtn-3bit", "rtn-4bit",
    "squat-2bit", "squat-2bit-paper", "squat-online-2bit", "squat-3bit", "squat-pre-2bit", "squat-pre-3bit",
    "squat-hadamard-2bit", "subkv-2bit", "subkv-3bit", "subkv-aqua-2bit",
    "svdq-1.25bit-v4", "svdq-2bit-v4", "svdq-online-2bit-v4", "svdq-shadow-2bit-v4-128",
    "svdq-wf-1bit-v4", "svdq-wf-1.25bit-v4", "svdq-wf-2bit-v4", "zipcache-2bit",
)  # fmt: skip


def choose(asked: Sequence[str], geometry: Geometry) -> tuple[list[Recipe], list[str]]:
    """The recipes to compare, and why others are not among them.

    asked   texts as `recipe_text.read` takes them, each of which must suit the model; ["all"]; or nothing for `CHOICE`
    """
    known = presets()
    if asked and list(asked) != ["all"]:
        return recipe_text.distinct(recipe_text.read(text).check(geometry) for text in asked), []
    names = list(known)
    if not asked:
        absent = [family for family in families().values() if not {r.name for r in family} & {*CHOICE, "exact"}]
        names = [name for name in CHOICE if name in known] + [family[0].name for family in absent]
    found, notes = [], []
    for name in names:
        try:
            found.append(known[name].check(geometry))
        except ValueError as error:
            notes.append(f"{name} is left out: {error}")
    return found, notes
