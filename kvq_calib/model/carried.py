"""Carry what one layer hands to the next, as one tensor: whoever stores, splits or differentiates hidden states need
not know what is in it.

    [B, T, S · E + n · P]      S streams side by side, then the inputs by layer of the n layers that follow
    [B, T, S · E + b K]        or K whole numbers of b bytes: tokens that the layer has chosen for each query, where
                               others read the same; or the token itself
    [B, T, S · E + K]          or K numbers of a router, which that of the next layer reads
    [B, T, n E]                or what n layers below have put out, the newest first

Most models have one stream, their hidden states, and nothing behind. Gemma 3n has several (AltUp), of which the
first goes through attention and MLP; so have Qwen 4, HY 4 and DeepSeek V4 (hyper-connections), and LongCat Flash
between the two attentions of a layer, whose experts are added after both. In Gemma 3n and Gemma 4's E2B and E4B, a
token has an embedding for each layer, which that layer alone reads. Both are made under the first layer, of the token
and its embedding. In GLM 5 some layers have no indexer, and read the tokens that the last one below has chosen; in
DeepSeek V4 some choose experts by the token. A byte is a number from 0 to 255, which every dtype holds. ZAYA's routers
read what the one below has made of the token.

Some decoders make what they call a layer with of more than the last one has put out: a pass that goes through layers
again begins with what was below them (Dory, Inkling 2 Loop); layers read blocks of those below (Inkling 2), or the
embeddings (Zamba). All of that is carried, and the decoder's own code makes the same of it.

E = hidden width · P = width of an input by layer.
"""

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq_calib.model.standard import caching

TABLE = "embed_tokens_per_layer"  # the decoder's table of inputs by layer
INPUT = "per_layer_input"  # the argument by which layers are given their inputs by layer
CHOSEN, TOKENS = "prev_topk_indices", "input_ids"  # those of what others have chosen, and of the tokens themselves
ROUTED = "prev_router_hidden_states"  # that of what the router of the layer below has made


@dataclass(frozen=True)
class Carried:
    """The parts of what is carried: `layers` of the model; `streams`, `inputs`, `numbers`, `size` as S, P, K, b above.

    embedded   width of a row of the table of tokens: of OPT-350m half of E
    axis       of streams in what layers are given; None: they are side by side there too
    numbers    at the most; of `size` 0 they are not whole
    named      the argument by which layers are given them, "" if there are none
    held       by layer, and above the last: those below of whose outputs all that follows is made, the newest first;
               -1: of the embeddings. Empty: of the last one's alone, as it is
    """

    hidden: int
    embedded: int
    layers: int
    streams: int = 1
    inputs: int = 0
    axis: int | None = None
    numbers: int = 0
    size: int = 0
    named: str = ""
    held: Sequence[Sequence[int]] = ()

    @staticmethod
    def of(config: Mapping[str, Any]) -> "Carried":
        """Those of a model, from its configuration with transformers' defaults."""
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        own = {axis: config.get(name) for name, axis in (("altup_num_inputs", 0), ("hc_mult", 2), ("hc_count", None))}
        own[None] = own[None] or caching(config)
        axis, streams = next(((axis, count) for axis, count in own.items() if count), (None, 1))
        whole = 0, 0, ""
        if "shared" in (config.get("indexer_types") or ()):  # with the rest of an unfinished pool
            whole = config["index_topk"] + (config.get("index_kpool") or 1) - 1, 2, CHOSEN
        if "hash_moe" in (config.get("mlp_layer_types") or ()):
            whole = 1, 3, TOKENS
        if config.get("router_hidden_size"):
            whole = config["router_hidden_size"], 0, ROUTED
        embedded, inputs = config.get("word_embed_proj_dim") or hidden, config.get("hidden_size_per_layer_input") or 0
        return Carried(hidden, embedded, layers, streams, inputs, axis if streams > 1 else None, *whole)

    @property
    def width(self) -> int:
        """Numbers of a token under the first layer, where they are the most."""
        if self.held:
            return self.hidden * max(map(len, self.held))
        return self.streams * self.hidden + self.layers * self.inputs + max(1, self.size) * self.numbers

    @property
    def handed(self) -> bool:
        """True if a layer puts out the numbers that the next is given."""
        return self.named in (CHOSEN, ROUTED)

    def pack(self, h: Tensor, inputs: Sequence[Tensor], numbers_BTK: Tensor | None = None) -> Tensor:
        """One tensor of hidden states, [B, T, E], or of streams as layers are given them, and of what stands behind.

        inputs        of layers to come, [B, T, P] each
        numbers_BTK   whole, of at most `size` bytes, the highest first; or any, if that is 0
        """
        if self.axis is not None:
            h = h.movedim(self.axis, 2).flatten(2)
        if numbers_BTK is not None:
            if self.named == CHOSEN and h.shape[1] > 1 << 16:
                raise ValueError(
                    f"sequences of {h.shape[1]} tokens; where layers share what they choose, use at most 65536"
                )
            inputs = [(numbers_BTK // 256**n % 256).to(h.dtype) for n in reversed(range(self.size))] or [numbers_BTK]
        return torch.cat([h, *inputs], -1) if inputs else h

    def unpack(self, packed_BTE: Tensor) -> tuple[Tensor, Sequence[Tensor], Tensor | None]:
        """The parts of one tensor again, as `pack` takes them."""
        states = self.streams * self.hidden
        h, behind = packed_BTE[..., :states], packed_BTE[..., states:]
        if not behind.shape[-1]:
            h = packed_BTE
        if self.axis is not None:
            h = h.unflatten(-1, (self.streams, self.hidden)).movedim(2, self.axis).contiguous()
        if self.numbers and not self.size:
            return h, (), behind if behind.shape[-1] else None
        if self.numbers and behind.shape[-1]:
            parts = behind.detach().to(torch.int32).unflatten(-1, (self.size, -1))
            weights_b = 256 ** torch.arange(self.size - 1, -1, -1, dtype=torch.int32, device=behind.device)
            return h, (), (parts * weights_b[:, None]).sum(-2)
        return h, behind.split(self.inputs, -1) if behind.shape[-1] else (), None

    def hold(self, outs: Mapping[int, Tensor], layer: int) -> Tensor:
        """One tensor of all outputs that this layer and those above are made of, [B, T, E] each."""
        return torch.cat([outs[n] for n in self.held[layer]], -1)

    def outs(self, packed_BTE: Tensor, layer: int) -> dict[int, Tensor]:
        """These outputs again, by layer."""
        if not self.held:
            return {layer - 1: self.unpack(packed_BTE)[0]}
        return dict(zip(self.held[layer], packed_BTE.split(self.hidden, -1), strict=True))

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
