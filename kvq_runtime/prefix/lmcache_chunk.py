"""Turn an LMCache chunk, keys and values of all layers of some tokens, into bytes and back.

    | file of block 0 | ... | file of block N - 1 |

Each block is the file that a `PrefixStore` keeps (`prefix/block.py`), with the same codecs and checks. LMCache
does not say where in its text a chunk begins, so recipes that depend on positions are refused, and no token is an exact
sink. All chunks of a shape have the same number of bytes.

A block's `previous` is a sha256 of the recipe, fit, shape and model, of the chunk's key and of the block's number in
it. So a chunk that was changed, moved to another key, or written by another recipe, artifact, shape or model is an
ArtifactError, and is not decoded.

LMCache has keys and values of all layers in one of these layouts, which are read and written in place:

    [2, L, T, C]                   keys and values apart
    [L, T, 2C] or [1, L, T, 2C]    fused, as vLLM has them: each head's key, then its value; the first where the engine
                                   moves chunks, the second where LMCache's server does

Source: `compute_kv_layout` and `get_kernel_group_shape_dtype` of LMCache 0.5.6.

N = blocks of a chunk · T tokens of a chunk · X bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.errors import named
from kvq_runtime.families import attending
from kvq_runtime.geometry import Geometry
from kvq_runtime.prefix import chain
from kvq_runtime.prefix.block import BlockCodec, Link
from kvq_runtime.prefix.store import check_recipe
from kvq_runtime.recipe import Recipe
from kvq_runtime.vllm import served_recipe
from kvq_runtime.vllm.served_recipe import ServedRecipe, shard_of


class ChunkCodec:
    """Encode and decode chunks of one shape, in any layout. Raises ValueError for a shape that cannot be kept."""

    def __init__(
        self,
        recipe: Recipe,
        geometry: Geometry,
        tensors: Mapping[str, Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        model: str = "",
    ):
        tokens, block = shape[-2], recipe.window.block
        self._apart = (2, geometry.layers, tokens, geometry.width)
        self._fused = (geometry.layers, tokens, 2 * geometry.width)
        if tuple(shape) not in (self._apart, self._fused, (1, *self._fused)):
            raise ValueError(f"a chunk of shape {list(shape)}; without pipeline parallelism a worker has {geometry}")
        if tokens % block:
            raise ValueError(
                f"{recipe.name} encodes blocks of {block} tokens, and a chunk has {tokens}; "
                f"give LMCache's server a --chunk-size that {block} divides"
            )
        recipe = recipe.with_exact(sinks=0)
        self.geometry = geometry
        self.codec = BlockCodec(recipe, geometry, tensors, dtype)
        self._root, self._count = self.codec.digest(model), tokens // block
        self._block_bytes = self.codec.file_bytes(self._links(b"")[0])
        self.bytes = self._count * self._block_bytes

    def _links(self, key: bytes) -> list[Link]:
        """Return the places of a chunk's blocks."""
        names = [sha256(f"{self._root} {n} ".encode() + key).hexdigest() for n in range(self._count)]
        return [Link(name, n, ()) for n, name in enumerate(names)]

    def encode(self, chunk: Tensor, key: bytes, out_X: Tensor) -> None:
        """Write a chunk into uint8 memory on the CPU, `bytes` of it. Raises ValueError for NaN or infinity."""
        blocks = self.codec.encode(0, dict(enumerate(zip(*self._by_head(chunk).flatten(3), strict=True))))
        if len(blocks) < self._count:
            raise ValueError("NaN or infinity among the keys or values; nothing is kept of the chunk")
        data = bytearray().join(map(self.codec.to_bytes, blocks, self._links(key)))
        out_X.copy_(torch.frombuffer(data, dtype=torch.uint8))

    def decode(self, data_X: Tensor, key: bytes, out: Tensor) -> None:
        """Read a chunk from uint8 memory on the CPU, which may be longer. Raises ArtifactError unless it is this one.

        `out` holds no chunk after an error.
        """
        data, size = bytes(data_X.contiguous().view(-1).numpy().data[: self.bytes]), self._block_bytes
        files = [data[n * size : (n + 1) * size] for n in range(self._count)]
        blocks = list(map(self.codec.from_bytes, files, self._links(key)))
        out_2LTHD = self._by_head(out)
        for layer, *pair in self.codec.decode(blocks):
            for role, x_THD in enumerate(pair):
                out_2LTHD[role, layer] = x_THD

    def _by_head(self, chunk: Tensor) -> Tensor:
        """Return a view of a chunk in any layout, [2, L, T, H, D]."""
        size = self.geometry.head_size
        if chunk.shape == self._apart:
            return chunk.unflatten(-1, (-1, size))
        return chunk.view(self._fused).unflatten(-1, (-1, 2, size)).movedim(-2, 0)


