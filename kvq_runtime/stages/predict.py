"""Predict a layer's keys or values, so that only what could not be predicted is stored.

Every predictor first removes the scheme's calibrated mean μ (for keys the mean before RoPE; after RoPE, position t has
mean R_t μ). Decoded tensors are passed from layer to layer centred, too, so a prediction is

    mean       x̂ = μ
    bias       x̂ = b, the bias of the model's k_proj, which is not fitted (`kvq_runtime/codec/key_bias.py`)
    linear     x̂ = μ + z W + b                z = the inputs, side by side
    low rank   x̂ = μ + (z A) U + b
    MLP        x̂ = μ + gelu(norm(z) W₁ + b₁) W₂ + b

Inputs z of keys: the decoded keys of the layers `below`; of values: this layer's decoded keys (if `keys`), then the
decoded values of the layers `below`. With `both`, the other of the two follows: for keys the decoded values of the
layers `below`, for values their decoded keys. A layer with too few layers underneath predicts its mean.

Source: Shutova et al., 2025 (AQUA-KV), algorithm 1 and tables 1 and 9.
Differs: the mean is removed also where nothing is underneath; inputs are [keys, values below] in this order, as in the
authors' code (the paper writes the reverse). The paper reads no values for keys, and no keys below for values (`both`),
and has no layers that slide over a window: no prediction goes through these, and the layer below is the next one below
that attends to all tokens.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Role
from kvq_runtime.ops import product, rtn
from kvq_runtime.stages.stage import Inputs, Predictor, Site, Specs, Tensors

DEPTHS = range(1, 9)  # of layers that a prediction can read, below its own


@dataclass(frozen=True)
class Mean(Predictor):
    """Predict the calibrated mean: the cheapest predictor, free at decode."""

    kind: ClassVar[str] = "mean"

    def check_prompt_fit(self) -> None:
        """Allow it: any tokens have a mean."""

    def specs(self, inputs: int, width: int) -> Specs:
        return {"mean": ((width,), torch.float32)}


@dataclass(frozen=True)
class Bias(Mean):
    """Predict the bias of the model's `k_proj`, as the mean of keys: it needs no calibration."""

    kind: ClassVar[str] = "bias"
    fitted: ClassVar[bool] = False
    of_model: ClassVar[bool] = True

    def check(self, site: Site) -> None:
        if site.role != "key":
            raise ValueError("predict=bias is of keys alone; drop it from values")


@dataclass(frozen=True)
class Neighbours(Predictor):
    """Predict from decoded neighbours.

    below   which layers underneath are inputs: 1 is the next one down
    keys    values only: this layer's decoded keys are inputs too
    storage "bf16", or "gptq4": 4-bit codes rounded against the Gram matrix of the inputs
    fit     "decoded": on the inputs that inference will see (quantizer-specific); "clean": on exact ones (agnostic)
    ridge   added to the diagonal of the inputs' covariance, relative to its mean
    both    of the layers below, values are inputs of keys, and keys of values, too
    """

    cross_layer: ClassVar[bool] = True
    below: tuple[int, ...] = (1,)
    keys: bool = True
    storage: Literal["bf16", "gptq4"] = "bf16"
    fit: Literal["decoded", "clean"] = "decoded"
    ridge: float = 1e-3
    both: bool = False

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "below", tuple(self.below))
        if len(set(self.below)) != len(self.below) or not {*self.below} <= {*DEPTHS}:
            raise ValueError(f"below={list(self.below)}; inputs come from 1 to {DEPTHS[-1]} layers below, each once")
        if not self.below and not self.keys:
            raise ValueError("a linear prediction without inputs; use predict=mean")
        if self.both and not self.below:
            raise ValueError("both=True reads keys and values of layers below; name them in below, as (1,)")
        if not 0 <= self.ridge < 1:
            raise ValueError(f"ridge={self.ridge}; use at least 0 and less than 1")

    def inputs(self, layer: int, role: Role) -> Inputs:
        below = tuple(depth for depth in self.below if depth <= layer)
        keys = role == "value" and self.keys and bool(below or not self.below)
        return Inputs(keys, below, self.both and bool(below))

    @property
    def fitted_on_exact(self) -> bool:
        return self.fit == "clean"

    def in_layer(self, layer: int, role: Role) -> Predictor:
        return self if self.inputs(layer, role).tokens else Mean()

    def check_prompt_fit(self) -> None:
        raise ValueError(f"{self.kind} needs calibration; fit a mean to the prompt, or nothing")


