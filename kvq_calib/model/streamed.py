"""Run a model one decoder layer at a time, and hand out its keys, values and queries before RoPE.

Layers are those that a cache compresses, which attend to all tokens. Those that slide over a window, or recur, are run
with the next one above them, or else with the last.

The layers are transformers' own classes, built without memory and filled from the safetensors files when their turn
comes (`weights.py`), called as their model calls them (`decoder.py`).

Attention is a function of ours, which sees keys, values and queries by head; what it sees after RoPE is turned back, as
a cache does. Of the models in `files.ARCHITECTURES` keys and queries are taken where the projection, or the QK-norm
after it, puts them out, before any rounding of RoPE. Hidden states are those of the uncompressed model: a quantizer's
error never enters the residual stream.

E = hidden width · V = vocabulary.
"""

import contextlib
import copy
import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvq_calib.model.attention import Captured, Projected
from kvq_calib.model.decoder import Around, Decoder, Seen, attention_in, empty
from kvq_calib.model.files import ModelFiles
from kvq_calib.model.weights import Weights
from kvq_runtime.families import LAYERS
from kvq_runtime.hf.model import CACHE, decoder_of, rotary_module
from kvq_runtime.ops import product, rope

ROTARY = "rotary_emb"  # a decoder's name for the module that makes its rotations
TILE = 2048  # tokens


class Head:
    """The last norm and the output head on the device, as the model itself runs them."""

    def __init__(self, around: Any):
        self._around = around

    @property
    def device(self) -> torch.device:
        return self._around.get_output_embeddings().weight.device

    @torch.no_grad()
    def __call__(self, h_BTE: Tensor) -> Tensor:
        """Logits, [B, T, V], in the dtype of the stream."""
        return self._logits(h_BTE)

    def gradient(self, h_TE: Tensor, uniform_T2: Tensor) -> Tensor:
        """∂/∂h Σ (log p(y) - log p(y')) / √2, y and y' the tokens at which the running sum of p passes `uniform`.

        With respect to the logits that is 1 at y and -1 at y', over √2: p cancels. No graph goes through the logits but
        what the model does to each of them (a multiplier, a soft cap).
        """
        seen: list[Tensor] = []

        def cut(_module: Any, inputs: tuple, out: Tensor) -> Tensor:
            seen.extend((inputs[0], out.detach().requires_grad_()))
            return seen[1]

        h_TE, output = h_TE.detach().requires_grad_(), self._around.get_output_embeddings()
        handle = output.register_forward_hook(cut)
        try:
            with torch.enable_grad():
                logits_TV = self._logits(h_TE[None])[0]
                normed_TE, projected_TV = seen
                slope_TV = None
                if logits_TV.data_ptr() != projected_TV.data_ptr():
                    (slope_TV,) = torch.autograd.grad(logits_TV.sum(), projected_TV)
        finally:
            handle.remove()
        running_TV = logits_TV.detach().float().softmax(-1).cumsum_(-1)
        rows_VE = output.get_parameter("weight")
        drawn_T2 = torch.searchsorted(running_TV, uniform_T2 * running_TV[:, -1:]).clamp(max=len(rows_VE) - 1)
        drawn_T2E = rows_VE[drawn_T2]
        if slope_TV is not None:
            drawn_T2E = drawn_T2E * slope_TV.view_as(logits_TV).gather(1, drawn_T2)[..., None]
        first_TE, second_TE = drawn_T2E.unbind(1)
        return torch.autograd.grad(normed_TE, h_TE, ((first_TE - second_TE) / 2**0.5).view_as(normed_TE))[0]

    def _logits(self, h_BTE: Tensor) -> Tensor:
        last = getattr(decoder_of(self._around), LAYERS)[-1]
        last.out = h_BTE
        try:
            return self._around(inputs_embeds=torch.zeros_like(h_BTE), use_cache=False).logits
        finally:
            last.out = None


