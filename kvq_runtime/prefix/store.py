"""Keep prefixes encoded in a folder: token ids and rows of keys and values in, blocks on disk, the same rows out.

Knows nothing of transformers: `prefix/transformers.py` is this for a loaded model, `prefix/vllm.py` for vLLM's pages.

    tokens [T] + K, V of all layers [T, H, D], after RoPE → blocks of 128 tokens → files → K, V [T, H, D]
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor

from kvq_runtime.cache import BlockCache
from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.prefix import chain
from kvq_runtime.prefix.block import Block, BlockCodec, Link, encoded_block
from kvq_runtime.prefix.folder import Folder, parse_budget
from kvq_runtime.recipe import Recipe

Tokens = Tensor | Iterable[int]  # ids of one row, [T] or [1, T]
_log = logging.getLogger(__name__)


class PrefixBlocks:
    """Encoded blocks of prefixes in a folder, of one model under one recipe.

    path       a folder, which processes may share
    tensors    of an artifact, if the recipe is fitted
    model      text that differs between models whose keys and values differ: a digest, and the shard of the model
    dtype      of the model's keys and values
    rotary     the model's rotation, where the recipe needs positions
    budget     bytes of the folder: a number, or text such as "20GB"

    Raises ValueError for a recipe whose blocks cannot be kept, ArtifactError for a folder that others can write to.
    """

    def __init__(
        self,
        path: str | Path,
        recipe: Recipe,
        geometry: Geometry,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        model: str,
        dtype: torch.dtype = torch.bfloat16,
        rotary: Rotary | None = None,
        budget: str | int = "20GB",
    ):
        check_recipe(recipe)
        self.codec = BlockCodec(recipe, geometry, tensors or {}, dtype, rotary)
        budget_bytes = parse_budget(budget)
        if self.codec.largest > budget_bytes:
            raise ValueError(f"budget={budget!r}; one block of {recipe.name} takes {self.codec.largest} bytes")
        self.root = self.codec.digest(model)
        self.folder = Folder(Path(path).expanduser(), self.root, budget_bytes)

    def of_tenant(self, salt: str) -> "PrefixBlocks":
        """Return the store of a tenant: other chains in the same folder. Without a salt it is this one."""
        if not salt:
            return self
        other = copy(self)
        other.root = chain.tenant_root(self.root, salt)
        return other

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.codec.recipe.window.block

    def names(self, tokens: Tokens) -> list[str]:
        """Return the names of the whole blocks of a text."""
        return chain.block_names(self.root, chain.token_row(tokens), self.block)

    def longest(self, tokens: Tokens) -> int:
        """Return how many of these tokens, from the first on, are kept; their blocks are not read, so not checked."""
        return self.block * sum(1 for _ in takewhile(self.folder.has, self.names(tokens)))

    def put(self, tokens: Tokens, keys: Sequence[Tensor], values: Sequence[Tensor], start: int = 0) -> int:
        """Keep the whole blocks of a prefix; return how many of its tokens are kept now.

        keys     of each layer, after RoPE, [T, H, D] or [T, C], of tokens `start` to start + T;   values   likewise
        start    a multiple of `block`; nothing is kept unless all blocks before it are
        Blocks that are kept are not encoded again. OSError: the disk refused; the blocks before are kept.
        """
        assert start % self.block == 0 and len(keys) == len(values) == self.codec.geometry.layers
        pairs = [(k.flatten(1), v.flatten(1)) for k, v in zip(keys, values, strict=True)]
        stop = start + min(len(x) for pair in pairs for x in pair)

        def encode(number: int, end: int) -> list[Block]:
            span = slice(number * self.block - start, end * self.block - start)
            return self.codec.encode(number, {n: (k[span], v[span]) for n, (k, v) in enumerate(pairs)})

        return self._keep(chain.token_row(tokens)[:stop], pairs[0][1].dtype, encode, start // self.block)

    def put_cache(self, tokens: Tokens, cache: BlockCache, row: int = 0) -> int:
        """Keep the encoded blocks of one row of a cache, as they are.

        Raises ValueError for a cache with padding, or with positions that do not count from 0.
        """
        positions = cache.positions
        if positions.real_BT is not None or positions.positions_BT is not None or positions.dropped:
            raise ValueError(
                "the cache has padded slots, or positions that do not count from 0; keep prompts one by one, unpadded"
            )
        if not cache.layers:
            return 0
        token_T = chain.token_row(tokens)[: min(store.encoded for store in cache.layers.values())]
        dtype = cache.layers[0].buffer_2BTC.dtype
        return self._keep(token_T, dtype, lambda first, end: [encoded_block(cache, n, row) for n in range(first, end)])

    def load(self, tokens: Tokens, start: int = 0) -> list[Block]:
        """Return the kept blocks of these tokens from token `start` on, checked.

        A damaged block, and all after it, are missing; it is removed, with a warning in the log.
        """
        assert start % self.block == 0
        token_T = chain.token_row(tokens)
        names, first, blocks = self.names(token_T), start // self.block, list[Block]()
        for number in range(first, len(names)):
            block = self._read(names[number], self._link(names, token_T, number))
            if block is None:
                break
            blocks.append(block)
        self.folder.touch(names[: first + len(blocks)])
        return blocks

    def _read(self, name: str, link: Link) -> Block | None:
        """Read a block; None if it is missing, unreadable or damaged, which is logged."""
        path = self.folder.path(name)
        try:
            return self.codec.from_bytes(files.read(path, self.codec.largest), link)
        except NotFound:
            pass
        except ArtifactError as error:
            _log.warning("block %d of a kept prefix is damaged, and removed: %s: %s", link.number, path, error)
            with suppress(OSError):  # it will be found damaged again
                path.unlink()
        except OSError as error:
            _log.warning("block %d of a kept prefix cannot be read: %s", link.number, error)
        return None

    def _keep(self, token_T: Tensor, dtype: torch.dtype, encode: Callable[[int, int], list[Block]], first: int = 0):
        """Write the missing blocks from block `first` on, in order; return how many tokens are kept.

        encode   returns blocks `number` to `end`, or some of the first
        """
        if dtype != self.codec.dtype:
            raise ValueError(f"keys and values are {dtype}, the store's {self.codec.dtype}; do not use autocast")
        names = self.names(token_T)[: max(1, self.folder.budget // self.codec.largest)]
        number = sum(1 for _ in takewhile(self.folder.has, names))
        while first <= number < len(names):
            for block in encode(number, len(names)):
                data = self.codec.to_bytes(block, self._link(names, token_T, number))
                self.folder.put(names[number], data)
                number += 1
        self.folder.touch(names[:number])
        return number * self.block

    def _link(self, names: Sequence[str], token_T: Tensor, number: int) -> Link:
        span = slice(number * self.block, (number + 1) * self.block)
        return Link(names[number - 1] if number else self.root, number, tuple(token_T[span].tolist()))


def check_recipe(recipe: Recipe) -> None:
    """Raise ValueError for a recipe whose blocks mean nothing in another cache."""
    if recipe.policies:
        kinds = ", ".join(policy.kind for policy in recipe.policies)
        raise ValueError(
            f"{recipe.name} is fitted to each prompt, or chooses tokens as they arrive ({kinds}): equal tokens do not "
            "have equal blocks; use a recipe without that"
        )
