"""Keep a prefix of the embedded model in LMCache's file tier: bytes, MB/s a core, and what the round trip costs.

    PYTHONPATH=build/lmcache:. .venv/bin/python -m benchmarks.lmcache_chunks
        [--model FOLDER] [--text FILE] [--json FILE] [RECIPE ...]

A row each: without a serde, by LMCache's `fp8` and `turboquant` (bytes alone: its kernels want CUDA), and by kvq's
recipes, or artifacts. A prompt of KEPT tokens is computed in bfloat16, stored in chunks of 256, and loaded by a storage
manager that was started anew. Loss, and KL divergence (nats) from the pass without a serde, are of the TOKENS after it,
in one pass that attends to what was loaded; divergence is the first of GREEDY tokens that differs from the text without
a serde.
MB are of 16-bit keys and values; times are processor seconds of one thread, the fastest of three, of the serde alone.
"""

import argparse
import json
import tempfile
import time
import timeit
from argparse import Namespace
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.mp_observability.event_bus import EventBusConfig, get_event_bus, init_event_bus
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvq_runtime.hf.model import CACHE

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "artifacts" / "demo-model"
CHUNK, KEPT, TOKENS, GREEDY = 256, 1024, 512, 32
RECIPES = ("exact", "rtn-4bit", "lloyd-3bit", "higgs-2bit", "kivi-2bit")
PATIENCE = 120  # seconds
PLUGIN = {"type": "plugin", "module_path": "kvq_runtime.prefix.lmcache", "class_name": "Adapter"}
Serde = dict[str, Any] | None


def adapter(folder: Path, serde: Serde) -> dict[str, Any]:
    """The settings of an adapter that keeps files in a folder, as `--l2-adapter` has them."""
    files = {"type": "fs", "base_path": str(folder)}
    if serde is None:
        return files
    return (PLUGIN | {"adapter_params": files} if serde["type"] == "kvq" else files) | {"serde": serde}


def keys(text: str, count: int) -> list[ObjectKey]:
    """The keys of a text's first chunks, of one worker."""
    rank = ObjectKey.ComputeKVRank(world_size=1, global_rank=0, local_world_size=1, local_rank=0)
    return [ObjectKey(sha256(f"{text} {n}".encode()).digest(), "demo", rank) for n in range(count)]


def tell(names: Sequence[ObjectKey], size: int) -> None:
    """Say where a text's first chunks begin, as LMCache's server does; `size` is the tokens of a chunk."""
    starts = {"token_offsets": [size * place for place in range(len(names))]}
    hashes = {"chunk_hashes": [name.chunk_hash for name in names]}
    get_event_bus().publish(Event(EventType.MP_TOKENS, metadata=hashes | starts))


class Tier:
    """LMCache's storage manager over one adapter, as its server has it, to put chunks into and get them from.

    It copies what it is given into its memory, lets the adapter store it, and forgets it when it is closed. Chunks are
    of any layout of LMCache's (`prefix/lmcache_chunk.py`). Raises what LMCache or the serde says of its settings.
    """

    def __init__(self, folder: Path, serde: Serde, memory: int = 1 << 28):
        self.folder = folder
        if not get_event_bus().enabled:
            init_event_bus(EventBusConfig()).start()
        settings = Namespace(l2_adapter=[json.dumps(adapter(folder, serde))])
        memory_config = L1MemoryManagerConfig(size_in_bytes=memory, use_lazy=False, shm_name="")
        self.manager = StorageManager(
            StorageManagerConfig(
                l1_manager_config=L1ManagerConfig(memory_config),
                eviction_config=EvictionConfig("noop"),
                l2_adapter_config=parse_args_to_l2_adapters_config(settings),
            )
        )

    def __enter__(self) -> "Tier":
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()

    def put(self, names: Sequence[ObjectKey], chunks: Sequence[Tensor], stored: bool = True, told: bool = True) -> None:
        """Store a text's first chunks, of one shape; return when the files are there, or at once if they need not be
        `stored`. Where they begin is `told` before, as by the server."""
        if told:
            tell(names, chunks[0].shape[-2])
        layout = MemoryLayoutDesc([chunks[0].shape], [chunks[0].dtype])
        reserved = self.manager.reserve_write(list(names), layout)
        for name, chunk in zip(names, chunks, strict=True):
            held = reserved[name].tensor
            assert held is not None
            held.copy_(chunk)
        self.manager.finish_write(list(names))
        until = time.monotonic() + PATIENCE
        while stored and len(list(self.folder.glob("*.data"))) < len(names):
            if time.monotonic() > until:
                raise TimeoutError(f"LMCache has not stored {len(names)} chunks in {PATIENCE} s")
            time.sleep(0.01)

    def get(self, names: Sequence[ObjectKey], like: Tensor) -> list[Tensor]:
        """The chunks that it has of a prefix, at most all; `like` has their shape and dtype."""
        layout = MemoryLayoutDesc([like.shape], [like.dtype])
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(list(names), 0, layout)]))
        if not self.manager.wait_prefetch_status(handle, PATIENCE):
            raise TimeoutError(f"LMCache has not looked up {len(names)} chunks in {PATIENCE} s")
        result = self.manager.query_prefetch_status(handle)
        assert result is not None
        hits = list(names)[: result.hit_cells[0].popcount()]
        if not hits:
            return []
        with self.manager.read_prefetched_results(hits, result.l1_owners) as held:
            assert held is not None
            found = [one.tensor.clone() for one in held if one.tensor is not None]
        self.manager.finish_read_prefetched(hits, l1_owners=result.l1_owners)
        return found


