"""Measure a prefix store on this machine: bytes, MB/s each way, time to the first token, and what the round trip costs.

    python scripts/measure_prefixes.py MODEL RECIPE [RECIPE ...] [--tokens 1000] [--text FILE]

RECIPE is a recipe or a reference to an artifact. A row each: first of 16 bits in the same file form (`exact`), then of
the recipes. Times are the fastest of five, of one thread, the disk's cache warm; MB are of 16-bit keys and values.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvq_runtime import PrefixStore

CONTINUED = 48  # tokens that perplexity and first divergence are taken over


@torch.no_grad()
def main() -> None:
    """Print a JSON row a recipe."""
    top = argparse.ArgumentParser(description=__doc__)
    top.add_argument("model")
    top.add_argument("recipes", nargs="+")
    top.add_argument("--tokens", type=int, default=1000)
    top.add_argument("--text", type=Path, help="a text of at least --tokens + 48 tokens")
    args = top.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    text = args.text.read_text(encoding="utf-8")[: 16 * (args.tokens + CONTINUED)]
    ids = AutoTokenizer.from_pretrained(args.model)(text, return_tensors="pt").input_ids
    prompt, after = ids[:, : args.tokens], ids[:, args.tokens : args.tokens + CONTINUED]
    exact = DynamicCache(config=model.config)
    model(prompt, past_key_values=exact)
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in exact.layers)  # type: ignore[union-attr]
    for recipe in args.recipes:
        print(json.dumps(row(model, recipe, prompt, after, exact, size / prompt.shape[1])), flush=True)


def row(model, recipe: str, prompt, after, exact: DynamicCache, token_bytes: float) -> dict:
    """What one recipe costs and saves."""
    with tempfile.TemporaryDirectory() as folder:
        store = PrefixStore(folder, recipe, model=model)
        begun = time.perf_counter()
        kept = store.put(exact, prompt)
        put = time.perf_counter() - begun
        files = [path.stat().st_size for path in Path(folder).rglob("*.safetensors")]
        data = sum(store._blocks.format.data_bytes(number) for number in range(len(files)))
        found = store.load(prompt, recent=0)
        scored = [store.load(prompt, recent=0), store.load(prompt)]
        result = {
            "recipe": recipe,
            "kept_tokens": kept,
            "file_bytes": sum(files),
            "overhead": round(sum(files) / data - 1, 4),
            "times_smaller": round(kept * token_bytes / sum(files), 2),
            "put_MB_per_s": round(kept * token_bytes / put / 1e6, 1),
            "load_MB_per_s": round(kept * token_bytes / fastest(lambda: store.load(prompt, recent=0)) / 1e6, 1),
            "decode_MB_per_s": round(
                kept * token_bytes / fastest(lambda: store.load_decoded(prompt, recent=0)) / 1e6, 1
            ),
            "first_token_computed_ms": round(1e3 * fastest(lambda: model(prompt, past_key_values=fresh(model))), 1),
            "first_token_kept_ms": round(1e3 * fastest(lambda: go_on(model, store.load(prompt, recent=0), prompt)), 1),
            "first_token_kept_recent_ms": round(1e3 * fastest(lambda: go_on(model, store.load(prompt), prompt)), 1),
        }
        assert found.get_seq_length() == (prompt.shape[1] - 1) // 128 * 128
        result["perplexity_16bit"] = round(perplexity(model, fresh(model), prompt, after), 2)
        result["perplexity_kept"] = round(perplexity(model, scored[0], prompt, after), 2)
        result["perplexity_kept_recent"] = round(perplexity(model, scored[1], prompt, after), 2)
        settings = {"max_new_tokens": CONTINUED, "do_sample": False, "pad_token_id": 0}
        one = model.generate(prompt, **settings)[0]
        other = model.generate(prompt, past_key_values=store.load(prompt, recent=0), **settings)[0]
        differ = (one != other).nonzero()
        result["first_divergence"] = int(differ[0]) - prompt.shape[1] if len(differ) else None
        return result


def fresh(model) -> DynamicCache:
    """An empty 16-bit cache."""
    return DynamicCache(config=model.config)


def go_on(model, cache, prompt):
    """The pass over what is left of a prompt."""
    return model(prompt[:, cache.get_seq_length() :], past_key_values=cache)


def perplexity(model, cache, prompt, after) -> float:
    """Of the tokens after the prompt, each fed after the one before."""
    logits = [go_on(model, cache, prompt).logits[0, -1]]
    logits += [model(after[:, n : n + 1], past_key_values=cache).logits[0, -1] for n in range(after.shape[1] - 1)]
    return float(torch.nn.functional.cross_entropy(torch.stack(logits).float(), after[0]).exp())


def fastest(work) -> float:
    """Seconds of the fastest of five calls."""
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


if __name__ == "__main__":
    main()
