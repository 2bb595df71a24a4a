"""A real vLLM on a CPU whose pages are encoded whole: against transformers, with drafts, on two workers.

`make test-engines`
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is in an environment of its own: make test-engines")

import torch
from transformers import AutoModelForCausalLM
from vllm_server import MODEL, Server, alike, losses, served, tokens_of_a_text

from kvq_runtime import KVQCache
from kvq_runtime.recipe import preset

RECIPE = "kivi-2bit"
BYTES = 3 << 20  # of the cache
PAGE = 128
DRAFTS = json.dumps({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = served(tmp_path_factory.mktemp("server"), RECIPE, BYTES)
    try:
        yield started.wait()
    finally:
        started.stop()


@pytest.fixture(scope="module")
def text() -> list[int]:
    return tokens_of_a_text()


def by_blocks(recipe: str, tokens: list[int]) -> torch.Tensor:
    """The losses by transformers, a block at a time, which attends to itself exact and to those before it encoded."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    cache = KVQCache(preset(recipe).with_exact(recent=0), model)
    with torch.no_grad():
        parts = [model(torch.tensor([tokens[i : i + PAGE]]), past_key_values=cache).logits[0]
                 for i in range(0, len(tokens), PAGE)]  # fmt: skip
    return torch.nn.functional.cross_entropy(torch.cat(parts)[:-1], torch.tensor(tokens[1:]), reduction="none")


def test_perplexity_is_that_of_a_block_at_a_time(server: Server, text: list[int]):
    """vLLM's chunks are 256 tokens; in transformers a pass is a page."""
    tokens = text[:700]
    found = losses(server.complete(tokens, prompt_logprobs=0, max_tokens=1), tokens)
    print(alike(found, by_blocks(RECIPE, tokens), by_blocks("exact", tokens)))


def test_a_request_does_not_depend_on_what_runs_beside_it(server: Server, text: list[int]):
    """Alone and all at once, over the ends of pages, some with pages in common."""
    prompts = [text[:300] + text[400 + 40 * n : 420 + 60 * n] for n in range(4)]
    prompts += [text[500 + 7 * n : 600 + 47 * n] for n in range(1, 5)]
    alone = [server.complete(prompt, max_tokens=48)["choices"][0]["text"] for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda prompt: server.complete(prompt, max_tokens=48), prompts)]
    same = sum(one == other["choices"][0]["text"] for one, other in zip(alone, answers, strict=True))
    print(f"{same} of {len(prompts)} texts are the same")
    assert same >= len(prompts) - 1
    assert server.metric("vllm:prefix_cache_hits_total") > 0


def test_drafts_change_nothing(server: Server, text: list[int], tmp_path: Path):
    """Speculation by n-grams: tokens that are refused may have filled a page."""
    prompts = [text[:90] + text[:n] for n in (20, 35, 60)]  # what repeats is drafted
    expected = [server.complete(prompt, max_tokens=200)["choices"][0]["text"] for prompt in prompts]
    drafting = served(tmp_path, RECIPE, BYTES, "--speculative-config", DRAFTS).wait()
    try:
        found = [drafting.complete(prompt, max_tokens=200)["choices"][0]["text"] for prompt in prompts]
        drafted, accepted = (
            drafting.metric(f"vllm:spec_decode_num_{name}_tokens_total") for name in ("draft", "accepted")
        )
    finally:
        drafting.stop()
    print(
        f"{drafted:g} drafted, {accepted:g} accepted; {sum(map(str.__eq__, expected, found))} of 3 texts are the same"
    )
    assert 0 < accepted < drafted
    assert sum(map(str.__eq__, expected, found)) >= 2


@pytest.mark.parametrize("recipe", [RECIPE, "lloyd-3bit"])
def test_two_workers_answer_as_one(recipe: str, server: Server, text: list[int], tmp_path: Path):
    """Tensor parallelism: each encodes the one KV head that it has."""
    tokens = text[:400]
    split = served(tmp_path, recipe, BYTES, "--tensor-parallel-size", "2").wait()
    try:
        found = losses(split.complete(tokens, prompt_logprobs=0, max_tokens=1), tokens)
    finally:
        split.stop()
    one = server if recipe == RECIPE else served(tmp_path, recipe, BYTES).wait()
    try:
        alone = losses(one.complete(tokens, prompt_logprobs=0, max_tokens=1), tokens)
    finally:
        if one is not server:
            one.stop()
    apart = (found - alone).abs().mean()
    print(
        f"{recipe}: loss {found.mean():.5f} on two workers, {alone.mean():.5f} on one; {apart:.6f} nats a token apart"
    )
    assert apart < 0.01
