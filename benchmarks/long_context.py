"""Measure divergence by quarter of a context that is longer than the sequences of a fit.

    python -m benchmarks.long_context MODEL TEXT OUT.jsonl --length 4096 --recipes kivi-4bit NAME ... [--registry URL]

One window of a text's held-out part, by full encode: every token but the sinks is encoded before it is read. A line a
recipe: KL divergence from the 16-bit model in nats a token, in each quarter of the window.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import torch

from kvq_calib.evaluate import perplexity
from kvq_calib.evaluate.caches import FullCache
from kvq_calib.evaluate.candidate import find
from kvq_calib.evaluate.record import load_model
from kvq_calib.model import find as models
from kvq_calib.model.streamed import Head
from kvq_calib.run.plan import environment
from kvq_calib.text import corpus

QUARTERS = 4


@torch.inference_mode()
def main() -> None:
    """Append a line for each recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("out", type=Path)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--recipes", nargs="+", required=True)
    parser.add_argument("--registry")
    args = parser.parse_args()
    files = models.resolve(args.model)
    batch = corpus.select(args.text, files.path, 1, args.length, split="held-out")
    model, length = load_model(files), args.length
    head, quarter = Head.of(model), length // QUARTERS
    exact, _ = perplexity.hidden_states(model, batch.tokens_BT, None, length)
    for name in args.recipes:
        candidate = find(name, files, args.registry)
        make = partial(FullCache, candidate.recipe, model, candidate.tensors, candidate.bounds, length=length)
        found, _ = perplexity.hidden_states(model, batch.tokens_BT, make(), length)
        figures = []
        for at in range(0, length, quarter):
            part = slice(at, at + quarter)
            both = {"16 bit": exact[:, part], name: found[:, part]}
            figures.append(perplexity.compare(head, batch.tokens_BT[:, part], both)[name].kl)
        line = {"model": files.id, "text": Path(args.text).name, "length": length, "recipe": name, "kl": figures}
        line["sha256"], line["environment"] = candidate.sha256, environment("cpu", "float32", torch.get_num_threads())
        with args.out.open("a") as out:
            out.write(json.dumps(line) + "\n")
        print(name, *(f"{kl:.4f}" for kl in figures), flush=True)


if __name__ == "__main__":
    main()
