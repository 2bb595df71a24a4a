"""Run a model one decoder layer at a time, and hand out its keys, values and queries before RoPE.

A layer is what transformers calls one: its own class, built without memory, filled from the safetensors files when its
turn comes (`weights.py`), and called with transformers' own masks and the model's own rotations. Layers that slide over
a window, or recur, run with the next one above them that attends to all tokens, or else with the last.

Attention is a function of ours, which sees keys, values and queries by head; what it sees after RoPE is turned back, as
a cache does. Of the types in `TAPPED` keys and queries are taken where the projection, or the QK-norm after it, puts
them out, before any rounding of RoPE. Hidden states are those of the uncompressed model: a quantizer's error never
enters the residual stream.

E = hidden width · V = vocabulary.
"""

import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask, sdpa_mask

from kvq_calib.model.files import ModelFiles
from kvq_calib.model.weights import Weights
from kvq_runtime.families import ATTENTION, FULL, LAYERS, SLIDING, layer_types
from kvq_runtime.hf.attention import dense
from kvq_runtime.hf.model import CACHE, decoder_of, rotary_module
from kvq_runtime.ops import product, rope

CAPTURED = "kvq-captured"  # the attention of a streamed layer, by the name that transformers knows it by
TAPPED = ("llama", "mistral", "qwen2", "qwen3")
MASKS = {FULL: create_causal_mask, SLIDING: create_sliding_window_causal_mask}  # others mask padding, of which is none
TILE = 2048  # tokens


@dataclass(frozen=True)
class Captured:
    """One layer's keys, values and queries of a chunk, before RoPE, all heads side by side, and its output."""

    k_NTC: Tensor
    v_NTC: Tensor
    q_NTC: Tensor | None
    h_BTE: Tensor


