"""Carry what one layer hands to the next, as one tensor: whoever stores, splits or differentiates hidden states need
not know what is in it.

    [B, T, S · E + n · P]      S streams side by side, then the inputs by layer of the n layers that follow

Most models have one stream, their hidden states, and no inputs by layer. Gemma 3n has several (AltUp), of which the
first goes through attention and MLP; there, and in Gemma 4's E2B and E4B, a token has an embedding for each layer,
which that layer alone reads. Both are made under the first layer, of the token and its embedding.

E = hidden width · P = width of an input by layer.
"""

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TABLE = "embed_tokens_per_layer"  # the decoder's table of inputs by layer
ENTRY = ("altup_projections", "per_layer_model_projection", "per_layer_projection_norm")  # its modules under the layers
EXIT = "altup_unembed_projections"  # above them, beside the last norm


@dataclass(frozen=True)
class Carried:
    """The parts of what is carried: `layers` of the model, `streams` and `inputs` as S and P above."""

    hidden: int
    layers: int
    streams: int = 1
    inputs: int = 0

    @staticmethod
    def of(config: Mapping[str, Any]) -> "Carried":
        """Those of a model, from its configuration with transformers' defaults."""
        own = config.get("hidden_size_per_layer_input") or 0
        return Carried(config["hidden_size"], config["num_hidden_layers"], config.get("altup_num_inputs") or 1, own)

    @property
    def width(self) -> int:
        """Numbers of a token under the first layer, where they are the most."""
        return self.streams * self.hidden + self.layers * self.inputs

    def pack(self, h: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """One tensor of hidden states, [B, T, E] or of streams [S, B, T, E], and inputs [B, T, P] of layers to come."""
        h_BTE = h.permute(1, 2, 0, 3).flatten(2) if self.streams > 1 else h
        return torch.cat([h_BTE, *inputs], -1) if inputs else h_BTE

    def unpack(self, packed_BTE: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The parts of one tensor again, as `pack` takes them."""
        states = self.streams * self.hidden
        inputs = packed_BTE[..., states:].split(self.inputs, -1) if packed_BTE.shape[-1] > states else ()
        h = packed_BTE[..., :states] if inputs else packed_BTE
        if self.streams > 1:
            h = h.unflatten(-1, (self.streams, self.hidden)).permute(2, 0, 1, 3).contiguous()
        return h, inputs

    def mute(self, core: Any) -> None:
        """Have a decoder make inputs by layer of zeros, as long as nobody reads them."""
        if hasattr(core, "get_per_layer_inputs"):
            core.get_per_layer_inputs = lambda *given: None
            core.project_per_layer_inputs = lambda embedded, *given: embedded.new_zeros(()).expand(
                *embedded.shape[:-1], self.layers, self.inputs
            )

    @contextmanager
    def muted(self, core: Any):
        """The same for a while."""
        self.mute(core)
        try:
            yield
        finally:
            for name in ("get_per_layer_inputs", "project_per_layer_inputs"):
                vars(core).pop(name, None)


def blank(module: nn.Module) -> nn.Module:
    """What does nothing in a module's place, or in the place of each of a list."""
    return nn.ModuleList(nn.Identity() for _ in module) if isinstance(module, nn.ModuleList) else nn.Identity()