@dataclass(frozen=True)
class Linear(Neighbours):
    """Predict linearly."""

    kind: ClassVar[str] = "linear"

    def specs(self, inputs: int, width: int) -> Specs:
        if self.storage == "bf16":
            return _means(width) | {"weight": ((inputs, width), torch.bfloat16)}
        return _means(width) | rtn.matrix_specs(inputs, width)

    def apply(self, z_NTI: Tensor, tensors: Tensors) -> Tensor:
        """Return the centred prediction, in the dtype of the inputs."""
        return _affine(z_NTI, self.matrix(tensors, z_NTI.shape[-1]), tensors["bias"])

    def matrix(self, tensors: Tensors, inputs: int) -> Tensor:
        """W, [inputs, width], unpacked if it is stored in 4 bits."""
        return tensors["weight"] if "weight" in tensors else rtn.matrix(tensors, inputs)


@dataclass(frozen=True)
class LowRank(Linear):
    """Predict through `rank` directions: reduced-rank regression on centred data.

    Source: Reinsel and Velu, 1998; AQUA-KV uses rank 256.
    Differs: AQUA-KV's code does not centre the inputs, so its bias is wrong wherever their mean is not zero.
    """

    kind: ClassVar[str] = "low_rank"
    rank: int = 256

    def __post_init__(self):
        super().__post_init__()
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}; use at least 1")
        if self.storage != "bf16":
            raise ValueError(f'storage={self.storage!r}; a low-rank prediction is stored in "bf16"')

    def specs(self, inputs: int, width: int) -> Specs:
        rank = min(self.rank, inputs, width)
        return _means(width) | {"down": ((inputs, rank), torch.bfloat16), "up": ((rank, width), torch.bfloat16)}

    def apply(self, z_NTI: Tensor, tensors: Tensors) -> Tensor:
        inner = product.matmul(z_NTI, tensors["down"])
        return _affine(inner, tensors["up"], tensors["bias"])

    def matrix(self, tensors: Tensors, inputs: int) -> Tensor:
        return tensors["down"].float() @ tensors["up"].float()


@dataclass(frozen=True)
class MLP(Neighbours):
    """Predict by two layers: the paper's reference point, too costly to serve.

    norm     "layer": the inputs are layer-normalized; "none": the paper's variant without
    hidden   width between the two layers: "inputs", twice the inputs, so that values, with twice the inputs of keys,
             have 4 C; "width", 2 C for keys and values both, which gives the paper's 540 MiB (Llama 3.2 3B)
    tokens   it is fitted to: a "sample" of 4096, too few for the weights of a large model; "all", in batches
    """

    kind: ClassVar[str] = "mlp"
    norm: Literal["layer", "none"] = "layer"
    hidden: Literal["inputs", "width"] = "inputs"
    tokens: Literal["sample", "all"] = "sample"

    def __post_init__(self):
        super().__post_init__()
        if self.storage != "bf16":
            raise ValueError(f'storage={self.storage!r}; this prediction is stored in "bf16"')

    def hidden_size(self, inputs: int, width: int) -> int:
        """Channels between the two layers."""
        return 2 * (inputs if self.hidden == "inputs" else width)

    def specs(self, inputs: int, width: int) -> Specs:
        wide = self.hidden_size(inputs, width)
        return _means(width) | {
            "hidden": ((inputs, wide), torch.bfloat16),
            "hidden_bias": ((wide,), torch.float32),
            "out": ((wide, width), torch.bfloat16),
        }

    def apply(self, z_NTI: Tensor, tensors: Tensors) -> Tensor:
        if self.norm == "layer":
            z_NTI = torch.nn.functional.layer_norm(z_NTI, z_NTI.shape[-1:])
        hidden = _affine(z_NTI, tensors["hidden"], tensors["hidden_bias"])
        hidden = torch.nn.functional.gelu(hidden)
        return _affine(hidden, tensors["out"], tensors["bias"])


def _means(width: int) -> Specs:
    """Of what is predicted, and of what is left: their tensors."""
    return {"mean": ((width,), torch.float32), "bias": ((width,), torch.float32)}


def _affine(z_NTI: Tensor, weight_IO: Tensor, bias_O: Tensor) -> Tensor:
    flat = product.addmm(bias_O.to(z_NTI.dtype), z_NTI.flatten(0, -2), weight_IO)
    return flat.view(*z_NTI.shape[:-1], flat.shape[-1])
