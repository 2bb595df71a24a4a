"""Say what a recipe states of a policy: a choice about tokens, as settings that JSON can hold.

What a cache makes of it, the choice at work, is in `kvq_runtime/policies/policy.py`, whose folder is read only where a
recipe's JSON names a policy: a class is found there by its `kind`, as stages are, or beside the recipes of its method.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

from kvq_runtime.geometry import Geometry, Role, Window
from kvq_runtime.stages.kinds import classes_in


@dataclass(frozen=True)
class PolicySetting(ABC):
    """A policy's settings in a recipe.

    kind               its name in JSON, unique among policies
    slot               the choice that it makes, of which a recipe has one policy at most: "window" (how long tokens
                       stay exact), "select" (which are held, or read), "online" (what the cache fits), or its own
    arrival_dependent  whether blocks depend on how tokens arrive
    fits_prompt        whether it fits the recipe's stages to each row's own tokens, in place of a calibration
    chooses_by_query   whether queries choose what is read: under another attention than ours, all tokens are read
    waits_for_fit      whether blocks may wait until what they are encoded with is fitted to the prompt
    unpacked           why the decode kernel cannot read the blocks of a cache that has it; None: it can
    """

    kind: ClassVar[str]
    slot: ClassVar[str]
    arrival_dependent: ClassVar[bool] = False
    fits_prompt: ClassVar[bool] = False
    chooses_by_query: ClassVar[bool] = False
    waits_for_fit: ClassVar[bool] = False
    unpacked: ClassVar[str | None] = None

    @abstractmethod
    def policy(self, cache: Any) -> Any:
        """Return the `Policy` of one cache, of which it is given the `CacheParts`."""

    def check(self, recipe: Any, geometry: Geometry | None) -> None:
        """Raise a ValueError, a sentence, if the recipe cannot have it; `geometry` once the model is known."""
        if self.slot == "select" and recipe.policy("window") is not None:
            raise ValueError("tokens are selected behind a fixed window; drop select, or window")

    def needs(self, recipe: Any) -> frozenset[str]:
        """Its inputs beside keys and values: "positions" (with cos and sin), "queries", "attention"."""
        return frozenset()

    def most(self, recent: int, block: int) -> int:
        """Return the most tokens of the window that it keeps exact, of `recent` that the recipe keeps itself."""
        return recent

    def held_share(self) -> float:
        """Return the share of the tokens seen that is held, of a long text, at most 1; 0: a fixed number."""
        return 1.0

    def chosen(self, tokens: int, window: Window) -> tuple[int, int] | None:
        """Of `tokens` tokens that a row has seen: (blocks of them that it holds encoded, tokens that it holds exact),
        of a policy that evicts some; None: what is behind the window is all encoded."""
        return None

    def held_bytes(self, geometry: Geometry, tokens: int, window: Window, dtype: torch.dtype) -> dict[str, int]:
        """Count the bytes that it holds for each row of `tokens` tokens, by kind."""
        return {}

    def extra_bits(self, role: Role, dtype: torch.dtype) -> float:
        """Bits that it stores beside each encoded element of keys or values; `dtype` is the model's."""
        return 0.0


@cache
def policy_kinds() -> dict[str, type]:
    """Return the settings of all policies there are, those of one method alone beside its recipes: kind → class."""
    classes = classes_in(("kvq_runtime.policies", "kvq_runtime.recipes"), PolicySetting)
    return {cls.kind: cls for cls in classes}
