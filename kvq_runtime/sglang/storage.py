"""Keep SGLang's prefixes encoded in a folder: a storage backend of its hierarchical cache (HiCache).

    --enable-hierarchical-cache --page-size 128 --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvq", "module_path": "kvq_runtime.sglang.storage",
        "class_name": "KVQStorage", "interface_v1": 1, "hicache_storage_pass_prefix_keys": true,
        "path": "/var/prefixes", "recipe": "qwen2.5-7b-aqua-2bit@production", "model": "Qwen/Qwen2.5-7B"}'

SGLang's own pools stay as they are, in 16 bits: a page, keys and values of all layers of some tokens, is encoded on its
way from the host's memory to the folder, and decoded on its way back. When a page is written, the keys of those before
it tell its position, which its blocks then hold: so recipes which predict across layers or encode keys before RoPE are
kept as all others, and a page is found by its own key.

SGLang gives no tokens, but of each page a hash of all tokens up to its end, with the request's salt. In a block's file
words of that hash stand in the place of the tokens: what is compared is then the hash. Pinned to SGLang 0.5.23.
"""

import logging
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo
from torch import Tensor

from kvq_runtime.engines import keeper, source
from kvq_runtime.engines.keeper import Served
from kvq_runtime.errors import ArtifactError
from kvq_runtime.hf.model import rotary_of_folder
from kvq_runtime.prefix.block_file import Block, Link
from kvq_runtime.prefix.store import PrefixBlocks

OPTION = "--hicache-storage-backend-extra-config"
ITS_OWN = ("backend_name", "module_path", "class_name", "interface_v1")  # of the option's parts those that SGLang reads
LAYOUTS = {  # of a page in the host's pool → [2, layers, tokens, heads, head size]
    "layer_first": (0, 1, 2, 3, 4),
    "page_first": (0, 2, 1, 3, 4),
    "page_first_direct": (0, 1, 2, 3, 4),
    "page_head": (0, 3, 2, 1, 4),
}
_log = logging.getLogger("sglang.kvq")


