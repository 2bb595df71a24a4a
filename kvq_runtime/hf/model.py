"""Read from a loaded model what a cache asks of it: its shape, its fingerprint, the rotation in use."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvq_runtime.artifact import fingerprint
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops.rope import Rotary


def geometry_of(model: PreTrainedModel) -> Geometry:
    """The shape of a loaded model's cache."""
    return Geometry.from_config(model.config.get_text_config(decoder=True).to_dict())


def fingerprint_of(model: PreTrainedModel) -> fingerprint.Fingerprint:
    """The fingerprint of a loaded model: shape, RoPE, and a probe of its key and value projections."""
    attention = attention_modules(model)

    def weight(layer: int, name: str) -> Tensor:
        return getattr(attention[layer], name).weight.detach()

    return fingerprint.from_config(model.config.get_text_config(decoder=True).to_dict(), weight)


def rotary_of(module: nn.Module | None, cos_sin: tuple[Tensor, Tensor], positions_BT: Tensor) -> Rotary:
    """The model's rotation, checked against the cos that this forward pass uses."""
    if module is None or not hasattr(module, "inv_freq"):
        raise RuntimeError("the model has no rotary embedding with inv_freq; use a post-RoPE recipe without a mean")
    cos = cos_sin[0]
    frequencies_K = torch.as_tensor(module.inv_freq).float()
    turning = Rotary(frequencies_K, float(getattr(module, "attention_scaling", 1.0)), cos.dtype)
    if positions_BT.shape[-1] > 1:
        expected = turning.tables(positions_BT)[0]
        given = cos[..., : expected.shape[-1]].expand_as(expected)
        if not torch.allclose(given.float(), expected.float(), rtol=0, atol=2**-6):
            raise RuntimeError(
                "the cos in use is not that of the model's inv_freq and positions; use a post-RoPE recipe"
            )
    return turning


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The attention module of every layer."""
    return [layer.self_attn for layer in model.get_decoder().layers]  # type: ignore[union-attr]
