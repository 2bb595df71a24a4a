"""A step of vLLM as a layer's attention reads it."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvq_runtime.vllm.tails import Step


@dataclass(frozen=True)
class Batch:
    """The requests of a step.

    starts   row of the first query of each, in the step's tokens
    counts   queries of each
    lengths  tokens of each in the cache, its queries among them, the newest
    table    physical page of each of its pages, int [requests, pages]; what lies beyond a length is anything
    entries  where its first tokens are kept exact, int64 [requests], -1: nowhere; None: nowhere for all
    tails    of pages that are encoded whole, what the step does with them; None: every token is encoded at once
    made     what a layer has made of this for the others
    """

    starts: Sequence[int]
    counts: Sequence[int]
    lengths: Sequence[int]
    table: Tensor
    entries: Tensor | None = None
    tails: Step | None = None
    made: dict[Hashable, Any] = field(default_factory=dict, compare=False)
