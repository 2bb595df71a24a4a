"""Put stages together: a Scheme stores the keys, or the values, of a layer; a Site says where a stage is used."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from kvq_runtime.geometry import Geometry, Role, Window
from kvq_runtime.stages.stage import (
    SLOTS,
    Axis,
    Correction,
    Feedback,
    Inputs,
    Predictor,
    Quantizer,
    Rotation,
    Specs,
    Stage,
)


@dataclass(frozen=True)
class Scheme:
    """The storage of the keys, or of the values, of a layer.

    quantize  the rounding
    predict   what is subtracted first, or None
    rotate    the rotation of what is left, or None
    feedback  what the error of channels rounded before moves in those after, or None; of keys
    correct   what is stored beside the rounding to reduce its error, or None
    axis      "token": groups are channels of one token; "channel": groups are tokens of one channel, inside a block
    """

    quantize: Quantizer
    predict: Predictor | None = None
    rotate: Rotation | None = None
    feedback: Feedback | None = None
    correct: Correction | None = None
    axis: Axis = "token"

    @property
    def stages(self) -> Iterator[tuple[str, Stage]]:
        """(slot, stage) of those it has, in the order in which they are fitted and encode."""
        for slot in SLOTS:
            if getattr(self, slot) is not None:
                yield slot, getattr(self, slot)

    @property
    def fitted(self) -> bool:
        """True if any stage has tensors of a fit."""
        return any(stage.fitted for _, stage in self.stages)

    @property
    def cross_layer(self) -> bool:
        """True if it is predicted from other decoded tensors."""
        return self.predict is not None and self.predict.cross_layer

    def inputs(self, layer: int, role: Role) -> Inputs:
        """Return the inputs of this layer's prediction."""
        return Inputs() if self.predict is None else self.predict.inputs(layer, role)

    def predictor(self, layer: int, role: Role) -> Predictor | None:
        """The predictor of this layer: with nothing underneath to predict from, the mean."""
        return None if self.predict is None else self.predict.in_layer(layer, role)

    def width(self, block: int, geometry: Geometry) -> int:
        """W: elements of a row that is rounded."""
        return geometry.width if self.axis == "token" else block

    def fields(self, block: int, geometry: Geometry, dtype: torch.dtype = torch.bfloat16) -> Specs:
        """Names, shapes and dtypes of one encoded block of so many tokens; `dtype` is the model's."""
        rows, width = (block, geometry.width) if self.axis == "token" else (geometry.width, block)
        stored = self.quantize.fields(rows, width, geometry, dtype)
        return stored if self.correct is None else stored | self.correct.fields(block, geometry)

    def memory_kinds(self, block: int, geometry: Geometry) -> dict[str, str]:
        """The kind of each field of an encoded block in a memory report."""
        correct, kinds = self.correct, {name: self.quantize.memory_kind(name) for name in self.fields(block, geometry)}
        own = {} if correct is None else {name: correct.memory_kind(name) for name in correct.fields(block, geometry)}
        return kinds | own

    def bits(self, block: int, geometry: Geometry, dtype: torch.dtype = torch.bfloat16) -> float:
        """Return the bits of a stored element: codes and everything stored beside them, without fitted tensors."""
        fields = self.fields(block, geometry, dtype).values()
        return 8 * sum(math.prod(shape) * kind.itemsize for shape, kind in fields) / (block * geometry.width)

    def tensors(self, site: Site, geometry: Geometry) -> Specs:
        """The tensors of a fit for all its stages: {"predict.weight": (shape, dtype), ...}."""
        stages = dict(self.stages)
        if self.predict is not None:
            stages["predict"] = self.predict.in_layer(site.layer, site.role)
        return {
            f"{slot}.{name}": spec
            for slot, stage in stages.items()
            for name, spec in stage.tensors(site, geometry).items()
        }


@dataclass(frozen=True)
class Site:
    """The place where a stage is used.

    scheme     the Scheme that it is part of
    role       "key" or "value"
    layer      the layer; 0 before the model is known
    position   "pre": keys are encoded as they are before RoPE · "post": as the model caches them
    window     of the recipe
    geometry   of the model, once it is known
    """

    scheme: Scheme
    role: Role
    layer: int
    position: Literal["pre", "post"]
    window: Window
    geometry: Geometry | None = None
