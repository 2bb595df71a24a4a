"""The contract of a stage: the questions every part of a quantizer answers, so that callers need not know its class.

    predict → rotate → feedback, quantize → correct        a Scheme: how the keys, or the values, of a layer are stored

A stage is a frozen dataclass of settings that JSON can hold, with a `kind` that names it there. What is fitted for it
are tensors, named and shaped by `tensors`; they come as arguments. Five base classes say what each part does, with a
default for what only some stages can do; a new stage is a class in a file of this folder, and is found there by its
kind (`kinds.py`).

Shapes: N blocks · R rows of a block, W elements of a row: a row is a token, W = C, where a scheme works per token, and
a channel, W = the tokens of a block, where it works per channel · V decoded elements of a row, in stored order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from kvq_runtime.geometry import ROLES, Geometry, Role, Window
from kvq_runtime.ops.pack import PackedCodes
from kvq_runtime.ops.rotation import Rotation as Turn

SLOTS = ("predict", "rotate", "quantize", "feedback", "correct")

Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]  # name → shape and dtype
Tensors = Mapping[str, Tensor]
Fields = Mapping[str, Tensor]
Queries = Literal["after", "before"]  # RoPE
Axis = Literal["token", "channel"]
Rounded = Callable[[Tensor], Tensor]  # rows encoded and decoded
InputTensor = tuple[int, Role]  # of a decoded tensor: how many layers below, 0 for this one, and keys or values
NOTHING: Tensors = MappingProxyType({})


@cache
def setting_types(cls: Any) -> dict[str, Any]:
    """Return the settings of a stage and their annotated types."""
    hints = get_type_hints(cls)
    return {setting.name: hints[setting.name] for setting in fields(cls)}


@dataclass(frozen=True)
class Stage(ABC):
    """One part of a quantizer.

    kind      its name in JSON, unique among the stages of its slot
    slot      the part of a Scheme that it is: "predict", "rotate", "quantize", "feedback" or "correct"
    fitted    whether it has tensors that are fitted to a model; to what, its fit says
    optional  settings that JSON names only where they are not the default, as files written before them do
    """

    kind: ClassVar[str]
    slot: ClassVar[str]
    fitted: ClassVar[bool] = False
    optional: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        """Raise a ValueError where a setting is none of the choices that its type, a Literal, names."""
        for name, kind in setting_types(type(self)).items():
            if get_origin(kind) is Literal and getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name}={getattr(self, name)!r}; use one of {get_args(kind)}")

    def tensors(self, site: Site, geometry: Geometry) -> Specs:
        """Return the tensors of a fit at this site: {name: (shape, dtype)}. Empty for a stage that is not fitted."""
        return {}

    def check(self, site: Site) -> None:  # noqa: B027
        """Raise a ValueError, a sentence, if it cannot be used there; its own settings are checked when it is made."""

    def check_prompt_fit(self) -> None:
        """Raise a ValueError unless the tokens of one row are enough to fit the stage to."""
        if self.fitted:
            raise ValueError(f"{self.kind} needs calibration; drop it, or the fit to the prompt")


class Inputs(NamedTuple):
    """The inputs of the prediction of a layer's keys, or of its values.

    keys    this layer's decoded keys; for values
    below   the depths of the layers below whose decoded keys, for keys, or values, for values, it reads
    both    whether it reads the other of the two there, too
    """

    keys: bool = False
    below: tuple[int, ...] = ()
    both: bool = False

    @property
    def tokens(self) -> int:
        """The number of tensors, each as wide as a token, side by side."""
        return self.keys + len(self.below) * (1 + self.both)

    def tensors(self, role: Role) -> list[InputTensor]:
        """Return the depth below this layer, 0 for itself, and the role of each tensor, in order."""
        other: Role = ROLES[1 - ROLES.index(role)]
        roles = (role, other) if self.both else (role,)
        keys: list[InputTensor] = [(0, "key")] if self.keys else []
        return keys + [(depth, role) for role in roles for depth in self.below]


class Predictor(Stage):
    """A prediction that is subtracted from keys or values before they are rotated and rounded: a mean at least.

    cross_layer   whether it reads other decoded tensors, so that layers are encoded and decoded in order
    of_model      whether its tensors are the model's own, not those of a fit
    """

    slot = "predict"
    fitted = True
    cross_layer: ClassVar[bool] = False
    of_model: ClassVar[bool] = False

    @property
    def fitted_on_exact(self) -> bool:
        """True if it is fitted to exact inputs rather than to decoded ones, as inference will have them."""
        return False

    def inputs(self, layer: int, role: Role) -> Inputs:
        """Return its inputs in this layer."""
        return Inputs()

    def in_layer(self, layer: int, role: Role) -> Predictor:
        """Return the predictor of this layer: itself, or a simpler one where there is nothing to read."""
        return self

    def tensors(self, site: Site, geometry: Geometry) -> Specs:
        """Return the mean, and what the prediction is computed with."""
        return self.specs(geometry.width * self.inputs(site.layer, site.role).tokens, geometry.width)

    @abstractmethod
    def specs(self, inputs: int, width: int) -> Specs:
        """Return the same for so many input channels and channels of a token."""

    def apply(self, z_NTI: Tensor, tensors: Tensors) -> Tensor | None:
        """The centred prediction [N, T, C] from inputs side by side, in their dtype; None: only a mean is removed."""
        return None

    def matrix(self, tensors: Tensors, inputs: int) -> Tensor | None:
        """Return W [inputs, C] of a linear prediction z W + b, where b is the tensor "bias"; None: it is not linear."""
        return None


class Rotation(Stage):
    """A change of basis before rounding: x → x @ forward, and back after decoding.

    latents   whether it gives latent channels, in the order of what they carry, for a quantizer that takes those
    """

    slot = "rotate"
    latents: ClassVar[bool] = False

    @abstractmethod
    def size(self, width: int, geometry: Geometry) -> int:
        """Return how many elements of a row are rotated together. ValueError: rows of this width cannot be."""

    @abstractmethod
    def pair(self, width: int, geometry: Geometry, tensors: Tensors) -> tuple[Tensor, Tensor] | None:
        """(forward [size, V], back [V, size]); None as long as the tensors of a fitted one are not there."""

    def forward(self, width: int, geometry: Geometry) -> Turn:
        """Return the rotation for encoding, of one that is not fitted: its matrix, or a faster form."""
        pair = self.pair(width, geometry, NOTHING)
        return None if pair is None else pair[0]


class Quantizer(Stage):
    """The rounding: rows of a block in, packed fields out.

    keeps_dtype     whether it stores its input as it is, in the model's dtype
    takes_latents   whether it rounds latent channels, as `latent.Mixed`, so that a rotation that gives them comes first
    one_launch      whether a kernel rotates and rounds rows in one launch, if groups are rotated one by one
    kernel          which reader of the attention kernels reads its fields (`kernels/attend/layout.py`); None: none does
    has_lookup      whether `lookup` gives elements before the field `scale` multiplies them
    by_token        whether a token encoded alone, its rows tokens, has the fields that it has in its block: each field
                    begins with the token, and depends on no other one
    reads_tokens    whether `at` decodes single tokens though they are not encoded by token
    """

    slot = "quantize"
    keeps_dtype: ClassVar[bool] = False
    takes_latents: ClassVar[bool] = False
    one_launch: ClassVar[bool] = False
    kernel: ClassVar[str | None] = None
    has_lookup: ClassVar[bool] = False
    by_token: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False

    def check(self, site: Site) -> None:
        rotate = site.scheme.rotate
        if self.takes_latents != (rotate is not None and rotate.latents):
            raise ValueError("a basis and mixed bits belong together; give both, or neither")
        if self.fitted and site.scheme.axis != "token":
            raise ValueError(f'{self.kind} is fitted to tokens; use axis "token"')
        if site.geometry is not None:
            site.scheme.fields(site.window.block, site.geometry)

    @abstractmethod
    def fields(self, rows: int, width: int, geometry: Geometry, dtype: torch.dtype) -> Specs:
        """Return the fields of one block [rows, width]; `dtype` is the model's. Bits billed are the bytes of these.

        ValueError: rows of this width cannot be encoded."""

    @abstractmethod
    def encode(self, x_NRW: Tensor, rotation: Turn, tensors: Tensors, geometry: Geometry) -> dict[str, Tensor]:
        """Rotate and encode rows of any float dtype: the fields, [N, ...] each.

        rotation   None, a signed Hadamard, or a matrix: see `ops/rotation.py`
        """

    @abstractmethod
    def decode(
        self, fields: Fields, width: int, geometry: Geometry, tensors: Tensors = NOTHING, out: Tensor | None = None
    ) -> Tensor:
        """Decode fields [N, ...] to [N, R, V], float32 or bfloat16, in stored order (see `order`).

        out   a float32 [N, R, W] that may be decoded into; what is returned counts
        """

    def lookup(self, fields: Fields, width: int, geometry: Geometry) -> Tensor:
        """Look up elements [N, R, V], bfloat16, without the scale of their group."""
        raise NotImplementedError

    def packed(self, width: int, geometry: Geometry, device: torch.device) -> PackedCodes | None:
        """Return the reader by which attention takes blocks without decoding them; None: they are decoded."""
        return None

    def at(
        self, fields: Fields, block_N: Tensor, token_N: Tensor, block: int, geometry: Geometry, tensors: Tensors
    ) -> Tensor:
        """Decode one token in each of these blocks of `block` tokens, as `decode`: [N, V].

        Of a quantizer that is not `by_token`, its own."""
        tokens = {name: field[block_N, token_N][None] for name, field in fields.items()}
        return self.decode(tokens, geometry.width, geometry, tensors)[0]

    def order(self, width: int, geometry: Geometry) -> Tensor:
        """order[j] is the natural place in a row of the j-th decoded element, int64 [V]."""
        return torch.arange(self.stored(width))

    def stored(self, width: int) -> int:
        """V: how many elements of a row are stored."""
        return width

    def group_size(self, width: int, geometry: Geometry) -> Any:
        """Return the elements of a row that are rounded together, with one scale, as its setting `group` says; None: it
        has no groups."""
        group = getattr(self, "group", None)
        return None if group is None else geometry.group_size(group, width)


class Feedback(Stage):
    """Error feedback: moves the rounding error of some channels into those that follow; of keys alone.

    queries   which queries it is fitted to: "after" RoPE, or "before" it
    """

    slot = "feedback"
    fitted = True
    queries: Queries

    @abstractmethod
    def turn(self, axis: Axis, rotate: Rotation | None, geometry: Geometry) -> Tensor | None:
        """Return the rotation [D, D] of a head's channels between keys and rounding; None: there is none."""

    @abstractmethod
    def apply(self, x_NRW: Tensor, axis: Axis, geometry: Geometry, tensors: Tensors, rounded: Rounded) -> Tensor:
        """Return what to round in place of x."""