class Stream:
    """A model of which the device holds one layer at a time.

    dtype   of weights and activations; None: `default_dtype`
    turns   whether RoPE can be undone, so that keys and queries are handed out before it
    """

    def __init__(self, files: ModelFiles, device: str | torch.device = "cpu", dtype: torch.dtype | None = None):
        self.files, self.device = files, torch.device(device)
        self.dtype = default_dtype(files, self.device) if dtype is None else dtype
        self.turns = files.rope_refusal is None
        self._decoder = Decoder(files.transformers_config(), self.dtype)
        self._weights = Weights(files, self._decoder)
        self._around = Around(self._decoder.core(self.device))

    @property
    def layers(self) -> int:
        return self.files.geometry.layers

    @property
    def layer_bytes(self) -> int:
        """Return the bytes of the largest layer on the device, with those that are run with it."""
        sizes = [sum(one.nbytes for one in layer.parameters()) for layer in self._decoder.layers]
        return max(sum(sizes[n] for n in own) for own in self.files.stretches)

    @torch.no_grad()
    def embed(self, tokens_BT: Tensor) -> Tensor:
        """The hidden states under the first layer. Of the table, which stays in the file, only these rows are read."""
        asked_U, places_BT = tokens_BT.cpu().long().unique(return_inverse=True)
        rows = self._weights.rows(self._decoder.table, asked_U).to(self.device, self.dtype)
        return self._around.embed(places_BT.to(self.device), rows)

    def layer(self, index: int) -> "Layer":
        """Load one decoder layer, and those that are run with it. Drop it before the next is loaded."""
        modules = {
            n: self._weights.filled(self._decoder.layers[n], f"{self._decoder.within}.{n}", self.device)
            for n in self.files.stretches[index]
        }
        return Layer(modules, self, self.files.attending[index])

    @cached_property
    def blank(self) -> PreTrainedModel:
        """The model without weights, but for what turns keys: what a cache that is made for a model asks of it."""
        made = empty(self._decoder.whole.config, self.dtype)
        setattr(decoder_of(made), ROTARY, getattr(self._around.core, ROTARY))
        return made

    def __reduce__(self):
        return opened, (self.files, self.device, self.dtype)

    def head(self) -> Head:
        """Load the last norm and the output head."""
        around: Any = copy.deepcopy(self._decoder.whole)
        for name, module in self._decoder.top().items():
            around.set_submodule(name, self._weights.filled(module, name, self.device))
        around.set_input_embeddings(nn.Identity())
        return Head(self._decoder.settled(around, self.device))

    @torch.no_grad()
    def rope(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions 0 to tokens - 1, [1, T, K] each, float32, scaling included.

        Of a model whose RoPE cannot be undone: of angles of 0, as keys are handed out as they are cached.
        """
        if not self.turns:
            shape = 1, tokens, self.files.geometry.head_size // 2
            return torch.ones(shape, device=self.device), torch.zeros(shape, device=self.device)
        cos, sin = self._around.calls(1, tokens, torch.float32)[self.files.attending[0]]["position_embeddings"]
        half = cos.shape[-1] // 2
        if torch.equal(cos[..., :half], cos[..., half:]):  # most models repeat them for both halves of a head
            cos, sin = cos[..., :half], sin[..., :half]
        return cos.contiguous(), sin.contiguous()


class Layer:
    """One decoder layer on the device, and around it those that are run with it.

    modules   by their number in the model, ascending; `index`: which of them is looked into
    """

    def __init__(self, modules: dict[int, Any], stream: Stream, index: int):
        for module in modules.values():
            if _is_plain(getattr(module, "mlp", None)):
                module.mlp = Tiled(module.mlp)
        self._modules, self._stream, self._index = modules, stream, index
        found = {n: attention_in(module) for n, module in modules.items()}
        self._attention: dict[int, Any] = {n: module for n, module in found.items() if module is not None}
        for module in self._attention.values():
            module.seen = None
        attention = self._attention[index]
        self._seen = seen = attention.seen = dict[str, Any]()
        if stream.files.tapped:
            taps = {"k_pre": getattr(attention, "k_norm", attention.k_proj),
                    "q_pre": getattr(attention, "q_norm", attention.q_proj)}  # fmt: skip
            for name, tap in taps.items():
                # the hook knows `seen`, not `self`: a cycle would keep the weights until the next garbage collection
                tap.register_forward_hook(lambda _module, _inputs, out, name=name: seen.__setitem__(name, out))

    @torch.no_grad()
    def forward(self, h_BTE: Tensor, queries: bool = False) -> Captured:
        """Run the layer on whole sequences, causally, from position 0."""
        out_BTE = self._run(self._given(h_BTE))
        return Captured(**vars(self._captured(queries)), h_BTE=out_BTE)

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
            calls = stream._around.calls(h_BTE.shape[0], h_BTE.shape[1], stream.dtype)[self._index]
            with answered(self._attention, calls, rotary_module(stream._around.core), 0 in self._modules) as cache:
                out_BTE = self._run(h_BTE, **{CACHE: cache}, use_cache=True)
        self._seen.clear()
        return out_BTE

    @torch.no_grad()
    def project(self, h_BTE: Tensor, queries: bool = False) -> Projected:
        """Return what `forward` returns beside the output, without attention and MLP, for a last layer."""
        self._seen["alone"] = True
        with contextlib.suppress(Seen):
            self._run(self._given(h_BTE))
        return self._captured(queries)

    def _run(self, h_BTE: Tensor, **more: Any) -> Tensor:
        calls = self._stream._around.calls(h_BTE.shape[0], h_BTE.shape[1], self._stream.dtype)
        for n, module in self._modules.items():
            out = module(h_BTE, **calls[n] | more)
            h_BTE = out[0] if isinstance(out, tuple) else out
        return h_BTE

    def _captured(self, queries: bool) -> Projected:
        """The input of attention, keys and queries turned back, queries scaled as if attention's scale were 1/√D."""
        seen = dict(self._seen)
        self._seen.clear()
        k = seen["k_pre"].flatten(2) if "k_pre" in seen else self._turned_back(seen["k"]).flatten(2)
        v, q = seen["v"].transpose(1, 2).flatten(2), None
        if queries:
            q = seen["q_pre"] if "q_pre" in seen else self._turned_back(seen["q"])
            factor = 1.0 if seen["scale"] is None else seen["scale"] * seen["q"].shape[-1] ** 0.5
            q = q.flatten(2) if math.isclose(factor, 1) else q.flatten(2) * factor
        return Projected(k, v, q, seen["softmax"])

    def _turned_back(self, x_BHTD: Tensor, back: Any = rope.unrotate) -> Tensor:
        """Keys or queries [B, T, H, D] before RoPE, in their dtype; a gradient is turned back by `rotate`."""
        x_BTHD = x_BHTD.transpose(1, 2)
        if not self._stream.turns:
            return x_BTHD
        cos, sin = self._stream.rope(x_BTHD.shape[1])
        return back(x_BTHD, cos, sin if back is rope.unrotate else -sin).to(x_BTHD.dtype)

    def _given(self, h_BTE: Tensor) -> Tensor:
        return h_BTE.to(self._stream.device, self._stream.dtype)


def _is_plain(mlp: nn.Module | None) -> bool:
    """True if all parameters of an MLP are linear layers: it works on any number of tokens, which experts need not; and
    it is given nothing else."""
    inner = () if mlp is None or len(inspect.signature(type(mlp).forward).parameters) > 2 else mlp.modules()
    parts = [part for part in inner if next(part.parameters(recurse=False), None) is not None]
    return bool(parts) and all(type(part) is nn.Linear for part in parts)


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