@torch.no_grad()
def main() -> None:
    """Print a row of JSON each, and write them all with --json."""
    import kvq_runtime.prefix.lmcache  # noqa: F401  registers "kvq"

    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("recipes", nargs="*", default=RECIPES)
    top.add_argument("--model", type=Path, default=MODEL)
    top.add_argument("--text", type=Path, default=ROOT / "docs" / "architecture.md")
    top.add_argument("--json", metavar="FILE")
    args = top.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    text = args.text.read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(args.model)(text, return_tensors="pt").input_ids[:, : KEPT + TOKENS]
    cache = DynamicCache(config=model.config)
    model(ids[:, :KEPT], **{CACHE: cache})
    chunks = _chunks(cache)
    head = model.config.head_dim
    serdes: dict[str, Serde] = {"none": None, "fp8": {"type": "fp8"}}
    for bits in ("k8v4", "4bit_nc", "3bit_nc"):
        serdes[f"turboquant_{bits}"] = {"type": "turboquant", "preset": f"turboquant_{bits}", "head_dim": head}
    serdes |= {f"kvq {name}": {"type": "kvq", "cache": name, "model": str(args.model)} for name in args.recipes}
    rows, plain, exact = [], None, None
    for name, serde in serdes.items():
        row: dict[str, Any] = {"serde": name}
        if serde is not None and serde["type"] == "turboquant":
            row["bytes"] = _stated(serde, chunks[0]) * len(chunks)
        else:
            loaded, row["bytes"] = _round_trip(serde, chunks)
            logits, answer = _logits(model, loaded, ids), _greedy(model, loaded, ids)
            plain, exact = (logits, answer) if plain is None else (plain, exact)
            row["loss"] = round(float(-logits.gather(1, ids[0, KEPT + 1 :, None]).mean()), 4)
            row["kl"] = round(float((plain.exp() * (plain - logits)).sum(-1).mean()), 5)
            differ = (answer != exact).nonzero()
            row["first_divergence"] = int(differ[0]) if len(differ) else None
        row["times_smaller"] = round(sum(chunk.nbytes for chunk in chunks) / row["bytes"], 2)
        if serde is not None and serde["type"] != "turboquant":
            row |= _times(serde, chunks)
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.json:
        record = {"benchmark": "lmcache", "model": args.model.name, "tokens": KEPT, "chunk": CHUNK, "rows": rows}
        Path(args.json).write_text(json.dumps(record) + "\n")


def _chunks(cache: DynamicCache) -> list[Tensor]:
    """[2, L, CHUNK, C] each."""
    layers: list[Any] = cache.layers
    pairs = [torch.stack([x[0].transpose(0, 1).flatten(1) for x in (one.keys, one.values)]) for one in layers]
    return [chunk.contiguous() for chunk in torch.stack(pairs, 1).split(CHUNK, 2)]


