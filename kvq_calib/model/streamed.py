"""Run a model one decoder layer at a time, and hand out its keys, values and queries before RoPE.

The layers are transformers' own classes, built without memory and filled from the safetensors files when their turn
comes; keys and queries are taken where the projection, or the QK-norm after it, puts them out. Hidden states are
those of the uncompressed model: a quantizer's error never enters the residual stream.

E = hidden width · V = vocabulary.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from kvq_calib.model.files import ModelFiles
from kvq_runtime.ops import product

TILE = 2048  # tokens


@dataclass(frozen=True)
class Projected:
    """One layer's keys, values and queries of a chunk, before RoPE, all heads side by side."""

    k_NTC: Tensor
    v_NTC: Tensor
    q_NTC: Tensor | None


@dataclass(frozen=True)
class Captured(Projected):
    """The same, and what the layer puts out."""

    h_BTE: Tensor


def joined(parts: Sequence[Projected]) -> Projected:
    """What the sequences of all parts have, one part after the other."""
    k, v, q = (
        [getattr(part, name) for part in parts if getattr(part, name) is not None]
        for name in ("k_NTC", "v_NTC", "q_NTC")
    )
    return Projected(torch.cat(k), torch.cat(v), torch.cat(q) if q else None)


class Stream:
    """A model of which the device holds one layer at a time.

    dtype   of weights and activations; None: `default_dtype`
    """

    def __init__(self, files: ModelFiles, device: str | torch.device = "cpu", dtype: torch.dtype | None = None):
        self.files, self.device = files, torch.device(device)
        self.dtype = default_dtype(files, self.device) if dtype is None else dtype
        config = files.transformers_config()
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=self.dtype).eval()
        rotary = type(self._model.model.rotary_emb)
        self._rotary = rotary(self._model.config).to(self.device)

    @property
    def layers(self) -> int:
        return self.files.geometry.layers

    @property
    def layer_bytes(self) -> int:
        """Return the bytes of the largest layer on the device."""
        return max(sum(map(_bytes, layer.parameters())) for layer in self._model.model.layers)

    @torch.no_grad()
    def embed(self, tokens_BT: Tensor) -> Tensor:
        """The hidden states under the first layer. Of the table, which stays in the file, only these rows are read."""
        rows = self.files.rows("model.embed_tokens.weight", tokens_BT.cpu().long())
        return rows.to(self.device, self.dtype)

    def layer(self, index: int) -> "Layer":
        """Load one decoder layer. Drop it before the next is loaded."""
        start = f"model.layers.{index}."
        weights = {name: start + name for name in self.files.layer_names(index)}
        return Layer(self._filled(self._model.model.layers[index], weights), self)

    def __reduce__(self):
        return opened, (self.files, self.device, self.dtype)

    def head(self) -> "Head":
        """Load the last norm and the output head."""
        tied = "lm_head.weight" not in self.files.names
        output = "model.embed_tokens.weight" if tied else "lm_head.weight"
        norm = self._filled(self._model.model.norm, {"weight": "model.norm.weight"})
        return Head(norm, self._filled(self._model.lm_head, {"weight": output}))

    @torch.no_grad()
    def rope(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions 0 to tokens - 1, [1, T, K] each, float32, scaling included."""
        cos, sin = self._positions(tokens, torch.float32)
        half = cos.shape[-1] // 2  # transformers repeats them for both halves of a head
        return cos[..., :half].contiguous(), sin[..., :half].contiguous()

    def _positions(self, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        positions = torch.arange(tokens, device=self.device)[None]
        return self._rotary(torch.empty(0, dtype=dtype, device=self.device), positions)

    def _filled(self, empty: nn.Module, weights: dict[str, str]) -> nn.Module:
        """The module with weights of its own; `weights` names the tensor of each parameter."""
        module = copy.deepcopy(empty)
        copies = {name: self.files.copied(stored, self.device, self.dtype) for name, stored in weights.items()}
        try:
            module.load_state_dict(copies, assign=True)
        except RuntimeError as error:
            raise ValueError(f"the weights of {self.files.id} do not fit its config.json: {error}") from error
        return module.requires_grad_(False)


class Layer:
    """One decoder layer on the device."""

    def __init__(self, module: Any, stream: Stream):
        module.mlp = Tiled(module.mlp)
        self._module, self._stream = module, stream
        seen: dict[str, Tensor] = {}
        attention = module.self_attn
        taps = {"k": getattr(attention, "k_norm", attention.k_proj), "v": attention.v_proj,
                "q": getattr(attention, "q_norm", attention.q_proj)}  # fmt: skip
        for name, tap in taps.items():
            # the hook knows `seen`, not `self`: a cycle would keep the weights until the next garbage collection
            tap.register_forward_hook(lambda _module, _inputs, out, name=name: seen.__setitem__(name, out))
        self._seen = seen

    @torch.no_grad()
    def forward(self, h_BTE: Tensor, queries: bool = False) -> Captured:
        """Run the layer on whole sequences, causally, from position 0."""
        h_BTE = self._given(h_BTE)
        turns = self._stream._positions(h_BTE.shape[1], self._stream.dtype)
        # without a mask, transformers' sdpa is causal
        out = self._module(h_BTE, attention_mask=None, position_embeddings=turns, past_key_values=None, use_cache=False)
        k, v, q = (self._seen.pop(name).flatten(2) for name in "kvq")
        return Captured(k, v, q if queries else None, out)

    def gradients(self, h_BTE: Tensor, above_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Carry a gradient with respect to the layer's output below it.

        Returns those with respect to the hidden states, the keys before RoPE and the values, [B, T, C] the last two.
        """
        h_BTE = self._given(h_BTE).requires_grad_()
        turns = self._stream._positions(h_BTE.shape[1], self._stream.dtype)
        with torch.enable_grad():
            out = self._module(
                h_BTE, attention_mask=None, position_embeddings=turns, past_key_values=None, use_cache=False
            )
            seen = {name: self._seen.pop(name) for name in "kvq"}
            below, *pair = torch.autograd.grad(out, (h_BTE, seen["k"], seen["v"]), self._given(above_BTE))
        key, value = (gradient.flatten(2) for gradient in pair)
        return below, key, value

    @torch.no_grad()
    def project(self, h_BTE: Tensor, queries: bool = False) -> Projected:
        """Return what `forward` returns beside the output, without attention and MLP, for a last layer."""
        attention, x_BTE = self._module.self_attn, self._module.input_layernorm(self._given(h_BTE))

        def heads(name: str) -> Tensor:
            out = getattr(attention, f"{name}_proj")(x_BTE)
            norm = getattr(attention, f"{name}_norm", None)
            return out if norm is None else norm(out.unflatten(-1, (-1, attention.head_dim))).flatten(2)

        found = Projected(heads("k"), heads("v"), heads("q") if queries else None)
        self._seen.clear()
        return found

    def _given(self, h_BTE: Tensor) -> Tensor:
        return h_BTE.to(self._stream.device, self._stream.dtype)


class Tiled(nn.Module):
    """An MLP at work on TILE tokens at a time: inside it they are several times as wide as outside."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.mlp = mlp

    def forward(self, h_BTE: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # nothing is written into what a gradient goes through
            return torch.cat([self.mlp(tile) for tile in h_BTE.flatten(0, 1).split(TILE)]).view(h_BTE.shape)
        out_BTE = torch.empty_like(h_BTE)
        for tile, out in zip(h_BTE.flatten(0, 1).split(TILE), out_BTE.flatten(0, 1).split(TILE), strict=True):
            out.copy_(self.mlp(tile))
        return out_BTE


class Head:
    """The last norm and the output head on the device."""

    def __init__(self, norm: nn.Module, output: nn.Module):
        self._norm, self._output = norm, output

    @torch.no_grad()
    def __call__(self, h_BTE: Tensor) -> Tensor:
        """Logits, [B, T, V], in the dtype of the stream."""
        return self._output(self._norm(h_BTE))

    def gradient(self, h_TE: Tensor, uniform_T2: Tensor) -> Tensor:
        """∂/∂h Σ (log p(y) - log p(y')) / √2, y and y' the tokens at which the running sum of p passes `uniform`.

        With respect to the logits that is 1 at y and -1 at y', over √2: p cancels, and no graph goes through them.
        """
        h_TE = h_TE.detach().requires_grad_()
        with torch.enable_grad():
            normed_TE = self._norm(h_TE)
        running_TV = self._output(normed_TE.detach()).float().softmax(-1).cumsum(-1)
        drawn_T2 = torch.searchsorted(running_TV, uniform_T2 * running_TV[:, -1:])
        rows_VE = self._output.get_parameter("weight")
        first_TE, second_TE = rows_VE[drawn_T2.clamp(max=len(rows_VE) - 1)].unbind(1)
        return torch.autograd.grad(normed_TE, h_TE, (first_TE - second_TE) / 2**0.5)[0]


_opened: dict[tuple, Stream] = {}


def opened(files: ModelFiles, device: torch.device, dtype: torch.dtype) -> Stream:
    """Open a Stream's model in another process, and keep it until another one is needed."""
    key = files.path, device, dtype
    if key not in _opened:
        _opened.clear()
        _opened[key] = Stream(files, device, dtype)
    return _opened[key]


def default_dtype(files: ModelFiles, device: torch.device) -> torch.dtype:
    """The weights' own dtype, which the served model has too; on a CPU float32, unless it multiplies bfloat16 natively.

    Native bfloat16 is 1.7 times as fast as float32, and its noise in keys and values (4e-5 of their variance on the
    demo model) is far below a 4-bit quantizer's 8e-3.
    """
    if device.type == "cpu" and not (files.dtype == torch.bfloat16 and product.multiplies_bfloat16()):
        return torch.float32
    return files.dtype


def _bytes(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()
