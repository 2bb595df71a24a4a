"""Keep SGLang's prefixes encoded in a folder: a storage backend of its hierarchical cache (HiCache).

    --enable-hierarchical-cache --page-size 128 --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvq", "module_path": "kvq_runtime.sglang.storage",
        "class_name": "KVQStorage", "interface_v1": 1, "hicache_storage_pass_prefix_keys": true,
        "path": "/var/prefixes", "recipe": "qwen2.5-7b-aqua-2bit@production", "model": "Qwen/Qwen2.5-7B"}'

SGLang's own pools stay as they are, in 16 bits: a page, keys and values of all layers of some tokens, is encoded on its
way from the host's memory to the folder, and decoded on its way back. The keys of the pages before it tell its
position, so that recipes which predict across layers or encode keys before RoPE are kept as all others.

SGLang gives no tokens, but of each page a hash of all tokens up to its end, with the request's salt. In a block file
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

from kvq_runtime.engines import kept, source
from kvq_runtime.engines.kept import Served
from kvq_runtime.hf.model import rotary_of_folder
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

    Of the option's parts `path`, `recipe`, `budget` are those of `kept.Settings`; `model` and `revision` name the
    served model, whose files are on this machine, `quantization` how its weights are quantized as they are loaded.
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
        self._settings = kept.settings(extra, OPTION, f"KVQStorage, beside {', '.join(names)}")
        self._names, self._rank = names, (storage_config.tp_size, storage_config.tp_rank)
        self._warned = False

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the folder for the pool that pages are read from and written to."""
        super().register_mem_pool_host(mem_pool_host)
        pool, model, revision = mem_pool_host, self._names["model"], self._names["revision"]
        if pool.layout not in LAYOUTS:
            raise ValueError(f"KVQStorage: --hicache-mem-layout {pool.layout}; pages are read in {', '.join(LAYOUTS)}")
        served = Served(
            source.config(model, revision), model, revision, pool.dtype, self._names["quantization"],
            partial(rotary_of_folder, source.folder(model, revision) or Path(model), pool.dtype),
        )  # fmt: skip
        (store,) = kept.opened(self._settings, served, "KVQStorage", *self._rank)
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
        """Keep pages; of each, True if it and all before it are kept now."""
        before = self._before(extra_info)
        if before is None:
            return [False] * len(keys)
        rows = torch.cat([self._page(first) for first in self._firsts(keys, host_indices)], 2)
        try:
            start, (keys_LTHD, values_LTHD) = len(before) * self._tokens, rows
            kept_now = self.store.put(self._ids([*before, *keys]), [*keys_LTHD], [*values_LTHD], start)
        except (OSError, ValueError, RuntimeError) as error:  # a full disk, NaN
            _log.warning("pages are not kept: %s", error)
            kept_now = self.store.longest(self._ids([*before, *keys]))
        return [kept_now >= (len(before) + number + 1) * self._tokens for number in range(len(keys))]

    @torch.inference_mode()
    def batch_get_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Decode pages into the host's pool; those behind a damaged block are not there."""
        before = self._before(extra_info)
        if before is None:
            return [False] * len(keys)
        start = len(before) * self._tokens
        try:
            blocks = self.store.load(self._ids([*before, *keys]), start=start)
            count = len(blocks) * self.store.block // self._tokens
            pages = [self._page(first) for first in self._firsts(keys, host_indices)[:count]]
            if pages:
                whole = blocks[: count * self._tokens // self.store.block]
                for layer, k_THD, v_THD in self.store.decode(whole, start=start):
                    for role, x_THD in enumerate((k_THD, v_THD)):
                        for page, part in zip(pages, x_THD.split(self._tokens), strict=True):
                            page[role, layer] = part
        except (ValueError, RuntimeError) as error:
            _log.warning("kept pages cannot be decoded, and are computed: %s", error)
            count = 0
        return [number < count for number in range(len(keys))]

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many of these pages, from the first on, are kept; their files are not read, so not checked."""
        before = self._before(extra_info)
        if before is None:
            return 0
        return max(0, self.store.longest(self._ids([*before, *keys])) // self._tokens - len(before))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key], HiCacheStorageExtraInfo([])) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Tensor | None:
        raise NotImplementedError('a page alone has no position: "interface_v1": 1')

    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any:
        raise NotImplementedError('pages alone have no position: "interface_v1": 1')

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        raise NotImplementedError('a page alone has no position: "interface_v1": 1')

    def batch_set(self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        raise NotImplementedError('pages alone have no position: "interface_v1": 1')

    def clear(self) -> None:
        """Nothing: other servers use the folder, whose budget bounds it; `kvq prefix gc` empties it."""
        _log.warning("%s is left as it is; kvq prefix gc removes blocks", self._settings.path)

    # ---- pages

    @property
    def _tokens(self) -> int:
        return self.mem_pool_host.page_size

    def _before(self, extra_info: HiCacheStorageExtraInfo | None) -> Sequence[str] | None:
        """The keys of the pages before; None, with a warning, where SGLang does not tell them."""
        found = None if extra_info is None else extra_info.prefix_keys
        if found is None and not self._warned:
            self._warned = True
            _log.warning('nothing is kept: add "hicache_storage_pass_prefix_keys": true to %s', OPTION)
        return found

    def _ids(self, keys: Sequence[str]) -> list[int]:
        """What stands in the place of the tokens of pages: words of 16 bits of each key's hash, over and over."""
        found: list[int] = []
        for key in keys:
            digest = sha256(key.encode()).digest()
            words = [int.from_bytes(digest[place : place + 2], "little") for place in range(0, len(digest), 2)]
            found += [words[place % len(words)] for place in range(self._tokens)]
        return found

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
