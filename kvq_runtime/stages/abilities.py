"""Say what only some stages can do: one that has the methods of a protocol is asked, any other is served without.

Consumers ask for the ability, as in `isinstance(quantize, ScaledLookup)`, and never for a class.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops.rotation import Rotation
from kvq_runtime.stages.stage import Fields, Tensors


@runtime_checkable
class LinearPrediction(Protocol):
    """A predictor whose prediction is z W + b, so that attention may multiply it into the query."""

    def matrix(self, tensors: Tensors, inputs: int) -> Tensor:
        """W, [inputs, width]; b is the tensor "bias"."""
        ...


@runtime_checkable
class ScaledLookup(Protocol):
    """A quantizer whose field `scale` a codec multiplies with after the rotation back, if that stays inside groups."""

    def lookup(self, fields: Fields, width: int, geometry: Geometry) -> Tensor:
        """Elements [N, R, V], bfloat16, without the scale of their group."""
        ...


class PackedCodes(NamedTuple):
    """A quantizer's codes, to attend to without decoding: x = scale_g · y + low_g for the elements of group g.

    group   elements of a group
    read    packed codes → y, float32, the elements of each row in `order`
    ends    fields → (scale [..., groups], low [..., groups] or None for 0)
    order   the natural place, inside a run that repeats, of each element that `read` gives; None: stored order
    """

    group: int
    read: Callable[[Tensor], Tensor]
    ends: Callable[[Fields], tuple[Tensor, Tensor | None]]
    order: Tensor | None = None


@runtime_checkable
class ReadPacked(Protocol):
    """A quantizer whose blocks the torch path attends to without decoding them."""

    def packed(self, width: int, geometry: Geometry, device: torch.device) -> PackedCodes:
        """The reader of its codes."""
        ...


@runtime_checkable
class SingleTokens(Protocol):
    """A quantizer that decodes single tokens of a scheme per token out of fields that do not begin with the token."""

    def at(self, fields: Fields, block_N: Tensor, token_N: Tensor, block: int, width: int, tensors: Tensors) -> Tensor:
        """One token in each of these blocks, of `block` tokens, from fields [blocks, ...]: [N, V], as `decode`."""
        ...


@runtime_checkable
class Searching(Protocol):
    """A quantizer whose encoding may take a search: fits that only read what is decoded have a stand-in."""

    @property
    def searches(self) -> bool:
        """True if encoding takes a search under these settings."""
        ...

    def approximated(
        self, x_NRW: Tensor, rotation: Rotation, tensors: Tensors, geometry: Geometry, level_NT: Tensor | None = None
    ) -> Tensor:
        """Return other numbers than encoding and decoding would give, with errors of the same moments: [N, R, V].

        level_NT   how much errors of tokens count, of a quantizer that weighs them
        """
        ...


@runtime_checkable
class Weighing(Protocol):
    """A quantizer that may weigh errors of tokens by how much these matter."""

    @property
    def weighed(self) -> bool:
        """True if it does under these settings."""
        ...

    def importance(self, x_NTC: Tensor, tensors: Tensors) -> Tensor:
        """Levels of how much errors of tokens count, int8 [N, T], from their rows about the mean."""
        ...

    def encode_weighed(
        self, x_NTC: Tensor, level_NT: Tensor | None, rotation: Rotation, tensors: Tensors, geometry: Geometry
    ) -> dict[str, Tensor]:
        """`Quantizer.encode`, of tokens whose errors count so much; None: alike."""
        ...
