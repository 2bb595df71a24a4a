"""Write the tables of docs/ that list families of recipes: what each is, what serves it, and its papers.

    python scripts/make_family_tables.py

Every cell follows from the recipes, from the `FAMILY` and the docstring of their files, and from the engines' own
checks. A table stands between two comments, `<!-- NAME -->` and `<!-- end of NAME -->`; a test compares it.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from kvq_runtime.cli.recipes import by_family
from kvq_runtime.geometry import MODELS
from kvq_runtime.lmcache.served import LMCACHE
from kvq_runtime.policy_setting import policy_kinds
from kvq_runtime.recipe import Recipe, facts, families
from kvq_runtime.stages.kinds import kinds
from kvq_runtime.vllm.served import VLLM

DOCS = Path(__file__).parents[1] / "docs"
SHAPE = MODELS["qwen2.5-7b"]
ENGINES = {"vLLM": VLLM, "LMCache": LMCACHE}
LINKS = {"arXiv": "https://arxiv.org/abs/", "doi": "https://doi.org/"}
ARXIV = re.compile(r"arXiv (\d{4}\.\d{5})")


def served() -> list[list[str]]:
    """A row a family: what it is, its recipes, bits and fit, and how many of the recipes each engine serves."""
    rows: list[list[str]] = [["family", "method", "recipes", "bits", "fitted", *ENGINES]]
    known = {name.replace("_", "-"): found for name, found in families().items()}
    for row in sorted(by_family(), key=lambda row: row["family"]):
        least, most = f"{row['least bits']:.3g}", f"{row['most']:.3g}"
        bits = least if least == most else f"{least} to {most}"
        fitted = {True: "yes", False: "no"}.get(row["fitted"], "some")
        shares = [_share(engine, known[row["family"]]) for engine in ENGINES.values()]
        rows.append([f"`{row['family']}`", row["what"], str(row["recipes"]), bits, fitted, *shares])
    return rows


def _share(engine, recipes: Sequence[Recipe]) -> str:
    kept = sum(engine.refusal(recipe, SHAPE) is None for recipe in recipes)
    return "all" if kept == len(recipes) else str(kept or "no")


def cited() -> list[list[str]]:
    """A row a paper, and one for each family that is of several or none: its family, and where it is in the code."""
    rows = []
    short = {n: name for one in facts().values() for name, by in one.papers.items() for n in ARXIV.findall(by)}
    for file, one in facts().items():
        family, here = f"`{file.replace('_', '-')}`", [f"`recipes/{file}.py`"]
        for name, by in one.papers.items():
            linked = re.sub(r"(arXiv|doi) ([\w./-]+)", lambda found: f"[{found[0]}]({LINKS[found[1]]}{found[2]})", by)
            code = sorted({place for number in ARXIV.findall(by) for place in _places(number)})
            rows.append([f"{name}: {linked}", family, ", ".join(here + code)])
        if not one.papers:
            numbers = {number for recipe in families()[file] for number in recipe.papers}
            names = sorted(short[number] for number in numbers)
            rows.append([" and ".join(names) if names else "none", family, *here])
    return [["paper", "family", "in the code"], *sorted(rows, key=lambda row: ("[" not in row[0], row[0].lower()))]


def _places(paper: str) -> set[str]:
    """The files of stages and policies that come from a paper, as the recipes use them."""
    stages = {
        stage
        for recipes in families().values()
        for recipe in recipes
        for scheme in recipe.schemes
        for _, stage in scheme.stages
        if paper in stage.papers_in(scheme)
    }
    classes = {type(stage) for stage in stages} & {cls for slot in kinds().values() for cls in slot.values()}
    classes |= {cls for slot in policy_kinds().values() for cls in slot.values() if paper in cls.papers}
    return {f"`{'/'.join(cls.__module__.split('.')[1:])}.py`" for cls in classes}


TABLES = {"recipes.md": ("families", served), "papers.md": ("papers", cited)}


def page(name: str) -> str:
    """The text of a page with its table as it should be."""
    title, made = TABLES[name]
    head, *rows = made()
    table = "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))
    before, rest = (DOCS / name).read_text().split(f"<!-- {title} -->\n")
    return f"{before}<!-- {title} -->\n{table}\n{rest[rest.index(f'<!-- end of {title} -->') :]}"


def main() -> None:
    """Write every table."""
    for name in TABLES:
        (DOCS / name).write_text(page(name))
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