def _cache(model, chunks: Sequence[Tensor]) -> DynamicCache:
    """A cache that holds these chunks."""
    cache, heads = DynamicCache(config=model.config), model.config.num_key_value_heads
    for layer, pair in enumerate(torch.cat(list(chunks), 2).unbind(1)):
        k_BHTD, v_BHTD = (x.unflatten(-1, (heads, -1)).transpose(0, 1)[None].contiguous() for x in pair)
        cache.update(k_BHTD, v_BHTD, layer)
    return cache


def _stated(serde: dict[str, Any], chunk: Tensor) -> int:
    processor = create_serde_processor(SerdeConfig(serde["type"], {k: v for k, v in serde.items() if k != "type"}))
    try:
        return processor.estimate_serialized_size(MemoryLayoutDesc([chunk.shape], [chunk.dtype]))
    finally:
        processor.close()


def _round_trip(serde: Serde, chunks: list[Tensor]) -> tuple[list[Tensor], int]:
    """Load by another storage manager what one has stored; and the bytes of the files."""
    with tempfile.TemporaryDirectory() as path:
        folder, names = Path(path), keys("a prompt", len(chunks))
        with Tier(folder, serde) as tier:
            tier.put(names, chunks)
        stored = sum(file.stat().st_size for file in folder.glob("*.data"))
        with Tier(folder, serde) as tier:
            loaded = tier.get(names, chunks[0])
    assert len(loaded) == len(chunks), f"{len(loaded)} of {len(chunks)} chunks came back"
    return loaded, stored


def _logits(model, loaded: Sequence[Tensor], ids: Tensor) -> Tensor:
    """Log-probabilities of the tokens after the kept ones, the first of them aside: nothing loaded predicts it."""
    logits = model(ids[:, KEPT:], **{CACHE: _cache(model, loaded)}).logits[0, :-1]
    return logits.float().log_softmax(-1)


def _greedy(model, loaded: Sequence[Tensor], ids: Tensor) -> Tensor:
    """The answer to the kept tokens and one more."""
    settings = {"max_new_tokens": GREEDY, "do_sample": False, "pad_token_id": 0}
    prompt = ids[:, : KEPT + 1]
    return model.generate(prompt, **{CACHE: _cache(model, loaded)}, **settings)[0, KEPT + 1 :]


def _times(serde: dict[str, Any], chunks: Sequence[Tensor]) -> dict[str, float]:
    """MB of 16 bits a second that the serde's two halves take, on this thread."""
    names, out = keys("a prompt", len(chunks)), torch.empty_like(chunks[0])
    with tempfile.TemporaryDirectory() as folder, Tier(Path(folder), serde) as tier:
        (wrapper,) = tier.manager._l2_adapters.values()
        processor = wrapper._serde
        size = processor.estimate_serialized_size(MemoryLayoutDesc([out.shape], [out.dtype]))
        room = [torch.zeros(size, dtype=torch.uint8) for _ in chunks]
        given, made, back = ([_held(x) for x in each] for each in (chunks, room, [out] * len(chunks)))
        processor._pool.shutdown()
        processor._pool = SimpleNamespace(submit=lambda work, *given: work(*given), shutdown=lambda wait: None)
        tell(names, CHUNK)

        def store() -> None:
            assert processor.query_serialize_result(processor.submit_serialize(given, made, names))

        def load() -> None:
            assert processor.query_deserialize_result(processor.submit_deserialize(made, back, names))

        megabytes = sum(chunk.nbytes for chunk in chunks) / 1e6
        works = {"store": store, "load": load}
        return {f"{name}_MB_per_s": round(megabytes / _fastest(work), 1) for name, work in works.items()}


def _held(x: Tensor) -> SimpleNamespace:
    """What LMCache hands to a serde."""
    return SimpleNamespace(tensor=x, get_shapes=lambda: [x.shape])


def _fastest(work: Callable[[], None]) -> float:
    return min(timeit.repeat(work, number=1, repeat=3, timer=time.thread_time))


if __name__ == "__main__":
    main()
