"""Give each family of recipes one colour and one marker in every picture, and each line of a picture a look of its own.

A family is a file of kvq_runtime/recipes, which names its look, `auto`, or the name of somebody's own recipe. No two
families share both colour and marker; families that share a colour have markers of different kinds (round, pointed,
crossed).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from matplotlib.colors import to_hex, to_rgb

from kvq_runtime import recipe

# Okabe and Ito, 2008: told apart with any kind of colour vision; shapes tell them apart without colour
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BLUE, RED, GREEN, PINK, ORANGE, SKY, BLACK = COLOURS
WINE, OLIVE, INDIGO, GREY = "#882255", "#8A8A1F", "#5B3FA0", "#808080"
NAMED = {"blue": BLUE, "red": RED, "green": GREEN, "pink": PINK, "orange": ORANGE, "sky": SKY, "black": BLACK,
         "wine": WINE, "olive": OLIVE, "indigo": INDIGO, "grey": GREY}  # fmt: skip
AUTO = (BLACK, "P")
OWN = (
    (BLACK, "o"),
    (BLACK, "s"),
    (BLACK, "^"),
    (SKY, "D"),
    (SKY, "P"),
    (ORANGE, "o"),
)  # families of others
_STROKES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))
_FILLS = ("full", "none", "left", "bottom")


family = cache(recipe.family)  # it reads all recipes


@cache
def families() -> dict[str, tuple[str, str]]:
    """Colour and marker of every family that comes with kvq."""
    found = {name.replace("_", "-"): (NAMED[one.look[0]], one.look[1]) for name, one in recipe.facts().items()}
    return found | {"auto": AUTO}


@dataclass(frozen=True)
class Look:
    """Colour, marker, and which of those with this colour and marker it is, from 0."""

    colour: str
    marker: str
    variant: int = 0

    @property
    def point(self) -> dict[str, Any]:
        """Arguments of `Axes.plot` for a marker; variants look alike, for their names stand beside them."""
        return {"color": self.colour, "marker": self.marker, "markersize": 12 if self.marker == "*" else 7,
                "markeredgecolor": "white", "markeredgewidth": 0.6, "linestyle": "none"}  # fmt: skip

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of `Axes.plot` for a line with markers: stroke and filling tell variants apart."""
        stroke = _STROKES[self.variant % len(_STROKES)]
        fill = _FILLS[(self.variant + self.variant // 12) % len(_FILLS)]  # 6 strokes and 4 fillings: 24 differ
        return {"color": self.colour, "marker": self.marker, "markersize": 8 if self.marker == "*" else 5.5,
                "linewidth": 1.5, "linestyle": stroke, "fillstyle": fill}  # fmt: skip

    @property
    def ink(self) -> str:
        """The colour of its name: darkened, so that it can be read on white."""
        red, green, blue = to_rgb(self.colour)
        return to_hex((0.62 * red, 0.62 * green, 0.62 * blue))


def looks(recipes: Sequence[str]) -> list[Look]:
    """The looks of the recipes of one picture, by name: a family's recipes are its variants, in their order."""
    seen: Counter[tuple[str, str]] = Counter()
    own = [name for name in dict.fromkeys(map(family, recipes)) if name not in families()]
    found = []
    for name in map(family, recipes):
        colour, marker = families()[name] if name in families() else OWN[own.index(name) % len(OWN)]
        found.append(Look(colour, marker, seen[colour, marker]))
        seen[colour, marker] += 1
    return found
