"""Cut a chunk of keys or values into blocks, and read from it what fits add up."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvq_calib.fit.statistics import Pair, Sample
from kvq_runtime.codec.block_input import Context, block_input
from kvq_runtime.codec.codec import Codec
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe, Role


@dataclass(frozen=True)
class Blocks:
    """One chunk's keys, or values, as codecs see them: [N, block, C], sinks filled with the token after them.

    x          keys in the recipe's position, or values, float32
    mask_NT    which tokens are ever encoded
    rope       cos and sin of every token, [N, block, K]
    sequences  the number of each block's sequence; all blocks of a sequence follow each other, from position 0 on
    """

    x: Tensor
    mask_NT: Tensor
    rope: Pair
    sequences: Tensor


def blocks(recipe: Recipe, role: Role, geometry: Geometry, x_NTC: Tensor, tables: Pair, sequences: range) -> Blocks:
    """Cut captured keys (before RoPE) or values [sequences, tokens, C] into whole blocks."""
    size, sinks = recipe.window.block, recipe.window.sinks
    count, rows = x_NTC.shape[1] // size, len(x_NTC)
    source = torch.arange(count * size, device=x_NTC.device).clamp(min=sinks)[None]
    segment = recipe.segment if role == "key" and recipe.position == "segment" else 0
    turn = "apply" if role == "key" and recipe.position != "pre" else None
    whole = (tables[0][:, : count * size], tables[1][:, : count * size])
    x, rope = block_input(x_NTC.float(), source, whole, turn, geometry.kv_heads, segment)
    assert rope is not None, "tables were given"
    mask = (torch.arange(count * size, device=x.device) >= sinks).expand(rows, -1)

    def cut(part: Tensor) -> Tensor:
        return part.reshape(rows * count, size, *part.shape[2:])

    numbers = torch.tensor(list(sequences)).repeat_interleave(count)
    return Blocks(cut(x), cut(mask), (cut(rope[0]), cut(rope[1])), numbers)


@dataclass(frozen=True)
class Chunk:
    """Part of one chunk that a fit reads.

    keys   () → the layer's keys of it in the recipe's position, [N, block, C]
    """

    codec: Codec
    data: Blocks
    context: Context
    keys: Callable[[], Tensor]

    @cached_property
    def residual(self) -> Tensor:
        """Residuals of the prediction, float32 [N, T, C]."""
        return self.codec.residual(self.data.x, self.context)

    @cached_property
    def joint(self) -> Pair:
        """The inputs of a prediction and its target, [N, T, I] and [N, T, C]."""
        inputs = self.codec.inputs(self.context) if self.codec.input_tensors else self.data.x[..., :0]
        return inputs, self.target

    @property
    def target(self) -> Tensor:
        """The target of a prediction, [N, T, C]."""
        x, codec = self.data.x, self.codec
        return x if codec.predictor is None else x - codec.mean(self.context)

    def residuals(self, places_K: Tensor) -> Tensor:
        """Residuals of tokens at these places in [N · T], float32 [K, C]."""

        def taken(part: Tensor | None) -> Any:
            return None if part is None else part.flatten(0, 1)[places_K][None]

        context, rope = self.context, tuple(map(taken, self.data.rope))
        below = [(taken(key), taken(value)) for key, value in context.below]
        read = Context(rope=(rope[0], rope[1]), keys=taken(context.keys), below=below)
        return self.codec.residual(taken(self.data.x), read)[0]

    def offer(self, sample: Sample, rows: Callable[[Tensor], Tensor]) -> None:
        """Offer its tokens to a sample: whole sequences at once, from position 0 on; `rows`: of places in [N · T]."""
        numbers, mask_NT = self.data.sequences.unique_consecutive(), self.data.mask_NT
        mask_NT = mask_NT.reshape(len(numbers), -1)
        sample.update(rows, numbers, mask_NT.shape[1], mask_NT=mask_NT, device=self.data.x.device)
