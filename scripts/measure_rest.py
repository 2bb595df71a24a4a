"""Measure kept prefixes: their bytes, what follows them, and how long it takes; of SmolLM2-135M by default.

    python -m scripts.measure_rest --corpus wiki.txt --artifacts rest-1bit.safetensors aqua-fisher-1bit.safetensors \\
        --kvtc 0.4 0.8 1.6 --recipes higgs-2bit --out rest.jsonl
    python -m scripts.measure_rest --model demo --corpus demo --recipes exact higgs-2bit demo-aqua-2bit --rounds 5

The model reads a prefix of a held-out text in 16 bits; its keys and values are kept, and restored into transformers'
own cache; the tokens after it are read from that in one pass. A JSON line each, means of windows:

    bits      of all that is kept, per element of the prefix's keys and values: codes, the frame, sinks as coded of
              bfloat16 numbers, and what is kept of blocks beyond what the artifact promises of errors (bits_exact)
    kl        divergence from the 16-bit model over the tokens that follow, in nats, and perplexity over its own
    first     which of --greedy tokens, chosen greedily after the prefix, is the first other one; null: none is
    put_cpu_* and load_cpu_*    processor seconds of `put` and `load_decoded` by stage, of all threads;
              *_MB_s_core, MB of 16-bit cache that a processor's core puts or loads in a second
    file_bytes, times_smaller    of all files of a prefix, as they lie on the disk, and than 16-bit keys and values
    computed  seconds in which the model reads the prefix
    put, load, load_decoded, first_token, first_token_recent, first_token_memory    seconds, with --rounds: of a
              folder's files, whose disk's cache is warm, the fastest, of a put one; the first token from it, with what
              the recipe keeps recent, and from 16 bits in memory; put_MB_s and so on, MB of 16-bit cache a second

Artifacts and recipes are kept by a PrefixStore, in whole blocks, so that prefixes are multiples of 128. `fp8` are e4m3
numbers, as LMCache keeps them; `lossless` are bfloat16 numbers, high and low bytes apart, by zstandard. `kvtc` is
`kvtc.py`, fitted here to --samples sequences of the fit part.

For processor seconds functions of the product are replaced by ones that read their thread's clock, so that what threads
do side by side is added up, and waiting is not counted. What one stage calls of another is the other's. What no stage
is, "other", is the rest of the process's time: of a process that does nothing else meanwhile.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
import timeit
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import zstandard
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from safetensors.torch import load as from_safetensors
from scripts.real_page import machine
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers.cache_utils import Cache, DynamicCache

from kvq_calib.evaluate.record import load_model
from kvq_calib.model import find as models
from kvq_calib.text import corpus
from kvq_runtime.artifact import artifact
from kvq_runtime.codec import codec
from kvq_runtime.hf.model import CACHE, rotary_of_config
from kvq_runtime.hf.prefix import PrefixStore
from kvq_runtime.ops import entropy, lossless, rope
from kvq_runtime.prefix import block_file, chain, coder, shelf
from kvq_runtime.stages import latent
from scripts import kvtc, positions

STAGES = (  # (where, which function, what it is)
    (codec.Codec, "predicted", "prediction"), (codec.Codec, "unpacked", "prediction"), (latent, "rotate", "transform"),
    (codec.Codec, "_turned_back", "transform"), (coder, "block_input", "transform"), (codec, "rotate", "transform"),
    (codec, "by_runs", "transform"),
    (codec.Codec, "encode", "quantize"), (codec.Codec, "decode", "quantize"),
    (codec.Codec, "encode_each", "quantize"), (codec.Codec, "decode_each", "quantize"),
    (entropy, "encode", "coding"), (entropy, "decode", "coding"),
    (lossless, "encode", "coding"), (lossless, "decode", "coding"),
    (block_file, "_content", "sha256"), (shelf.Folder, "put", "files"), (shelf.Folder, "get", "files"),
)  # fmt: skip
RECORDS = Path(__file__).parents[1] / "benchmarks" / "results" / "real" / "rest.jsonl"
SINKS = 4
Pair = tuple[Tensor, Tensor]  # keys after RoPE and values of all layers, [L, T, C]
Kept = tuple[float, Pair, dict[str, float]]  # bytes, restored, and what else is told
Keep = Callable[[Tensor, Pair], Kept]  # tokens, exact


@contextmanager
def timed(way: str, elements: int) -> Iterator[dict[str, float]]:
    """Processor seconds of all threads by stage, and MB of 16-bit cache a second of one, when it is left."""
    spent, lock, here = defaultdict[str, float](float), threading.Lock(), threading.local()
    told: dict[str, float] = {}

    def counted(function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def inner(*given: Any, **named: Any) -> Any:
            within: list[float] = here.__dict__.setdefault("within", [])
            within.append(0.0)
            begun = time.thread_time()
            try:
                return function(*given, **named)
            finally:
                took = time.thread_time() - begun
                with lock:
                    spent[stage] += took - within.pop()
                if within:
                    within[-1] += took

        return inner

    with ExitStack() as patches:
        for owner, name, stage in STAGES:
            patches.enter_context(mock.patch.object(owner, name, counted(getattr(owner, name), stage)))
        begun = time.process_time()
        yield told
        whole = time.process_time() - begun
    spent["other"] = whole - sum(spent.values())
    told |= {f"{way}_cpu_{stage}": took for stage, took in spent.items()}
    told[f"{way}_MB_s_core"] = 2 * elements / whole / 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is asked."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--model", default="smollm2-135m", help="a name of the catalog or a folder (default: %(default)s)")
    top.add_argument("--corpus", default="demo", help="a name or a file (default: %(default)s)")
    top.add_argument("--artifacts", nargs="*", type=Path, default=[], metavar="FILE")
    top.add_argument("--recipes", nargs="*", default=[], metavar="NAME", help="that need no fit, or references")
    top.add_argument("--kvtc", nargs="*", type=float, default=[], metavar="BITS", help="before DEFLATE, an element")
    top.add_argument("--bits", nargs="*", type=float, default=[], help="of artifacts, beside those of their fit")
    top.add_argument("--plain", action="store_true", help="fp8 and lossless as well")
    top.add_argument("--samples", type=int, default=24, help="of a KVTC fit (default: %(default)s)")
    top.add_argument("--windows", type=int, default=4, help="(default: %(default)s)")
    top.add_argument("--prefix", type=int, default=1024, help="tokens kept, a multiple of 128 (default: %(default)s)")
    top.add_argument("--after", type=int, default=256, help="tokens that follow (default: %(default)s)")
    top.add_argument("--greedy", type=int, default=0, metavar="N", help="tokens generated after it (default: none)")
    top.add_argument("--rounds", type=int, default=0, help="of timing, in a folder (default: none)")
    top.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default: %(default)s)")
    top.add_argument("--threads", type=int, default=1, help="(default: %(default)s)")
    top.add_argument("--store-threads", type=int, metavar="N", help="of a PrefixStore (default: its own)")
    top.add_argument("--picture", type=Path, metavar="FILE", help=f"draw {RECORDS} there, and measure nothing")
    top.add_argument("--out", type=Path, metavar="FILE", help="append the lines there")
    args = top.parse_args(arguments)
    torch.set_num_threads(args.threads)
    if args.picture:
        picture([json.loads(line) for line in RECORDS.read_text().splitlines()]).savefig(args.picture, dpi=150)
        return 0
    for line in lines(args):
        named = f"{line['kept']}: {line['bits']} bits, {line['kl']:.3g} nats, {line['relative']:+.2%}"
        print(f"{named}, first other {line['first']}", file=sys.stderr, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
        else:
            print(json.dumps(line), flush=True)
    return 0


def lines(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line of each that is asked for."""
    files = models.resolve(args.model)
    model = load_model(files, "cpu", getattr(torch, args.dtype))
    batch = corpus.select(args.corpus, files.path, args.windows, args.prefix + args.after, 0, "held-out")
    before_BT, after_BT = batch.tokens_BT.long().split([args.prefix, args.after], 1)
    exact, held, references, computed = [], [], [], []
    for before_T, after_T in zip(before_BT, after_BT, strict=True):
        cache, begun = DynamicCache(config=model.config), time.perf_counter()
        positions.states(model, before_T[None], cache)
        computed.append(time.perf_counter() - begun)
        held.append(_pair(cache))
        references.append(_greedy(model, held[-1], before_T, args.greedy))
        exact.append(positions.states(model, after_T[None], cache))
    own = positions.trace(model, after_BT, torch.cat(exact), torch.cat(exact)).score
    for name, keep in _kept(args, files, model):
        begun, states, firsts, told = time.process_time(), [], [], []
        for before_T, after_T, pair, reference in zip(before_BT, after_BT, held, references, strict=True):
            size, restored, more = keep(before_T, pair)
            told.append({"bits": 8 * size / (pair[0].numel() + pair[1].numel())} | more)
            states.append(positions.states(model, after_T[None], _cache(model, restored)))
            found = _greedy(model, restored, before_T, args.greedy)
            differ = [place for place, (a, b) in enumerate(zip(reference, found, strict=True)) if a != b]
            firsts.append(differ[0] if differ else None)
        score = positions.trace(model, after_BT, torch.cat(exact), torch.cat(states)).score
        yield {
            "kept": name, "model": files.id, "prefix": args.prefix, "after": args.after,
            "text": batch.description["source"], "greedy": args.greedy, "first": firsts,
            "computed": round(sum(computed) / len(computed), 4),
            **{what: round(sum(one[what] for one in told) / len(told), 4) for what in told[0]},
            **positions.part(score, own),
            "processor_seconds": round(time.process_time() - begun, 1), "machine": machine(),
        }  # fmt: skip


