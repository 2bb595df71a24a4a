"""Serve the embedded model by vLLM on a CPU, recipes and 16 bit in turn: tokens that fit, loss, tokens a second.

    build/engines/bin/python -m benchmarks.vllm_serving lloyd-3bit kivi-2bit --rounds 3

Each has a process of its own, and one works at a time: round after round and number of requests after number of
requests, 16 bit first and then every recipe. So what else the machine does falls on all alike, and a ratio is the
median over rounds of a recipe's tokens a second by those of 16 bit just before. It is of a CPU and this small model,
and says nothing of a GPU. The text is LICENSE, which does not change: its sha256 is printed. One line of JSON a cache.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
TEXT = ROOT / "LICENSE"
BYTES = 1 << 26
WINDOW = 1024
TOGETHER = (1, 8, 32)
PROMPT, NEW = 256, 32
MARK = "measured "  # begins an answer among what vLLM prints


class Cache:
    """A process that serves with one cache, and measures when it is told."""

    def __init__(self, name: str):
        self.name = name
        own = {
            "KVQ_CACHE": name, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin take a busy machine's cores from the work
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.vllm_serving", "--worker"], env=os.environ | own, cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, requests: int) -> Any:
        """Tokens a second with so many requests side by side; with 0 what fits, and the loss."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(requests, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        raise RuntimeError(f"vLLM with {self.name or '16 bit'} ended with {self.process.wait()}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def main() -> None:
    """Measure the recipes that are asked for beside 16 bit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="what KVQ_CACHE may name")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        return work()
    caches = [Cache(name) for name in ("", *asked.recipes)]
    found = [{"cache": cache.name or "16 bit", "text": _digest()} | cache.ask(0) for cache in caches]
    for count in TOGETHER:
        rounds = [[cache.ask(count) for cache in caches] for _ in range(asked.rounds)]
        for place, line in enumerate(found):
            ratios = [round(one[place] / one[0], 3) for one in rounds]
            line[f"tokens_per_second_{count}"] = median(one[place] for one in rounds)
            line[f"ratio_{count}"] = [median(ratios), min(ratios), max(ratios)]
    for cache, line in zip(caches, found, strict=True):
        print(json.dumps(line), flush=True)
        cache.close()


def _digest() -> str:
    return hashlib.sha256(TEXT.read_bytes()).hexdigest()[:16]


def work() -> None:
    """Answer what comes on standard input, in a process of one cache."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(ROOT / "artifacts" / "demo-model"), dtype="bfloat16", max_model_len=2048, enforce_eager=True,
        kv_cache_memory_bytes=BYTES, enable_prefix_caching=False,
    )  # fmt: skip
    text = llm.get_tokenizer()(TEXT.read_text())["input_ids"]
    settings = SamplingParams(max_tokens=NEW, min_tokens=NEW, temperature=0, ignore_eos=True)
    for line in sys.stdin:
        if not int(line):
            print(MARK + json.dumps(_fits(llm, text)), flush=True)
            continue
        prompts: list[Any] = [{"prompt_token_ids": text[17 * n : 17 * n + PROMPT]} for n in range(int(line))]
        begun = time.perf_counter()
        llm.generate(prompts, settings, use_tqdm=False)
        print(MARK + json.dumps(round(len(prompts) * NEW / (time.perf_counter() - begun), 1)), flush=True)


def _fits(llm: Any, text: list[int]) -> dict[str, Any]:
    """Tokens that fit, and the mean negative log-likelihood of a text's first tokens, from the second on."""
    from vllm import SamplingParams

    cache = llm.llm_engine.vllm_config.cache_config
    tokens = text[:WINDOW]
    answer = llm.generate([{"prompt_token_ids": tokens}], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    losses = [-row[token].logprob for row, token in zip(answer.prompt_logprobs[1:], tokens[1:], strict=True)]
    fits = cache.num_gpu_blocks * cache.block_size
    return {"tokens_that_fit": fits, "tokens": len(tokens), "loss": round(sum(losses) / len(losses), 4)}


if __name__ == "__main__":
    main()