def captured(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Attention that notes its inputs in the module's `seen`, if it has one: [B, H, T, D], after RoPE."""
    if module.seen is not None:
        module.seen.update(k=key, v=value, q=query, scale=scaling)
    return dense(module, query, key, value, attention_mask, scaling, **given)


AttentionInterface.register(CAPTURED, captured)
AttentionMaskInterface.register(CAPTURED, sdpa_mask)


class Head:
    """The last norm and the output head on the device, and what the model does to logits after them."""

    @staticmethod
    def of(model: PreTrainedModel) -> "Head":
        """Return the head of a whole model, whose decoder ends with the norm."""
        return Head(nn.Identity(), model.get_output_embeddings(), model.config.get_text_config(decoder=True))

    def __init__(self, norm: nn.Module, output: Any, config: Any):
        self._norm, self._output = norm, output
        self._divisor = getattr(config, "logits_scaling", None)
        self._cap = getattr(config, "final_logit_softcapping", None)

    @property
    def device(self) -> torch.device:
        return self._output.weight.device

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens that it tells apart."""
        return len(self._output.weight)

    @torch.no_grad()
    def __call__(self, h_BTE: Tensor) -> Tensor:
        """Logits, [B, T, V], in the dtype of the stream."""
        return self._logits(h_BTE)

    def gradient(self, h_TE: Tensor, uniform_T2: Tensor) -> Tensor:
        """∂/∂h Σ (log p(y) - log p(y')) / √2, y and y' the tokens at which the running sum of p passes `uniform`.

        With respect to the logits that is 1 at y and -1 at y', over √2: p cancels. No graph goes through the logits but
        what the model does to each of them (a divisor, a soft cap).
        """
        h_TE, rows_VE = h_TE.detach().requires_grad_(), self._output.weight
        with torch.enable_grad():
            normed_TE = self._norm(h_TE[None])[0]
        raw_TV = self._output(normed_TE.detach()[None])[0].detach()
        running_TV = self._finished(raw_TV).float().softmax(-1).cumsum_(-1)
        drawn_T2 = torch.searchsorted(running_TV, uniform_T2 * running_TV[:, -1:]).clamp(max=len(rows_VE) - 1)
        drawn_T2E = rows_VE[drawn_T2]
        if self._divisor or self._cap:
            raw_T2 = raw_TV.gather(1, drawn_T2).requires_grad_()
            with torch.enable_grad():
                (slope_T2,) = torch.autograd.grad(self._finished(raw_T2).sum(), raw_T2)
            drawn_T2E = drawn_T2E * slope_T2[..., None]
        first_TE, second_TE = drawn_T2E.unbind(1)
        return torch.autograd.grad(normed_TE, h_TE, (first_TE - second_TE) / 2**0.5)[0]

    def _logits(self, h_BTE: Tensor) -> Tensor:
        return self._finished(self._output(self._norm(h_BTE)))

    def _finished(self, logits: Tensor) -> Tensor:
        if self._divisor:
            logits = logits / self._divisor
        return torch.tanh(logits / self._cap) * self._cap if self._cap else logits


class Stream:
    """A model of which the device holds one layer at a time.

    dtype   of weights and activations; None: `default_dtype`
    blank   the model without weights, but for what turns keys: all that a cache reads of a model
    turns   whether RoPE can be undone, so that keys and queries are handed out before it
    """

    def __init__(self, files: ModelFiles, device: str | torch.device = "cpu", dtype: torch.dtype | None = None):
        self.files, self.device = files, torch.device(device)
        self.dtype = default_dtype(files, self.device) if dtype is None else dtype
        self.turns = files.rope_refusal is None
        self.blank: PreTrainedModel = files.without_memory(self.dtype)
        self._config: Any = self.blank.config.get_text_config(decoder=True)
        self._config._attn_implementation = CAPTURED  # not of towers, which may know no other attention than theirs
        self.core = decoder_of(self.blank)
        self._weights = Weights(files, self.blank)
        self._weights.with_buffers(rotary_module(self.core), self.device)
        self._table: Any = self._weights.with_buffers(self.blank.get_input_embeddings(), self.device)
        self._kinds = layer_types(files.config)
        self._last: tuple[Any, dict[str, dict[str, Any]]] = None, {}

    @property
    def layers(self) -> int:
        return self.files.geometry.layers

    @torch.no_grad()
    def embed(self, tokens_BT: Tensor) -> Tensor:
        """The hidden states under the first layer. Of the table, which stays in the file, only these rows are read."""
        asked_U, numbers_BT = tokens_BT.cpu().long().unique(return_inverse=True)
        rows_UE = self._weights.rows(self._weights.embedding, asked_U).to(self.device, self.dtype)
        empty, padding = self._table.weight, self._table.padding_idx
        self._table.weight, self._table.padding_idx = nn.Parameter(rows_UE, requires_grad=False), None
        try:
            h_BTE = self._table(numbers_BT.to(self.device))
        finally:
            self._table.weight, self._table.padding_idx = empty, padding
        factor = getattr(self._config, "embedding_multiplier", None)
        return h_BTE if factor is None else h_BTE * factor

    def layer(self, index: int) -> "Layer":
        """Load one decoder layer, and those that run with it. Drop it before the next is loaded."""
        start = f"{self._weights.decoder}.{LAYERS}"
        modules = {
            n: self._weights.filled(f"{start}.{n}", self.device, self.dtype) for n in self.files.stretches[index]
        }
        return Layer(modules, self, self.files.attending[index])

    def __reduce__(self):
        return opened, (self.files, self.device, self.dtype)

    def head(self) -> Head:
        """Load the last norm and the output head."""
        names = f"{self._weights.decoder}.norm", self._weights.output
        norm, output = (self._weights.filled(name, self.device, self.dtype) for name in names)
        return Head(norm, output, self._config)

    @torch.no_grad()
    def arguments(self, layer: int, batch: int, tokens: int) -> dict[str, Any]:
        """Return the arguments of a layer beside hidden states, for whole sequences from position 0."""
        if self._last[0] != (batch, tokens):
            empty = torch.zeros(batch, tokens, 1, dtype=self.dtype, device=self.device)
            positions = torch.arange(tokens, device=self.device)[None]
            made: dict[str, dict[str, Any]] = {}
            for kind in set(self._kinds):
                given = {"inputs_embeds": empty, "attention_mask": None, "position_ids": positions, CACHE: None}
                mask = MASKS[kind](config=self._config, **given) if kind in MASKS else None
                turned = self._rotations(empty, positions, kind)
                made[kind] = {"attention_mask": mask, "position_ids": positions, "position_embeddings": turned}
            self._last = (batch, tokens), made
        own = {"shared_kv_states": {}} if self.files.family.shared else {}  # Gemma 4's layers leave theirs there
        return self._last[1][self._kinds[layer]] | {"use_cache": False} | own

    def _rotations(self, like: Tensor, positions_BT: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions for layers of a type, in the dtype of `like`."""
        rotary: Any = rotary_module(self.core)
        by_type = "layer_type" in inspect.signature(rotary.forward).parameters
        return rotary(like, positions_BT, kind) if by_type else rotary(like, positions_BT)

    @torch.no_grad()
    def rope(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions 0 to tokens - 1, [1, T, K] each, float32, scaling included.

        Of a model whose RoPE cannot be undone: of angles of 0, as keys are handed out as they are cached.
        """
        if not self.turns:
            shape = 1, tokens, self.files.geometry.head_size // 2
            return torch.ones(shape, device=self.device), torch.zeros(shape, device=self.device)
        like, positions = torch.zeros(1, 1, 1, device=self.device), torch.arange(tokens, device=self.device)[None]
        cos, sin = self._rotations(like, positions, FULL)
        half = cos.shape[-1] // 2
        if torch.equal(cos[..., :half], cos[..., half:]):  # most models repeat them for both halves of a head
            cos, sin = cos[..., :half], sin[..., :half]
        return cos.contiguous(), sin.contiguous()


class Layer:
    """One decoder layer on the device, and around it those that are run with it.

    modules   by their number in the model, ascending; `index`: which of them is looked into
    """

    def __init__(self, modules: dict[int, Any], stream: Stream, index: int):
        if not stream.files.config.get("num_experts_per_tok"):  # experts take whole chunks
            for module in modules.values():
                module.mlp = Tiled(module.mlp)
        self._modules, self._stream, self._index = modules, stream, index
        found = {n: getattr(module, ATTENTION, None) for n, module in modules.items()}
        self._attention: dict[int, Any] = {n: module for n, module in found.items() if module is not None}
        for module in self._attention.values():
            module.seen = None
        attention = self._attention[index]
        self._seen = seen = attention.seen = dict[str, Any]()
        if stream.files.config["model_type"] in TAPPED:
            taps = {"k_pre": getattr(attention, "k_norm", attention.k_proj),
                    "q_pre": getattr(attention, "q_norm", attention.q_proj)}  # fmt: skip
            for name, tap in taps.items():
                # the hook knows `seen`, not `self`: a cycle would keep the weights until the next garbage collection
                tap.register_forward_hook(lambda _module, _inputs, out, name=name: seen.__setitem__(name, out))

    @torch.no_grad()
    def forward(self, h_BTE: Tensor, queries: bool = False) -> Captured:
        """Run the layer on whole sequences, causally, from position 0."""
        out_BTE = self._run(self._given(h_BTE))
        return self._captured(out_BTE, queries)

    def gradients(self, h_BTE: Tensor, above_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Carry a gradient with respect to the layer's output below it.

        Returns those with respect to the hidden states, the keys before RoPE and the values, [B, T, C] the last two.
        """
        h_BTE = self._given(h_BTE).requires_grad_()
        with torch.enable_grad():
            out_BTE = self._run(h_BTE)
            keys, values = self._seen.get("k_pre", self._seen["k"]), self._seen["v"]
            below, key, value = torch.autograd.grad(out_BTE, (h_BTE, keys, values), self._given(above_BTE))
        if "k_pre" not in self._seen:
            key = self._turned_back(key, rope.rotate)
        self._seen.clear()
        return below, key.flatten(2), value.transpose(1, 2).flatten(2)

    @torch.no_grad()
    def through(self, h_BTE: Tensor, answered: Callable[..., AbstractContextManager] | None = None) -> Tensor:
        """Run the layer on whole sequences, and hand out nothing of it.

        answered   what has a cache answer its attention (`evaluate/caches.py`); None: it is the model's own
        """
        stream, h_BTE = self._stream, self._given(h_BTE)
        if answered is None:
            out_BTE = self._run(h_BTE)
        else:
            arguments = stream.arguments(self._index, *h_BTE.shape[:2])
            with answered(self._attention, arguments, rotary_module(stream.core), 0 in self._modules) as cache:
                out_BTE = self._run(h_BTE, **{CACHE: cache}, use_cache=True)
        self._seen.clear()
        return out_BTE

    def _run(self, h_BTE: Tensor, **more: Any) -> Tensor:
        for n, module in self._modules.items():
            out = module(h_BTE, **self._stream.arguments(n, *h_BTE.shape[:2]) | more)
            h_BTE = out[0] if isinstance(out, tuple) else out
        return h_BTE

    def _captured(self, out_BTE: Tensor, queries: bool) -> Captured:
        """The input of attention, keys and queries turned back, queries scaled as if attention's scale were 1/√D."""
        seen = dict(self._seen)
        self._seen.clear()
        k = seen["k_pre"].flatten(2) if "k_pre" in seen else self._turned_back(seen["k"]).flatten(2)
        v, q = seen["v"].transpose(1, 2).flatten(2), None
        if queries:
            q = seen["q_pre"] if "q_pre" in seen else self._turned_back(seen["q"])
            factor = 1.0 if seen["scale"] is None else seen["scale"] * seen["q"].shape[-1] ** 0.5
            q = q.flatten(2) if math.isclose(factor, 1) else q.flatten(2) * factor
        return Captured(k, v, q, out_BTE)

    def _turned_back(self, x_BHTD: Tensor, back: Any = rope.unrotate) -> Tensor:
        """Keys or queries [B, T, H, D] before RoPE, in their dtype; a gradient is turned back by `rotate`."""
        x_BTHD = x_BHTD.transpose(1, 2)
        if not self._stream.turns:
            return x_BTHD
        cos, sin = self._stream.rope(x_BTHD.shape[1])
        return back(x_BTHD, cos, sin if back is rope.unrotate else -sin).to(x_BTHD.dtype)

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