def _kept(args: argparse.Namespace, files: Any, model: Any) -> Iterator[tuple[str, Keep]]:
    """The measurements, by name."""
    for path in args.artifacts:
        made = artifact.load(path)
        yield path.stem, _stored(made, model, args.rounds, args.store_threads)
        for bits in args.bits:
            yield f"{path.stem},bits={bits:g}", _stored(made, model, args.rounds, args.store_threads, bits)
    for name in args.recipes:
        yield name, _stored(name, model, args.rounds, args.store_threads)
    if args.plain:
        yield "fp8", _fp8
        yield "lossless", partial(_lossless, 19)
        yield "lossless-zstd3", partial(_lossless, 3)
    if args.kvtc:
        bases = _bases(args, files, model)
        choices = [kvtc.Choice(basis) for basis in bases]
        for bits in args.kvtc:
            yield f"kvtc-{bits:g}", _joint(model, bases, [choice.within(bits) for choice in choices])


def picture(records: Sequence[dict[str, Any]]) -> Figure:
    """Divergence of what follows a prefix against the bits that are kept of it, by family."""
    figure = Figure((8, 4.5), layout="constrained")
    axes, families = figure.subplots(), defaultdict[str, list[tuple[float, float, str]]](list)
    for record in records:
        if record["kl"]:
            name = "rest-1bit, coarser" if "bits=" in record["kept"] else record["kept"].rsplit("-", 1)[0]
            families[name].append((record["bits"], record["kl"], record["kept"]))
    for name, points in sorted(families.items(), key=lambda one: min(one[1])):
        bits, kl, _ = zip(*sorted(points), strict=True)
        axes.plot(bits, kl, marker="o", markersize=5, linewidth=1.2, label=name)
    axes.set(xscale="log", yscale="log", xlabel="bits per element of a kept prefix, all bytes counted",
             ylabel="KL divergence of what follows, nats")  # fmt: skip
    ticks = (0.25, 0.5, 1, 2, 4, 8, 16)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def _pair(cache: DynamicCache) -> Pair:
    parts = ([getattr(layer, name)[0] for layer in cache.layers] for name in ("keys", "values"))
    keys, values = (torch.stack([one.transpose(0, 1).flatten(1) for one in some]) for some in parts)
    return keys.float(), values.float()