class KVQStorage(HiCacheStorage):
    """The part of a folder of kept prefixes that is one worker's.

    Of the option's parts `path`, `recipe`, `budget`, `threads` are those of `keeper.Settings`; `model` and `revision`
    name the served model, whose files are on this machine, `quantization` how its weights are quantized as they load.
    Raises ValueError, ArtifactError or NotFound, a sentence, for what cannot be kept, so that SGLang does not start.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None):
        extra = {name: part for name, part in (storage_config.extra_config or {}).items() if name not in ITS_OWN}
        if not (storage_config.extra_config or {}).get("interface_v1"):
            raise ValueError(f'KVQStorage: add "interface_v1": 1 to {OPTION}; without it SGLang tells no positions')
        if storage_config.is_mla_model or storage_config.pp_size > 1 or storage_config.attn_cp_size > 1:
            raise ValueError(
                "KVQStorage: a worker has to hold keys and values of all layers and tokens; latents (MLA), pipeline "
                "and context parallelism are not kept"
            )
        names = {name: extra.pop(name, None) for name in ("model", "revision", "quantization")}
        if not names["model"]:
            raise ValueError(f'KVQStorage: {OPTION} lacks "model", the served model: a folder, or an id on a Hub')
        if ignored := sorted({"recent", "pending"} & extra.keys()):
            raise ValueError(f"KVQStorage: {OPTION} has {', '.join(ignored)}, which SGLang decides; leave it out")
        self._settings = keeper.settings(extra, OPTION, f"KVQStorage, beside {', '.join(names)}")
        self._model, self._rank = names, (storage_config.tp_size, storage_config.tp_rank)
        self._warned = False

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the folder for the pool that pages are read from and written to."""
        super().register_mem_pool_host(mem_pool_host)
        pool, model, revision = mem_pool_host, self._model["model"], self._model["revision"]
        if pool.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(
                f"KVQStorage: SGLang's pool holds {pool.dtype}; serve without --kv-cache-dtype, or with bfloat16"
            )
        if pool.layout not in LAYOUTS:
            raise ValueError(f"KVQStorage: --hicache-mem-layout {pool.layout}; pages are read in {', '.join(LAYOUTS)}")
        served = Served(
            source.config(model, revision), model, revision, pool.dtype, self._model["quantization"],
            partial(rotary_of_folder, source.folder(model, revision) or Path(model), pool.dtype),
        )  # fmt: skip
        (store,) = keeper.opened(self._settings, served, "KVQStorage", *self._rank)
        shape, own = store.format.geometry, (pool.layer_num, pool.head_num, pool.head_dim)
        if own != (shape.layers, shape.kv_heads, shape.head_size):
            raise ValueError(
                f"KVQStorage: SGLang's pool has {own[0]} layers, {own[1]} heads of {own[2]}; {model} has "
                f"{shape.layers}, {shape.kv_heads} heads of {shape.head_size} a worker; draft models are not kept"
            )
        if pool.page_size % store.block:
            raise ValueError(
                f"KVQStorage: pages of {pool.page_size} tokens; {store.format.recipe.name} encodes {store.block} "
                f"together: --page-size {store.block}, or a multiple of it"
            )
        self.store: PrefixBlocks = store

    # ---- what SGLang asks

    @torch.inference_mode()
    def batch_set_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Keep pages; of each, True if it is kept now."""
        before = None if extra_info is None else extra_info.prefix_keys
        if before is None:
            if not self._warned:
                self._warned = True
                _log.warning('nothing is kept: add "hicache_storage_pass_prefix_keys": true to %s', OPTION)
            return [False] * len(keys)
        firsts = self._firsts(keys, host_indices)
        return [self._keep(key, len(before) + place, firsts[place]) for place, key in enumerate(keys)]

    def _keep(self, key: str, number: int, first: int) -> bool:
        """Keep page `number` of a text, which lies in the pool from slot `first` on."""
        store, names = self.store, self._names(key)
        try:
            page = self._page(first)
            for place, name in enumerate(names):
                if store.shelf.has(name):
                    continue
                rows = page[:, :, place * store.block : (place + 1) * store.block].flatten(3)
                link = self._link(key, number * len(names) + place)
                pairs = {layer: (k, v) for layer, (k, v) in enumerate(rows.unbind(1))}
                (block,) = store.coder.encode_run(link.number, pairs)
                store.write(name, block, link)
        except (OSError, ValueError, RuntimeError) as error:  # a full disk, NaN
            store.refused(error)
            return False
        store.shelf.used(names)
        return True

    @torch.inference_mode()
    def batch_get_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Decode pages into the host's pool; those behind one that is damaged, or missing, are not there."""
        blocks, start, found = list[Block](), 0, 0
        for key in keys:
            page = self._load(key)
            if page is None or (found and page[0] != start + len(blocks)):
                break
            start, found = start if found else page[0], found + 1
            blocks += page[1]
        pages = [self._page(first) for first in self._firsts(keys, host_indices)[:found]]
        try:
            for layer, k_THD, v_THD in self.store.decode(blocks, start=start * self.store.block) if pages else ():
                for role, x_THD in enumerate((k_THD, v_THD)):
                    for page, part in zip(pages, x_THD.split(self._tokens), strict=True):
                        page[role, layer] = part
        except (ValueError, RuntimeError) as error:
            _log.warning("kept pages cannot be decoded, and are computed: %s", error)
            found = 0
        return [place < found for place in range(len(keys))]

    def _load(self, key: str) -> tuple[int, list[Block]] | None:
        """The number of a page's first block in its text, and its blocks; None if one is missing, or damaged."""
        blocks, first, names = list[Block](), 0, self._names(key)

        def parse(data: bytes, place: int) -> tuple[Link, Block]:
            link, block = self.store.format.read(data)
            if link != self._link(key, link.number) or (link.number - place) % len(names):
                raise ArtifactError("chain: the file is of another page")
            return link, block

        for place, name in enumerate(names):
            found = self.store.read(name, "a kept page", partial(parse, place=place))
            if found is None:
                return None
            first = found[0].number - place
            blocks.append(found[1])
        self.store.shelf.used(names)
        return first, blocks

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many of these pages, from the first on, are kept; their files are not read, so not checked."""
        for place, key in enumerate(keys):
            if not all(map(self.store.shelf.has, self._names(key))):
                return place
        return len(keys)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def _alone(self, *given: Any, **named: Any) -> Any:
        """Raise NotImplementedError: what SGLang asks without "interface_v1", which `__init__` demands."""
        raise NotImplementedError('pages alone have no position: "interface_v1": 1')

    get = batch_get = set = batch_set = _alone

    def clear(self) -> None:
        """Nothing: other servers use the folder, whose budget bounds it; `kvq prefix gc` empties it."""
        _log.warning("%s is left as it is; kvq prefix gc removes blocks", self._settings.path)

    # ---- pages

    @property
    def _tokens(self) -> int:
        return self.mem_pool_host.page_size

    def _names(self, key: str) -> list[str]:
        """The names of the blocks of a page."""
        count = self._tokens // self.store.block
        return [sha256(f"kvq page\0{self.store.root}\0{key}\0{place}".encode()).hexdigest() for place in range(count)]

    def _link(self, key: str, number: int) -> Link:
        """The place of block `number` of a text, in a page of this key; words of its hash stand for the tokens."""
        digest = sha256(key.encode())
        words = [int.from_bytes(digest.digest()[place : place + 2], "little") for place in range(0, 32, 2)]
        tokens = tuple(words[place % len(words)] for place in range(self.store.block))
        return Link(self.store.root, digest.hexdigest(), number, tokens)

    def _firsts(self, keys: Sequence[str], host_indices: Tensor) -> list[int]:
        """The first slot of each page in the host's pool."""
        if len(host_indices) != len(keys) * self._tokens:
            raise ValueError(f"{len(host_indices)} slots of {len(keys)} pages of {self._tokens} tokens")
        return host_indices[:: self._tokens].tolist()

    def _page(self, first: int) -> Tensor:
        """A page in the pool itself: keys and values, [2, layers, tokens, heads, head size]."""
        pool = self.mem_pool_host
        page = pool.get_data_page(first, flat=False)
        if page.ndim == 6:  # of pages, this one
            page = page[:, 0]
        return page.permute(LAYOUTS[pool.layout])