@dataclass(frozen=True, eq=False)
class ChunkCodecs:
    """The codecs of chunks by shape, dtype and worker, of one recipe and of a model of this geometry.

    model   digest of the model's files on this machine
    """

    served: ServedRecipe
    geometry: Geometry
    model: str = ""

    @cache  # noqa: B019  # for as long as the server lives
    def codec(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int = 0, ranks: int | None = None) -> ChunkCodec:
        """Return the codec of a worker's chunks. Raises ValueError for chunks that the recipe cannot keep.

        rank, ranks   the worker's number and the number of workers; None: it follows from the chunk's channels
        """
        recipe, whole = self.served.recipe, self.geometry
        width = shape[-1] if len(shape) == 4 and shape[0] == 2 else shape[-1] // 2
        shard = shard_of(whole, rank, ranks or max(1, whole.width // max(1, width)))
        tensors = shard.tensors(recipe, whole, self.served.tensors) if recipe.fitted else {}
        return ChunkCodec(recipe, shard.geometry(whole), tensors, shape, dtype, self.model)


@named('serde "kvq"')
def read_settings(settings: Mapping[str, Any]) -> ChunkCodecs:
    """Load and check what the serde's settings name. Raises ValueError, ArtifactError, OSError or RuntimeError.

    cache      recipe, artifact or lock file: `kvq_runtime/vllm/served_recipe.py`
    model      folder, or id on a Hub, of the served model; at least its config.json is on this machine
    revision   of a model on a Hub
    """
    if not {"cache", "model"} <= set(settings) <= {"cache", "model", "revision"}:
        raise ValueError(f"settings {', '.join(sorted(settings))}; give cache and model, and revision if wanted")
    for name, value in settings.items():
        if not isinstance(value, str):
            raise ValueError(f"{name}={value!r:.80}; give text")
    model, revision = settings["model"], settings.get("revision")
    served, config = served_recipe.read(settings["cache"]), served_recipe.model_config(model, revision)
    if served.artifact is None and served.recipe.key_bias != "kept":  # a mean after RoPE needs positions
        biased = served_recipe.key_biases(served_recipe.model_folder(model, revision), config)
        if biased and any(key.axis == "token" and not key.quantize.keeps_dtype for key, _ in served.recipe.pairs):
            name = served.recipe.name
            raise ValueError(
                f"{name} rounds keys by token, and k_proj of {model} has a bias, which LMCache's chunks keep, as they "
                f"tell no positions; use a recipe by channel, as kivi-4bit, or {name}+key_bias=kept"
            )
        served = replace(served, recipe=replace(served.recipe, key_bias="kept"))
    served, geometry = served_recipe.match(served, config, model, revision)
    check_recipe(served.recipe.check(geometry))
    if "positions" in served.recipe.needs:
        raise ValueError(
            f"{served.recipe.name} encodes keys by their positions, which LMCache does not tell; use a recipe that "
            "docs/recipes.md lists for LMCache, or kvq's own connector (docs/serve-vllm.md)"
        )
    if len(attending(config)) < config["num_hidden_layers"]:
        raise ValueError(f"layers of {model} slide or recur, and LMCache does not say which layers a chunk holds")
    weights = served_recipe.weights(served_recipe.model_folder(model, revision))
    return ChunkCodecs(served, geometry, chain.model_digest(config, weights))
