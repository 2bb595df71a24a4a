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
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvq_calib.model.attention import Captured, Projected, Rows, answer_by, asks, expanded
from kvq_calib.model.carried import INPUT, TABLE, Carried
from kvq_calib.model.decoder import Decoder, Noted, attentions, captured, empty, hollow, noting, output_of
from kvq_calib.model.files import ModelFiles
from kvq_calib.model.places import Pass, Seen, passing
from kvq_calib.model.standard import ENTRIES, cache_name, place_of, rotary_name
from kvq_calib.model.weights import Weights
from kvq_runtime.geometry import stretches
from kvq_runtime.hf.model import decoder_of, rotary_module, settings_of
from kvq_runtime.ops import dense, product, rope

TILE = 2048  # tokens


class Head:
    """The last norm and the output head on the device, as the model itself runs them."""

    def __init__(self, around: Any, carried: Carried, calls: int):
        self._around, self._carried, self._calls = around, carried, calls

    @property
    def device(self) -> torch.device:
        return output_of(self._around).weight.device

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

        h_TE, output = h_TE.detach().requires_grad_(), output_of(self._around)
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
        outs = self._carried.outs(h_BTE, self._calls)
        embedded = outs.get(-1, h_BTE.new_zeros(*h_BTE.shape[:-1], self._carried.embedded))
        with passing(decoder_of(self._around), Pass(outs)):
            return self._around(inputs_embeds=embedded, use_cache=False).logits


