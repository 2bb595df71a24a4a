"""Measure, layer by layer, what a cache's codecs do to keys, values and the output of attention.

The model is streamed with exact activations; each layer's keys and values pass through the recipe's codecs in whole
blocks, keys and values of the layer below as decoded, which is what the cache does.

    key_error, value_error     Σ|x - x̂|² / Σ|x - μ|²                   μ the tokens' mean before RoPE: 0 is exact, and
                               1 is what storing nothing but the mean would give
    attention_error_encoded    ‖softmax(q K̂ᵀ) V̂ - softmax(q Kᵀ) V‖² / ‖softmax(q Kᵀ) V‖², every token but the sinks
                               encoded; none for recipes that hold or read a part of the tokens

Errors of keys and values are over encoded tokens: sinks, and tokens after the last whole block, do not count.
Attention is causal; its scale is 1/√D.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvq_calib.fit.statistics import Moments
from kvq_calib.model import attention
from kvq_calib.model.attention import AttentionInputs, Pair, apply_rope
from kvq_calib.model.streamed import Stream
from kvq_runtime.codec import shared
from kvq_runtime.codec.block_input import block_input
from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import ROLES, Recipe


@torch.inference_mode()
def by_layer(
    stream: Stream,
    tokens_BT: Tensor,
    candidates: Mapping[str, tuple[Recipe, Mapping[str, Tensor]]],
    progress: Callable[[int], object] = lambda tokens: None,
) -> dict[str, list[dict[str, Any]]]:
    """Return the errors of each (recipe, tensors), by name: one dict per layer, with the keys listed above.

    A recipe that is fitted to its prompt has none.

    progress   gets the number of tokens that went through a layer
    """
    geometry = stream.files.geometry
    works = {
        name: _Work(*candidate, geometry, len(tokens_BT), stream.device)
        for name, candidate in candidates.items() if not candidate[0].fits_prompt
    }  # fmt: skip
    hidden = [stream.embed(row[None]).cpu() for row in tokens_BT]
    tables = stream.rope(tokens_BT.shape[1])
    for layer in range(geometry.layers):
        module = stream.layer(layer)
        for index, h_BTE in enumerate(hidden):
            captured = module.forward(h_BTE, queries=True)
            hidden[index] = captured.h_BTE.cpu()
            chunk = attention.inputs(captured, tables, geometry)
            exact = None if chunk.q is None else attention.attend(chunk, chunk.k, chunk.v, geometry.head_size)
            for work in works.values():
                work.add(layer, index, chunk, exact)
            progress(tokens_BT.shape[1])
        for work in works.values():
            work.close(layer)
    return {name: work.rows for name, work in works.items()}


class _Work:
    """One recipe: its codecs, the decoded keys and values of layers below, and the sums of the layer at work."""

    def __init__(
        self, recipe: Recipe, tensors: Mapping[str, Tensor], geometry: Geometry, chunks: int, device: torch.device
    ):
        self.recipe, self.geometry, self.device = recipe, geometry, device
        self.codecs = [(keys.to(device), values.to(device)) for keys, values in shared.build(recipe, geometry, tensors)]
        self.depth = max((max(codec.below, default=0) for pair in self.codecs for codec in pair), default=0)
        self.below: list[list[Pair]] = [[] for _ in range(chunks)]  # nearest layer first
        self.rows: list[dict[str, Any]] = []
        self._clear()

    def _clear(self) -> None:
        self.sums: dict[str, float] = {}
        self.moments = {role: Moments(self.geometry.width, device=self.device) for role in ROLES}

    def add(self, layer: int, index: int, chunk: AttentionInputs, exact_NTC: Tensor | None) -> None:
        """Encode and decode one chunk, and add its errors."""
        pair, below = self.codecs[layer], self.below[index]
        keys, k_hat = self._side(
            pair[0], chunk, chunk.k if self.recipe.position == "post" else chunk.k_pre, None, below
        )
        values, v_hat = self._side(pair[1], chunk, chunk.v, keys, below)
        self.below[index] = [(keys, values), *below][: self.depth]
        if self.recipe.position == "pre":
            k_hat = apply_rope(k_hat, chunk.rope, self.geometry.kv_heads)
        if exact_NTC is None:
            return
        out = attention.attend(chunk, k_hat, v_hat, self.geometry.head_size)
        self._add("attention/error", (out - exact_NTC).square())
        self._add("attention/energy", exact_NTC.square())

    def _side(self, codec: Codec, chunk: AttentionInputs, x_NTC: Tensor, keys: Tensor | None, below) -> Pair:
        """Return the decoded, centred blocks [N·blocks, block, C], and the whole sequence with them in it [N, T, C]."""
        window, role = self.recipe.window, codec.role
        whole = x_NTC.shape[1] // window.block * window.block
        if whole == 0:
            return x_NTC[:, :0], x_NTC
        source = torch.arange(whole, device=x_NTC.device).clamp(min=min(window.sinks, x_NTC.shape[1] - 1))
        filled, tables = block_input(x_NTC, source[None], chunk.rope)
        assert tables is not None, "tables were given"
        blocks, cos, sin = (part.reshape(-1, window.block, part.shape[-1]) for part in (filled, *tables))
        context = Context(rope=(cos, sin), keys=keys, below=below)
        centred = codec.decode(codec.encode(blocks, context), context)
        found = codec.restore(centred.float(), context).reshape(len(x_NTC), whole, -1)
        kept = slice(min(window.sinks, whole), whole)
        self._add(f"{role}/error", (found - x_NTC[:, :whole])[:, kept].square())
        if whole > window.sinks:
            self.moments[role].update((chunk.k_pre if role == "key" else x_NTC)[:, kept])
        return centred, torch.cat([x_NTC[:, : window.sinks], found[:, window.sinks :], x_NTC[:, whole:]], 1)

    def _add(self, name: str, x: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + float(x.sum(dtype=torch.float64))

    def close(self, layer: int) -> None:
        """Turn the sums of a layer into its row."""
        row: dict[str, Any] = {"layer": layer}
        for role in ROLES:
            moments = self.moments[role]
            found = moments.value() if moments.sums["count"] else None
            variance = found.count * float(found.variance_C.sum()) if found else 0.0
            row[f"{role}_error"] = self.sums.get(f"{role}/error", 0.0) / variance if variance else 0.0
        energy = self.sums.get("attention/energy") if self.recipe.policy("select") is None else None
        row["attention_error_encoded"] = None if energy is None else self.sums["attention/error"] / energy
        self.rows.append(row)
        self._clear()
