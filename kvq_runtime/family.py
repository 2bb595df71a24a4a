"""State what others need to know of one file's recipes: papers, looks, golden artifacts, comparisons, claims.

Every file of `kvq_runtime/recipes` has one, `FAMILY`. Pages, pictures, comparisons and tests read it there, so that
nothing else names a method.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, or ours: the recipe `better` diverges less than `worse`, by this protocol."""

    text: str
    better: str
    worse: str
    protocol: Literal["full", "in-use"] = "full"


@dataclass(frozen=True)
class Family:
    """A file of recipes.

    look        colour (`kvq_calib/report/looks.py` has their names) and marker in pictures, both together its own
    papers      of each paper whose method it is: name → authors, year, and "arXiv ..." or "doi ..."
    golden      recipes, with settings, that have an artifact, or an encoded block, in artifacts/golden
    compared    recipes that are compared where none are asked for; None: the first of the file
    claims      what is claimed of them
    combined    how names of recipes begin that combine papers as no paper does
    varied      how names of other recipes begin that no paper has
    opposed     whether a page holds the best combination against the paper at equal bits
    """

    look: tuple[str, str]
    papers: Mapping[str, str] = field(default_factory=dict)
    golden: tuple[str, ...] = ()
    compared: tuple[str, ...] | None = None
    claims: tuple[Claim, ...] = ()
    combined: tuple[str, ...] = ()
    varied: tuple[str, ...] = ()
    opposed: bool = False