class Stream:
    """A model of which the device holds one layer at a time.

    dtype   of weights and activations; None: `default_dtype`
    turns   whether RoPE can be undone, so that keys and queries are handed out before it
    """

    def __init__(self, files: ModelFiles, device: str | torch.device = "cpu", dtype: torch.dtype | None = None):
        self.files, self.device = files, torch.device(device)
        self.dtype = default_dtype(files, self.device) if dtype is None else dtype
        self._decoder = Decoder(files.transformers_config(), self.dtype)
        self._weights = Weights(files, self._decoder)
        self._settings = settings_of(self._decoder.config)
        self._stretches = stretches(self._settings)
        self._under = self._decoder.under(self.device)
        self.turns = self._under.refusal is None
        core, start = self._under.core, f"{self._decoder.core_name}."
        for name, module in self._decoder.entry().items():
            core.set_submodule(name.removeprefix(start), self._weights.filled(module, name, self.device))
        self._fill(core)
        self._tables = [self._decoder.table, *([f"{start}{TABLE}.weight"] if self._decoder.carried.inputs else [])]

    @property
    def layers(self) -> int:
        return self.files.geometry.layers

    @property
    def layer_bytes(self) -> int:
        """Return the bytes of the largest layer on the device, with those that are run with it."""
        sizes = [sum(one.nbytes for one in layer.parameters()) for layer in self._decoder.layers]
        return max(sum(sizes[n] for n in own) for own in self._stretches)

    @torch.no_grad()
    def embed(self, tokens_BT: Tensor) -> Tensor:
        """The hidden states under the first layer. Of the table, which stays in the file, only these rows are read."""
        tokens_BT = tokens_BT.cpu().long()
        asked_U, places_BT = tokens_BT.unique(return_inverse=True)
        rows = [self._weights.rows(table, asked_U).to(self.device, self.dtype) for table in self._tables]
        return self._under.embed(tokens_BT.to(self.device), places_BT.to(self.device), *rows)

    def layer(self, index: int) -> "Layer":
        """Load one decoder layer, and those that are run with it. Drop it before the next is loaded."""
        modules = {
            n: self._weights.filled(
                self._decoder.layers[n], f"{self._decoder.within}.{place_of(self._settings, n)}", self.device
            )
            for n in self._stretches[index]
        }
        return Layer(modules, self, self._decoder.attending[index])

    @cached_property
    def blank(self) -> PreTrainedModel:
        """The model without weights, but for what turns keys: what a cache that is made for a model asks of it."""
        made = empty(self._decoder.whole.config, self.dtype)
        core = decoder_of(made)
        if (name := rotary_name(core)) is not None:
            setattr(core, name, getattr(self._under.core, name))
        return made

    def __reduce__(self):
        return opened, (self.files, self.device, self.dtype)

    def head(self) -> Head:
        """Load the last norm and the output head."""
        around: Any = copy.deepcopy(self._decoder.whole)
        for name, module in self._decoder.top().items():
            around.set_submodule(name, self._weights.filled(module, name, self.device))
        self._fill(decoder_of(around))
        for name, module in self._decoder.entry().items():
            filled = self._weights.filled(module, name, self.device) if self._decoder.carried.held else None
            around.set_submodule(name, filled or hollow(around.get_submodule(name), self.device))
        around.set_input_embeddings(nn.Identity())
        self._decoder.carried.mute(decoder_of(around))
        return Head(self._decoder.settled(around, self.device), self._decoder.carried, self._decoder.calls)

    def _fill(self, core: Any) -> None:
        """Give a decoder the parameters that are its own, and no module's."""
        if core._parameters:
            alone = copy.copy(core)
            alone._modules = {}
            core._parameters = self._weights.filled(alone, self._decoder.core_name, self.device)._parameters

    @torch.no_grad()
    def rope(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions 0 to tokens - 1, [1, T, K] each, float32, scaling included.

        Of a model whose RoPE cannot be undone: of angles of 0, as keys are handed out as they are cached.
        """
        if not self.turns:
            shape = 1, tokens, self.files.geometry.head_size // 2
            return torch.ones(shape, device=self.device), torch.zeros(shape, device=self.device)
        cos, sin = self._under.turns(tokens, self.device)
        half = cos.shape[-1] // 2  # transformers repeats them for both halves of a head
        return cos[..., :half].contiguous(), sin[..., :half].contiguous()


class Layer:
    """One decoder layer on the device, and around it those that are run with it.

    modules   by their number in the model, ascending; `index`: which of them is looked into
    """

    def __init__(self, modules: dict[int, Any], stream: Stream, index: int):
        for module in modules.values():
            if _is_plain(getattr(module, "mlp", None)):
                module.mlp = Tiled(module.mlp)
        self._modules, self._stream, self._index = modules, stream, index
        self._attention: dict[int, Any] = dict(attentions(modules.items(), stream._decoder.config))
        for module in self._attention.values():
            module.seen = None
            if asks(stream._decoder.whole) and not stream._decoder.hides:
                answer_by(module, captured)
        attention, seen = self._attention[index], dict[str, Any]()
        attention.seen = None if stream._decoder.hides else seen
        if stream.files.tapped:
            taps = {"k_pre": getattr(attention, "k_norm", attention.k_proj),
                    "q_pre": getattr(attention, "q_norm", attention.q_proj)}  # fmt: skip
            for name, tap in taps.items():
                # the hook knows `seen`, not `self`: a cycle would keep the weights until the next garbage collection
                tap.register_forward_hook(lambda _module, _inputs, out, name=name: seen.__setitem__(name, out))
        self._seen = seen
        self._cache = str(cache_name(modules[index]) or cache_name(attention))  # by which name layers are handed one
        self._noting: Callable[[], Any] | None = None
        if stream.files.joined == ENTRIES:
            attention.compressor.register_forward_hook(noting(seen, attention.config.qk_rope_head_dim))
        elif stream._decoder.hides:
            self._noting = partial(Noted, stream._decoder.config, stream.files.joined, seen)
        elif stream.files.joined:
            self._noting = partial(Rows, stream.files.joined, seen)

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
            batch, tokens, _ = h_BTE.shape
            calls = stream._under.calls(batch, tokens, stream.dtype, stream.device)[self._index]
            with answered(self._attention, calls, rotary_module(stream._under.core), 0 in self._modules) as cache:
                out_BTE = self._run(h_BTE, **{self._cache: cache}, use_cache=True)
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
        stream, (batch, tokens, _) = self._stream, h_BTE.shape
        carried = stream._decoder.carried
        if carried.held:
            return self._run_held(h_BTE, **more)
        calls = stream._under.calls(batch, tokens, stream.dtype, stream.device)
        h, inputs, numbers = carried.unpack(h_BTE)
        handed: Any = calls[self._index].get("shared_kv_states")  # to layers that cache none
        common = more if handed is None else more | {"shared_kv_states": type(handed)()}
        for place, (n, module) in enumerate(self._modules.items()):
            read = {INPUT: inputs[place]} if carried.inputs else {}
            whole = {carried.named: numbers} if carried.numbers else {}
            out = module(h, **calls[n] | read | self._noted(n) | common | whole)
            h, *beside = out if isinstance(out, tuple) else (out,)
            numbers = beside[0] if carried.handed else numbers
        return carried.pack(h, inputs[len(self._modules) :], numbers)

    def _run_held(self, h_BTE: Tensor, **more: Any) -> Tensor:
        """The same where the decoder makes what it calls layers with of several outputs below."""
        carried, under, n = self._stream._decoder.carried, self._stream._under, min(self._modules)
        outs = carried.outs(h_BTE, n)
        for n, module in self._modules.items():
            h, call = under.layer(n, outs)
            out = module(h, **call | self._noted(n) | more)
            outs[n] = out[0] if isinstance(out, tuple) else out
        return carried.hold(outs, n + 1)

    def _noted(self, n: int) -> dict[str, Any]:
        return {self._cache: self._noting()} if self._noting and n == self._index else {}

    def _captured(self, queries: bool) -> Projected:
        """The input of attention, keys and queries turned back, queries scaled as if attention's scale were 1/√D."""
        seen = dict(self._seen)
        self._seen.clear()
        k, v, q = seen["k"], seen["v"].transpose(1, 2).flatten(2), None
        k = seen["k_pre"].flatten(2) if "k_pre" in seen else self._turned_back(k).flatten(2)
        files, expand = self._stream.files, None
        if files.joined and not self._stream._decoder.hides:
            expand = partial(expanded, self._attention[self._index], files.joined, files.geometry.kv_heads)
        if queries and not self._stream._decoder.hides:
            q = seen["q"].transpose(1, 2) if expand else seen.get("q_pre")
            q = (self._turned_back(seen["q"]) if q is None else q).flatten(2)
            size = seen["q"].shape[-1]
            factor = 1.0 if seen["scale"] is None else seen["scale"] * size**0.5
            q = q if math.isclose(factor, 1) else q * factor
        return Projected(k, v, q, seen.get("softmax", dense.PLAIN), expand, seen.get("mask"))

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
