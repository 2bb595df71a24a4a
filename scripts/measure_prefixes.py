"""Measure a prefix store on this machine: bytes, MB/s each way, time to the first token, and what the round trip costs.

    python -m scripts.measure_prefixes MODEL RECIPE [RECIPE ...] [--tokens 1000] [--text FILE] [--dtype float32]

RECIPE is a recipe or a reference to an artifact. A row each: first of 16 bits in the same file form (`exact`), then of
the recipes. Times are the fastest of `--rounds`, of one thread, the disk's cache warm; MB are of keys and values as
the model gives them. A file of --out has the rows, and the machine.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvq_runtime import PrefixStore
from scripts.real_records import machine

CONTINUED = 48  # tokens that perplexity and first divergence are taken over


@torch.no_grad()
def main() -> None:
    """Print a JSON row a recipe."""
    top = argparse.ArgumentParser(description=__doc__)
    top.add_argument("model")
    top.add_argument("recipes", nargs="+")
    top.add_argument("--tokens", type=int, default=1000)
    top.add_argument("--text", type=Path, required=True, help="a text of at least --tokens + 48 tokens")
    top.add_argument("--dtype", default="bfloat16", help="float32 where a processor has no bfloat16 (%(default)s)")
    top.add_argument("--rounds", type=int, default=5, help="the fastest of so many counts (%(default)s)")
    top.add_argument("--out", type=Path, metavar="FILE", help="append the rows there, with the machine")
    args = top.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    text = args.text.read_text(encoding="utf-8")[: 16 * (args.tokens + CONTINUED)]
    ids = AutoTokenizer.from_pretrained(args.model)(text, return_tensors="pt").input_ids
    prompt, after = ids[:, : args.tokens], ids[:, args.tokens : args.tokens + CONTINUED]
    exact = DynamicCache(config=model.config)
    model(prompt, past_key_values=exact)
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in exact.layers)  # type: ignore[union-attr]
    about = {"model": Path(args.model).name, "tokens": args.tokens, "dtype": args.dtype, "machine": machine()}
    computed = 1e3 * fastest(lambda: model(prompt, past_key_values=fresh(model)), args.rounds)
    about["first_token_computed_ms"] = round(computed, 1)
    for recipe in args.recipes:
        found = about | row(model, recipe, prompt, after, exact, size / prompt.shape[1], args.rounds)
        print(json.dumps(found), flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a") as file:
                file.write(json.dumps(found) + "\n")


def row(model, recipe: str, prompt, after, exact: DynamicCache, token_bytes: float, rounds: int = 5) -> dict:
    """Measure the costs and savings of one recipe."""

    def best(work) -> float:
        return fastest(work, rounds)

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
            "load_MB_per_s": round(kept * token_bytes / best(lambda: store.load(prompt, recent=0)) / 1e6, 1),
            "decode_MB_per_s": round(kept * token_bytes / best(lambda: store.load_decoded(prompt, recent=0)) / 1e6, 1),
            "first_token_kept_ms": round(1e3 * best(lambda: go_on(model, store.load(prompt, recent=0), prompt)), 1),
            "first_token_kept_recent_ms": round(1e3 * best(lambda: go_on(model, store.load(prompt), prompt)), 1),
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
    """Return the perplexity of the tokens after the prompt, each fed after the previous one."""
    logits = [go_on(model, cache, prompt).logits[0, -1]]
    logits += [model(after[:, n : n + 1], past_key_values=cache).logits[0, -1] for n in range(after.shape[1] - 1)]
    return float(torch.nn.functional.cross_entropy(torch.stack(logits).float(), after[0]).exp())


def fastest(work, rounds: int = 5) -> float:
    """Seconds of the fastest of `rounds` calls."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


if __name__ == "__main__":
    main()
