"""Keep prefixes encoded: token ids and rows of keys and values in, blocks on a shelf, the same rows out.

Knows nothing of transformers; `hf/prefix.py` is this for a loaded model. A serving engine's connector gives its
rows to `put`, and takes `load` and `decode`.

    tokens [T] + K, V of all layers [T, H, D], after RoPE → blocks of 128 tokens → files → K, V [T, H, D]
"""

import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import partial
from itertools import count as counting
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from kvq_runtime.cache import BlockCache
from kvq_runtime.errors import ArtifactError, spoken
from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.ops import entropy
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.prefix import chain, coder, sets
from kvq_runtime.prefix.block_file import Block, BlockFormat, Link
from kvq_runtime.prefix.coder import Coder
from kvq_runtime.prefix.shelf import Folder, Memory, Shelf, parse_bytes
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.promise import Check

LARGEST_BLOCK = 1 << 14  # tokens, whose ids stand in the header of a file
MOST_THREADS = 8  # each holds a block, and works on one
TOGETHER = 32  # blocks that are encoded as one run, in wide steps, and held until files are made of them
HELD = 64 << 20  # bytes of such blocks, at most: large ones are as fast in short runs
_log = logging.getLogger(__name__)
T = TypeVar("T")


class PrefixBlocks:
    """Encoded blocks of prefixes, of one model under one recipe.

    path       a folder that processes share; None: this process' memory
    recipe     how tokens are encoded;   geometry   of the model;   tensors   of an artifact, if the recipe is fitted
    model      text that differs for models whose keys and values differ: weights, revision, and part of the model,
               where processes hold parts
    dtype      of the model's keys and values
    rotary     the model's rotation; needed where "positions" is among `recipe.needs`
    salt       of a tenant: blocks that are put under one are found under no other
    budget     bytes on the shelf: a number, or text such as "20GB"
    promised   what the fit promises of errors, so that of a block beyond tokens are kept beside codes; None: nothing
    threads    that make files of blocks, and read them, beside the caller's; None: one for each processor that this
               process may use, at most MOST_THREADS

    Raises ValueError for a recipe whose blocks cannot be kept, ArtifactError for a folder that others can write to,
    RuntimeError where the library is missing that codes a recipe's files.
    """

    def __init__(
        self,
        path: str | Path | None,
        recipe: Recipe,
        geometry: Geometry,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        model: str,
        dtype: torch.dtype = torch.bfloat16,
        rotary: Rotary | None = None,
        salt: str = "",
        budget: str | int = "20GB",
        promised: Check | None = None,
        threads: int | None = None,
    ):
        check(recipe)
        own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.threads = min(MOST_THREADS, own) if threads is None else threads
        if self.threads < 1:
            raise ValueError(f"threads={threads}; use 1 or more")
        promised = promised if promised is not None and promised.promises else None
        self.coder = Coder(recipe, geometry, tensors or {}, rotary, promised)
        self.format = BlockFormat(recipe, geometry, dtype, self.coder.tensors, promised is not None,
                                  bool(recipe.window.sinks) and entropy.found())  # fmt: skip
        if self.format.coded:
            entropy.check()
        self.budget = parse_bytes(budget)
        if self.format.usual() > self.budget:
            raise ValueError(f"budget={budget!r}; one block of {recipe.name} takes {self.format.usual()} bytes")
        self.together = max(1, min(TOGETHER, HELD // self.format.usual()))  # blocks of a run
        described = sets.of(self.format, model, tensors or {})
        digest = sets.digest(described)
        self.root = chain.root(digest, salt)
        self.shelf: Shelf = (
            Memory(self.budget) if path is None else Folder(Path(path).expanduser(), described, digest, self.budget)
        )
        # read, written: bytes of blocks; damaged, unreadable: blocks; beyond: keys or values of a layer
        self.tally: Counter[str] = Counter()
        self._said: set[str] = set()
        self._refused: set[str] = set()  # reasons since a block was last written

    def under(self, salt: str) -> "PrefixBlocks":
        """The same store for a tenant of this one's: other chains, on the same shelf. Without a salt it is itself."""
        if not salt:
            return self
        found = copy(self)
        found.root = chain.tenant(self.root, salt)
        return found

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.format.recipe.window.block

    def longest(self, tokens: Tensor | Iterable[int]) -> int:
        """Return how many of these tokens, from the first on, are kept; their blocks are not read, so not checked."""
        count = 0
        for name in chain.names(self.root, chain.token_row(tokens), self.block):
            if not self.shelf.has(name):
                break
            count += 1
        return count * self.block

    def put(
        self, tokens: Tensor | Iterable[int], keys: Sequence[Tensor], values: Sequence[Tensor], start: int = 0
    ) -> int:
        """Keep the whole blocks of a prefix; returns how many tokens of it are kept now.

        keys     of each layer, after RoPE, [T, H, D] or [T, C]: those of tokens `start` to start + T
        values   the same
        start    the first token of the rows, a multiple of `block`; all before it should be kept already
        Blocks that are kept are not encoded again. OSError: the disk refused; the blocks before it are kept.
        """
        if start % self.block:
            raise ValueError(f"start={start}; give rows from a multiple of {self.block} on")
        count = self.format.geometry.layers
        if not len(keys) == len(values) == count:
            raise ValueError(f"rows of {len(keys)} and {len(values)} layers; the store holds {count}")
        pairs = [(k.flatten(1), v.flatten(1)) for k, v in zip(keys, values, strict=True)]
        self._check_dtype(pairs[0][1].dtype)
        stop = start + min(len(x) for pair in pairs for x in pair)

        def rows(number: int, end: int) -> list[Block]:
            span = slice(number * self.block - start, end * self.block - start)
            return self.coder.encode_run(number, {n: (k[span], v[span]) for n, (k, v) in enumerate(pairs)})

        return self._keep(chain.token_row(tokens)[:stop], rows, start // self.block)

    def put_cache(self, tokens: Tensor | Iterable[int], cache: BlockCache, row: int = 0) -> int:
        """The same of one row of a cache, whose encoded blocks are kept as they are; whole blocks of the exact window
        are encoded. Raises ValueError for a cache with padding, or with positions that do not count from 0."""
        positions = cache.positions
        if positions.real_BT is not None or positions.elsewhere or positions.dropped:
            raise ValueError(
                "the cache has padded or dropped slots, or positions that do not count from 0; keep rows one by one, "
                "without padding"
            )
        token_T = chain.token_row(tokens)[: cache.length]
        if not len(token_T):
            return 0
        self._check_dtype(next(iter(cache.layers.values())).buffer_2BTC.dtype)
        encoded = min(store.blocks for store in cache.layers.values())

        def some(number: int, end: int) -> list[Block]:
            if number < encoded:
                return [coder.held(cache, number, row)]
            return self.coder.encode_run(number, coder.window_rows(cache, number, end, row))

        return self._keep(token_T, some, 0)

    def load(self, tokens: Tensor | Iterable[int], limit: int | None = None, start: int = 0) -> list[Block]:
        """The kept blocks of these tokens from token `start` on, checked: of the first `limit` tokens at most.

        A damaged block, and all after it, are missing; it is removed, with a warning.
        """
        return [*self._found(tokens, limit, start)]

    def checked(self, tokens: Tensor | Iterable[int], limit: int | None = None, start: int = 0) -> int:
        """Return how many of these tokens, from the first on, `load` would find now; it trusts those before `start`."""
        return start + self.block * sum(1 for _ in self._found(tokens, limit, start))

    def decode(
        self, blocks: Sequence[Block], device: torch.device | str = "cpu", start: int = 0
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(layer, keys after RoPE, values), [tokens, H, D] in the model's dtype, of the layers in order.

        start   how many tokens are before the first of these blocks
        The two are valid until the next layer is asked for, which is decoded into the same memory.
        """
        return self.coder.decode(blocks, device, start)

    def _found(self, tokens: Tensor | Iterable[int], limit: int | None, start: int) -> Iterator[Block]:
        if start % self.block:
            raise ValueError(f"start={start}; blocks begin at multiples of {self.block}")
        token_T = chain.token_row(tokens)
        token_T = token_T if limit is None else token_T[: max(0, limit)]
        names = chain.names(self.root, token_T, self.block)
        count = start // self.block

        def begun(number: int) -> Future[tuple[Block, int] | None]:
            parse = partial(self.format.from_bytes, link=self._link(names, token_T, number))
            return pool.submit(self._got, names[number], parse)

        with ThreadPoolExecutor(self.threads) as pool:
            for number, future in self._ahead(begun, range(count, len(names)), self.threads):
                block = self._counted(names[number], f"block {number} of a kept prefix", future.result)
                if block is None:
                    break
                self._allowed(number, block)
                count = number + 1
                yield block
        self.shelf.used(names[:count])

    def _check_dtype(self, dtype: torch.dtype) -> None:
        if dtype != self.format.dtype:
            raise ValueError(
                f"keys and values are {dtype}, the store's {self.format.dtype}; make a store of their dtype, or do not "
                "run the model under autocast"
            )

    def _keep(self, token_T: Tensor, encoded: Callable[[int, int], list[Block]], first: int) -> int:
        names = chain.names(self.root, token_T, self.block)[: max(1, self.budget // self.format.usual())]
        gone = next((number for number, name in enumerate(names[:first]) if not self.shelf.has(name)), None)
        names = names if gone is None else names[:gone]  # what follows could not be found
        ready: dict[int, Block] = {}

        def begun(number: int) -> Future[bytes] | None:
            if number < first or self.shelf.has(names[number]):
                return None
            if number not in ready:
                ready.clear()
                end = min(len(names), number + self.together)
                end = next((n for n in range(number + 1, end) if self.shelf.has(names[n])), end)
                ready.update(zip(counting(number), encoded(number, end), strict=False))
            block = ready.pop(number).cpu()  # here, where the device's stream is the caller's
            self._allowed(number, block)
            self._count_beyond(block)
            return pool.submit(self.format.to_bytes, block, self._link(names, token_T, number))

        kept = 0
        with ThreadPoolExecutor(self.threads) as pool:
            for number, future in self._ahead(begun, range(len(names)), self.threads + self.together):
                if future is not None:
                    self._written(names[number], future.result())
                elif not self.shelf.has(names[number]):
                    break  # what was written since has evicted it
                kept = number + 1
        self.shelf.used(names[:kept])
        return kept * self.block

    def _ahead(self, begun: Callable[[int], T], numbers: Iterable[int], most: int) -> Iterator[tuple[int, T]]:
        """Begin the work of each number, at most so many ahead of what the caller takes, in order."""
        waiting: deque[tuple[int, T]] = deque()
        for number in numbers:
            try:
                waiting.append((number, begun(number)))
            except Exception:
                yield from waiting  # what was begun before is good
                raise
            if len(waiting) > most:
                yield waiting.popleft()
        yield from waiting

    def _link(self, names: Sequence[str], token_T: Tensor, number: int) -> Link:
        span = slice(number * self.block, (number + 1) * self.block)
        return Link(self.root, names[number - 1] if number else self.root, number, tuple(token_T[span].tolist()))

    def write(self, name: str, block: Block, link: Link) -> None:
        """Put a block on the shelf, and count it."""
        self._count_beyond(block)
        self._written(name, self.format.to_bytes(block, link))

    def _allowed(self, number: int, block: Block) -> None:
        """Raise RuntimeError for a block of which something is beyond, where nothing may be."""
        if block.exact and self.coder.check is not None and self.coder.check.strict:
            layer, role = min(block.exact)
            raise RuntimeError(
                f"layer {layer}, block {number}: the error of its {ROLES[role]}s is beyond what calibration promised; "
                "without strict=True they are kept beside their codes"
            )

    def _count_beyond(self, block: Block) -> None:
        """Count keys and values that are beyond; say it, once, where these are more than a quarter of a block."""
        count, sites = len(block.exact), 2 * self.format.geometry.layers
        self.tally["beyond"] += count
        if 4 * count > sites and not self._said:
            self._said.add("beyond")
            _log.warning(
                "%s: %d of the %d keys and values of a block, one each a layer, are beyond what calibration promised, "
                "from layer %d on, and are kept once more beside their codes, so that files save less than the "
                "recipe's bits say: no surprise of a few blocks, of many a sign of other text, or another model, than "
                "the fit's (said once)",
                self.format.recipe.name, count, sites, min(block.exact)[0],
            )  # fmt: skip

    def read(self, name: str, what: str, parse: Callable[[bytes], T]) -> T | None:
        """Parse a file of the shelf, and count it; None: it is missing, unreadable, or damaged, which the log says of
        `what`."""
        return self._counted(name, what, lambda: self._got(name, parse))

    def refused(self, error: Exception) -> None:
        """Say in the log that blocks are not kept, and why: once, until a block is written again."""
        why = spoken(error)
        if why not in self._refused:
            self._refused.add(why)
            _log.warning("blocks of a prefix are not kept: %s (said once, until one is kept)", why)

    def _written(self, name: str, data: bytes) -> None:
        self.shelf.put(name, data)
        self._refused.clear()
        self.tally["written"] += len(data)

    def _got(self, name: str, parse: Callable[[bytes], T]) -> tuple[T, int] | None:
        data = self.shelf.get(name, self.format.largest())
        return None if data is None else (parse(data), len(data))

    def _counted(self, name: str, what: str, got: Callable[[], tuple[T, int] | None]) -> T | None:
        try:
            found = got()
            if found is None:
                return None
            self.tally["read"] += found[1]
            return found[0]
        except ArtifactError as error:
            self.tally["damaged"] += 1
            _log.warning("%s is damaged, and removed: %s: %s", what, name, error)
            self.shelf.drop(name)
        except OSError as error:
            self.tally["unreadable"] += 1
            _log.warning("%s cannot be read: %s", what, error)
        return None


def check(recipe: Recipe) -> None:
    """Raise ValueError, a sentence, for a recipe whose blocks mean nothing in another cache."""
    why = None
    if recipe.fits_prompt:
        why = "is fitted to each prompt, so that its blocks mean nothing in another cache; use the calibrated recipe"
    elif recipe.arrival_dependent:
        why = (
            "decides by how tokens arrive what is held, so that equal tokens do not have equal blocks; use the recipe "
            "without that choice"
        )
    elif recipe.policies:
        kinds = " and ".join(policy.kind for policy in recipe.policies)
        why = f"reads what {kinds} stores beside a block, which is not kept; use the recipe without it"
    elif recipe.window.block > LARGEST_BLOCK:
        why = f"encodes {recipe.window.block} tokens together; at most {LARGEST_BLOCK} are kept as one block"
    if why is not None:
        raise ValueError(f"{recipe.name} {why}")