def _cache(model: Any, pair: Pair) -> DynamicCache:
    cache, heads = DynamicCache(config=model.config), model.config.num_key_value_heads
    for layer, both in enumerate(zip(*pair, strict=True)):
        keys, values = (one.to(model.dtype).unflatten(1, (heads, -1)).transpose(0, 1)[None] for one in both)
        cache.update(keys, values, layer)
    return cache


@torch.inference_mode()
def _greedy(model: Any, pair: Pair, tokens_T: Tensor, count: int) -> list[int]:
    """Tokens chosen greedily after a prefix, whose last token is read again."""
    if not count:
        return []
    cache = _cache(model, (pair[0][:, :-1], pair[1][:, :-1]))
    made = model.generate(tokens_T[None], **{CACHE: cache}, max_new_tokens=count, min_new_tokens=count,
                          do_sample=False, pad_token_id=0)  # fmt: skip
    return made[0, len(tokens_T) :].tolist()


def _stored(made: Any, model: Any, rounds: int, threads: int | None = None, bits: float | None = None) -> Keep:
    """By a PrefixStore: all bytes of its blocks, but exact tokens counted as bfloat16 numbers."""

    def keep(tokens_T: Tensor, exact: Pair) -> Kept:
        with tempfile.TemporaryDirectory() as folder:
            store = PrefixStore(folder if rounds else None, made, model=model, bits=bits, threads=threads)
            elements = exact[0].numel() + exact[1].numel()
            with timed("put", elements) as putting:
                given, begun = _cache(model, exact), time.perf_counter()
                store.put(given, tokens_T)
                put = time.perf_counter() - begun
            sizes, whole = _sizes(store._blocks, tokens_T)
            told = {f"bits_{name}": 8 * size / elements for name, size in sizes.items()}
            told |= {"file_bytes": whole, "times_smaller": 2 * elements / whole} | putting
            more = torch.cat([tokens_T, tokens_T[:1]])  # the newest token is always left to the model
            if rounds:
                told |= {"put": put} | _seconds(store, model, more[None], exact, rounds) | _products()
                again = PrefixStore(None, made, model=model, bits=bits, threads=threads)
                ways: dict[str, Callable[[], Any]] = {
                    "put": lambda: again.put(_cache(model, exact), tokens_T),
                    "load": lambda: store.load_decoded(more, recent=0),
                }
                for name, way in ways.items():
                    with FlopCounterMode(display=False) as counter:
                        way()
                    told[f"{name}_gflop"] = counter.get_total_flops() / 1e9
                told |= {f"{way}_MB_s": 2 * elements / told[way] / 1e6 for way in ("put", "load", "load_decoded")}
            with timed("load", elements) as loading:
                restored = _pair(store.load_decoded(more, recent=0))
            told |= loading
            assert restored[0].shape[1] == len(tokens_T), "a prefix is a multiple of a block"
            return sum(sizes.values()), restored, told

    return keep


