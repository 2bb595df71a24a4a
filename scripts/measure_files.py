"""Measure what prefixes take in files, and what that costs: the bytes of a PrefixStore against divergence.

    python -m scripts.measure_files --model demo --artifacts rest-1bit.safetensors aqua-fisher-1bit.safetensors

The same windows of a held-out text are kept whole under each artifact, and read by full encode. A line of JSON each:

    bits      of a file, per element of what was kept: codes, exact sinks counted in 16 bits, and the frame, each alone
    kl        divergence from the 16-bit model, nats a token, and perplexity over its own
    codes_s   that a processor's core codes (in) and decodes (out), in millions; MB_s, of 16-bit cache that these are
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as from_safetensors
from transformers.cache_utils import DynamicCache

from kvq_calib.evaluate import positions
from kvq_calib.evaluate.full import FullCache
from kvq_calib.evaluate.record import Protocol, load_model
from kvq_calib.model import find as models
from kvq_calib.text import corpus
from kvq_runtime.artifact import artifact
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.entropy import stream
from kvq_runtime.hf.prefix import PrefixStore
from kvq_runtime.prefix import chain


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is asked."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--model", default="demo", help="a name of the catalog or a folder (default: %(default)s)")
    top.add_argument("--artifacts", nargs="+", type=Path, required=True, metavar="FILE")
    top.add_argument("--corpus", default="demo", help="a name or a file (default: %(default)s)")
    top.add_argument("--windows", type=int, default=2, help="(default: %(default)s)")
    top.add_argument("--length", type=int, default=1024, help="tokens of one (default: %(default)s)")
    args = top.parse_args(arguments)
    torch.set_num_threads(1)
    files = models.resolve(args.model)
    tokens_BT = corpus.select(args.corpus, files.path, args.windows, args.length, 0, "held-out").tokens_BT
    model = load_model(files, "cpu", torch.float32)
    exact = positions.states(model, tokens_BT, DynamicCache(config=model.config))
    reference = positions.trace(model, tokens_BT, exact, exact).score
    for path in args.artifacts:
        made = artifact.load(path)
        found = {"artifact": path.stem, "length": args.length} | kept(model, made, tokens_BT)
        recipe = Protocol(sinks=4, recent=0).recipe(made.recipe, files.geometry, made.tensors)
        cache = FullCache(recipe, model, made.tensors, length=args.length)
        cache.reads = None  # counting repeats attention
        score = positions.trace(model, tokens_BT, exact, positions.states(model, tokens_BT, cache, None)).score
        print(json.dumps(found | positions.part(score, reference, ())), flush=True)
    return 0


def kept(model: Any, made: Artifact, tokens_BT: torch.Tensor) -> dict[str, Any]:
    """Keep each window in a store of its own; bits per element, and the speed of the coder."""
    geometry = made.fingerprint.geometry
    sizes, spent, elements, codes = {"coded": 0, "sinks": 0, "other": 0, "frame": 0}, [0.0, 0.0], 0, 0
    for row_T in tokens_BT:
        blocks = PrefixStore(None, made, model)._blocks
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(row_T[None].long(), past_key_values=cache)
        keys, values = ([getattr(one, name)[0].transpose(0, 1) for one in cache.layers] for name in ("keys", "values"))
        count = blocks.put(row_T, keys, values)
        elements += 2 * geometry.layers * geometry.width * count
        for name in chain.names(blocks.root, chain.token_row(row_T), blocks.block):
            data = blocks.shelf.get(name, blocks.format.largest()) or b""
            tensors = {field: x.numel() * x.itemsize for field, x in from_safetensors(data).items()}
            sizes["frame"] += len(data) - sum(tensors.values())
            sizes["sinks"] += tensors.pop("sinks", 0) // 2  # of float32: what 16 bits take
            sizes["coded"] += tensors.pop("coded", 0)
            sizes["other"] += sum(tensors.values())
        for block in blocks.load(row_T) if blocks.format._coded else ():
            parts = [block.fields[layer][role][field] for layer, role, field, _ in blocks.format._coded]
            begun = time.process_time()
            coded = stream.encode(parts, blocks.format._rungs)
            between = time.process_time()
            stream.decode(coded, [(len(one), one.shape[1]) for one in parts], blocks.format._rungs)
            spent = [spent[0] + between - begun, spent[1] + time.process_time() - between]
            codes += sum(one.numel() for one in parts)
    found: dict[str, Any] = {"bits": round(8 * sum(sizes.values()) / elements, 4)}
    found |= {f"bits_{name}": round(8 * size / elements, 4) for name, size in sizes.items()}
    if codes:
        found |= {
            f"codes_s_{name}": round(codes / one / 1e6, 1) for name, one in zip(("in", "out"), spent, strict=True)
        }
        found |= {
            f"MB_s_{name}": round(2 * elements / one / 1e6, 1) for name, one in zip(("in", "out"), spent, strict=True)
        }
    return found


if __name__ == "__main__":
    sys.exit(main())