class Correction(Stage):
    """Fields stored beside the rounding, to reduce its error: outliers, low-rank factors."""

    slot = "correct"

    @abstractmethod
    def fields(self, block: int, geometry: Geometry) -> Specs:
        """Return the fields of a block beside the quantizer's."""

    def rest(self, x_NTC: Tensor) -> Tensor:
        """Return what the quantizer has to round."""
        return x_NTC

    @abstractmethod
    def encode(self, x_NTC: Tensor, rounded_NTC: Tensor, geometry: Geometry, tensors: Tensors) -> dict[str, Tensor]:
        """Its fields, [N, ...] each, for blocks x that the quantizer encodes and decodes to `rounded`, which may be
        overwritten."""

    @abstractmethod
    def apply(self, rounded_NTC: Tensor, fields: Fields) -> Tensor:
        """Correct decoded blocks, in the same tensor if it can be."""


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

    @property
    def by_token(self) -> bool:
        """True if a token encoded alone has the fields that it has in its block."""
        return self.quantize.by_token and self.axis == "token" and self.correct is None

    def inputs(self, layer: int, role: Role) -> Inputs:
        """Return the inputs of this layer's prediction."""
        return Inputs() if self.predict is None else self.predict.inputs(layer, role)

    def predictor(self, layer: int, role: Role) -> Predictor | None:
        """Return the predictor of this layer: with nothing underneath to predict from, the mean."""
        return None if self.predict is None else self.predict.in_layer(layer, role)

    def width(self, block: int, geometry: Geometry) -> int:
        """W: elements of a row that is rounded."""
        return geometry.width if self.axis == "token" else block

    def fields(self, block: int, geometry: Geometry, dtype: torch.dtype = torch.bfloat16) -> Specs:
        """Names, shapes and dtypes of one encoded block of so many tokens; `dtype` is the model's."""
        rows, width = (block, geometry.width) if self.axis == "token" else (geometry.width, block)
        stored = self.quantize.fields(rows, width, geometry, dtype)
        return stored if self.correct is None else stored | self.correct.fields(block, geometry)

    def bits(self, block: int, geometry: Geometry, dtype: torch.dtype = torch.bfloat16) -> float:
        """Return the bits of a stored element: codes and everything stored beside them, without fitted tensors."""
        fields = self.fields(block, geometry, dtype).values()
        return 8 * sum(math.prod(shape) * kind.itemsize for shape, kind in fields) / (block * geometry.width)

    def tensors(self, site: Site, geometry: Geometry) -> Specs:
        """Return the tensors of a fit for all its stages: {"predict.weight": (shape, dtype), ...}."""
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
    position   "pre": keys are encoded as they are before RoPE · "post": as the model caches them · "segment": turned
               back by the angle of the middle of their segment
    window     of the recipe
    geometry   of the model, once it is known
    """

    scheme: Scheme
    role: Role
    layer: int
    position: Literal["pre", "post", "segment"]
    window: Window
    geometry: Geometry | None = None