def _sizes(blocks: Any, tokens_T: Tensor) -> tuple[dict[str, int], int]:
    """Bytes of a prefix's files by what they hold, exact tokens counted as bfloat16 numbers, and as they are."""
    sizes, whole = {"coded": 0, "sinks": 0, "exact": 0, "other": 0, "frame": 0}, 0
    for name in chain.names(blocks.root, chain.token_row(tokens_T), blocks.block):
        data = blocks.shelf.get(name, blocks.format.largest()) or b""
        tensors, whole = from_safetensors(data), whole + len(data)
        sizes["frame"] += len(data) - sum(x.nbytes for x in tensors.values())
        for field, x in tensors.items():
            kind = field.rsplit(".", 1)[-1]
            if kind == block_file.SINKS and blocks.format.coded_sinks:
                x = block_file.sinks_stream(blocks.format.read(data)[1].sinks_2LSC.bfloat16())
            plain = kind in (block_file.SINKS, block_file.EXACT) and x.dtype != torch.uint8
            sizes[kind if kind in sizes else "other"] += 2 * x.numel() if plain else x.nbytes
    return sizes, whole


@torch.no_grad()
def _seconds(store: PrefixStore, model: Any, prompt_BT: Tensor, exact: Pair, rounds: int) -> dict[str, float]:
    """Seconds of each way to a prefix, the fastest of some rounds."""
    held = [_cache(model, exact) for _ in range(rounds)]

    def first(cache: Cache) -> None:
        model(prompt_BT[:, cache.get_seq_length() :], **{CACHE: cache})

    ways: dict[str, Callable[[], Any]] = {
        "load": lambda: store.load(prompt_BT, recent=0),
        "load_decoded": lambda: store.load_decoded(prompt_BT, recent=0),
        "first_token": lambda: first(store.load(prompt_BT, recent=0)),
        "first_token_recent": lambda: first(store.load(prompt_BT)),
        "first_token_memory": lambda: first(held.pop()),  # of 16 bits
    }
    return {name: min(timeit.repeat(way, number=1, repeat=rounds)) for name, way in ways.items()}


