"""Measure rate against loss at rest: bytes of a kept prefix, and what follows it, of SmolLM2-135M by default.

    python -m scripts.measure_rest --corpus wiki.txt --artifacts rest-1bit.safetensors aqua-fisher-1bit.safetensors \\
        --kvtc 0.4 0.8 1.6 --recipes higgs-2bit --out rest.jsonl

The 16-bit model reads a prefix of a held-out text; its keys and values are kept, and restored into transformers' own
cache; the tokens after it are read from that in one pass. A JSON line each:

    bits      of all that is kept, per element of the prefix's keys and values: codes, sinks in 16 bits, the frame
    kl        divergence from the 16-bit model over the tokens that follow, in nats, and perplexity over its own
    first     which of --greedy tokens, chosen greedily after the prefix, is the first other one; null: none is

Artifacts and recipes are kept by a PrefixStore, in whole blocks, so that prefixes are multiples of 128. `kvtc` is
`kvtc.py`, fitted here to --samples sequences of the fit part; `fp8` are e4m3 numbers, as LMCache keeps them;
`lossless` are bfloat16 numbers, high and low bytes apart, by zstandard.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import zstandard
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvq_calib.evaluate import positions
from kvq_calib.evaluate.record import load_model
from kvq_calib.model import find as models
from kvq_calib.text import corpus
from kvq_runtime.artifact import artifact
from kvq_runtime.hf.model import rotary_of_config
from kvq_runtime.hf.prefix import PrefixStore
from kvq_runtime.ops import rope
from kvq_runtime.prefix import chain
from scripts import kvtc, real_records

SINKS = 4
Pair = tuple[Tensor, Tensor]  # keys after RoPE and values of all layers, [L, T, C]
Keep = Callable[[Tensor, Pair], tuple[float, Pair]]  # tokens, exact → bytes, restored


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is asked."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--model", default="smollm2-135m", help="a name of the catalog or a folder (default: %(default)s)")
    top.add_argument("--corpus", required=True, help="a name or a file")
    top.add_argument("--artifacts", nargs="*", type=Path, default=[], metavar="FILE")
    top.add_argument("--recipes", nargs="*", default=[], metavar="NAME", help="that need no fit")
    top.add_argument("--kvtc", nargs="*", type=float, default=[], metavar="BITS", help="before DEFLATE, an element")
    top.add_argument("--plain", action="store_true", help="fp8 and lossless as well")
    top.add_argument("--samples", type=int, default=24, help="of a KVTC fit (default: %(default)s)")
    top.add_argument("--windows", type=int, default=4, help="(default: %(default)s)")
    top.add_argument("--prefix", type=int, default=1024, help="tokens kept, a multiple of 128 (default: %(default)s)")
    top.add_argument("--after", type=int, default=256, help="tokens that follow (default: %(default)s)")
    top.add_argument("--greedy", type=int, default=0, metavar="N", help="tokens generated after it (default: none)")
    top.add_argument("--threads", type=int, default=1, help="(default: %(default)s)")
    top.add_argument("--out", type=Path, metavar="FILE", help="append the lines there")
    args = top.parse_args(arguments)
    torch.set_num_threads(args.threads)
    files = models.resolve(args.model)
    model = load_model(files, "cpu", torch.float32)
    batch = corpus.select(args.corpus, files.path, args.windows, args.prefix + args.after, 0, "held-out")
    tokens_BT = batch.tokens_BT.long()
    exact, held, references = [], [], []
    for row_T in tokens_BT:
        cache = DynamicCache(config=model.config)
        positions.states(model, row_T[None, : args.prefix], cache)
        held.append(_pair(cache))
        references.append(_greedy(model, held[-1], row_T[: args.prefix], args.greedy))
        exact.append(positions.states(model, row_T[None, args.prefix :], cache))
    after = tokens_BT[:, args.prefix :]
    own = positions.trace(model, after, torch.cat(exact), torch.cat(exact)).score
    elements = 2 * files.geometry.layers * files.geometry.width * args.prefix
    for name, keep in _kept(args, files, model):
        begun, sizes, states, firsts = time.process_time(), [], [], []
        for row_T, pair, reference in zip(tokens_BT, held, references, strict=True):
            size, restored = keep(row_T[: args.prefix], pair)
            sizes.append(8 * size / elements)
            states.append(positions.states(model, row_T[None, args.prefix :], _cache(model, restored)))
            found = _greedy(model, restored, row_T[: args.prefix], args.greedy)
            differ = [place for place, (a, b) in enumerate(zip(reference, found, strict=True)) if a != b]
            firsts.append(differ[0] if differ else None)
        score = positions.trace(model, after, torch.cat(exact), torch.cat(states)).score
        line = {
            "kept": name, "model": files.id, "prefix": args.prefix, "after": args.after,
            "text": batch.description["source"], "bits": round(sum(sizes) / len(sizes), 4),
            "greedy": args.greedy, "first": firsts, **positions.part(score, own),
            "processor_seconds": round(time.process_time() - begun, 1),
            "machine": real_records.machine(),
        }  # fmt: skip
        said = f"{name}: {line['bits']} bits, {score.kl:.3g} nats, {line['relative']:+.2%}, first other {firsts}"
        print(said, file=sys.stderr, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return 0


def _kept(args: argparse.Namespace, files: Any, model: Any) -> Iterator[tuple[str, Keep]]:
    """What is measured, by name."""
    for given in [*args.artifacts, *args.recipes]:
        made = artifact.load(given) if isinstance(given, Path) else given
        yield (given.stem if isinstance(given, Path) else given), _stored(made, model)
    if args.plain:
        yield "fp8", _fp8
        yield "lossless", _lossless
    if args.kvtc:
        bases = _bases(args, files, model)
        choices = [kvtc.Choice(basis) for basis in bases]
        for bits in args.kvtc:
            yield f"kvtc-{bits:g}", _joint(model, bases, [choice.within(bits) for choice in choices])


def _pair(cache: DynamicCache) -> Pair:
    parts = ([getattr(layer, name)[0] for layer in cache.layers] for name in ("keys", "values"))
    keys, values = (torch.stack([one.transpose(0, 1).flatten(1) for one in some]) for some in parts)
    return keys, values


def _cache(model: Any, pair: Pair) -> DynamicCache:
    cache, heads = DynamicCache(config=model.config), model.config.num_key_value_heads
    for layer, both in enumerate(zip(*pair, strict=True)):
        keys, values = (one.unflatten(1, (heads, -1)).transpose(0, 1)[None] for one in both)
        cache.update(keys, values, layer)
    return cache


@torch.inference_mode()
def _greedy(model: Any, pair: Pair, tokens_T: Tensor, count: int) -> list[int]:
    """Tokens chosen greedily after a prefix, whose last token is read again."""
    if not count:
        return []
    cache = _cache(model, (pair[0][:, :-1], pair[1][:, :-1]))
    made = model.generate(tokens_T[None], past_key_values=cache, max_new_tokens=count, min_new_tokens=count,
                          do_sample=False, pad_token_id=0)  # fmt: skip
    return made[0, len(tokens_T) :].tolist()


def _stored(made: Any, model: Any) -> Keep:
    """By a PrefixStore: all bytes of its blocks, but of float32 sinks the half, which 16 bits are."""

    def keep(tokens_T: Tensor, exact: Pair) -> tuple[float, Pair]:
        store = PrefixStore(None, made, model=model)
        store.put(_cache(model, exact), tokens_T)
        blocks = store._blocks
        names = chain.names(blocks.root, chain.token_row(tokens_T), blocks.block)
        size = sum(len(blocks.shelf.get(name, blocks.format.largest()) or b"") for name in names)
        size -= store.recipe.window.sinks * 2 * exact[0][:, 0].numel() * 2
        more = torch.cat([tokens_T, tokens_T[:1]])  # the newest token is always left to the model
        restored = _pair(store.load_decoded(more, recent=0))
        assert restored[0].shape[1] == len(tokens_T), "a prefix is a multiple of a block"
        return size, (restored[0].float(), restored[1].float())

    return keep


def _fp8(tokens_T: Tensor, exact: Pair) -> tuple[float, Pair]:
    keys, values = (one.to(torch.float8_e4m3fn).float() for one in exact)
    return exact[0].numel() + exact[1].numel(), (keys, values)


def _lossless(tokens_T: Tensor, exact: Pair) -> tuple[float, Pair]:
    """As zstandard keeps them; restored is what bfloat16 numbers are, of which float32 ones are rounded."""
    size, pairs = 0, []
    for one in exact:
        numbers = one.bfloat16()
        planes = numbers.view(torch.uint8).unflatten(-1, (-1, 2))
        size += sum(len(zstandard.compress(planes[..., i].contiguous().numpy().tobytes(), 19)) for i in range(2))
        pairs.append(numbers.float())
    return size, (pairs[0], pairs[1])


def _tables(model: Any, length: int) -> Pair:
    return rotary_of_config(model.config, torch.float32).tables(torch.arange(length)[None])


def _turned(keys_LTC: Tensor, model: Any, turn: Callable[..., Tensor]) -> Tensor:
    heads = model.config.num_key_value_heads
    return turn(keys_LTC.unflatten(-1, (heads, -1)), *_tables(model, keys_LTC.shape[1])).flatten(-2)


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

    def keep(tokens_T: Tensor, exact: Pair) -> tuple[float, Pair]:
        size, found = 2.0 * 2 * exact[0][:, :SINKS].numel(), []
        given = (_turned(exact[0], model, rope.unrotate), exact[1])
        for one, basis, some in zip(given, bases, groups, strict=True):
            taken, restored = kvtc.coded(_joined(one[:, SINKS:]), basis, some)
            size += taken
            layers = restored.unflatten(1, (len(one), -1)).transpose(0, 1)
            found.append(torch.cat([one[:, :SINKS], layers], 1))
        return size, (_turned(found[0], model, rope.rotate), found[1])

    return keep


if __name__ == "__main__":
    sys.exit(main())