def _products() -> dict[str, float]:
    """GFLOP a second of a core, of a block's product."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, best = torch.ones(128, 768, dtype=dtype), torch.ones(768, 192, dtype=dtype), float("inf")
        for _ in range(300):
            begun = time.thread_time()
            x @ weight
            best = min(best, time.thread_time() - begun)
        found[f"product_{str(dtype).removeprefix('torch.')}"] = 2 * weight.numel() * len(x) / best / 1e9
    return found


def _fp8(tokens_T: Tensor, exact: Pair) -> Kept:
    keys, values = (one.to(torch.float8_e4m3fn).float() for one in exact)
    return exact[0].numel() + exact[1].numel(), (keys, values), {}


def _lossless(level: int, tokens_T: Tensor, exact: Pair) -> Kept:
    """As zstandard keeps them; restored is what bfloat16 numbers are, of which float32 ones are rounded."""
    size, pairs = 0, []
    for one in exact:
        numbers = one.bfloat16()
        planes = numbers.view(torch.uint8).unflatten(-1, (-1, 2))
        size += sum(len(zstandard.compress(planes[..., i].contiguous().numpy().tobytes(), level)) for i in range(2))
        pairs.append(numbers.float())
    return size, (pairs[0], pairs[1]), {}


def _turned(keys_LTC: Tensor, model: Any, turn: Callable[..., Tensor]) -> Tensor:
    tables = rotary_of_config(model.config, torch.float32).tables(torch.arange(keys_LTC.shape[1])[None])
    return turn(keys_LTC.unflatten(-1, (model.config.num_key_value_heads, -1)), *tables).flatten(-2)


def _bases(args: argparse.Namespace, files: Any, model: Any) -> list[kvtc.Basis]:
    """A basis of keys before RoPE, and one of values, of all layers."""
    batch, rows = corpus.select(args.corpus, files.path, args.samples, 1024, 0), ([], [])
    for row_T in batch.tokens_BT.long():
        cache = DynamicCache(config=model.config)
        positions.states(model, row_T[None], cache)
        keys, values = _pair(cache)
        for found, one in zip(rows, (_turned(keys, model, rope.unrotate), values), strict=True):
            found.append(_joined(one[:, SINKS:]))
    return [kvtc.fit(torch.cat(found)) for found in rows]


def _joined(x_LTC: Tensor) -> Tensor:
    return x_LTC.transpose(0, 1).flatten(1)


def _joint(model: Any, bases: list[kvtc.Basis], groups: list[list[kvtc.Group]]) -> Keep:
    """By KVTC; sinks in 16 bits."""

    def keep(tokens_T: Tensor, exact: Pair) -> Kept:
        size, found = 2.0 * 2 * exact[0][:, :SINKS].numel(), []
        given = (_turned(exact[0], model, rope.unrotate), exact[1])
        for one, basis, some in zip(given, bases, groups, strict=True):
            taken, restored = kvtc.coded(_joined(one[:, SINKS:]), basis, some)
            size += taken
            layers = restored.unflatten(1, (len(one), -1)).transpose(0, 1)
            found.append(torch.cat([one[:, :SINKS], layers], 1))
        return size, (_turned(found[0], model, rope.rotate), found[1]), {}

    return keep


if __name__ == "__main__":
    sys.exit(main())
