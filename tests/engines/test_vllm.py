"""A real vLLM on a CPU: the embedded model behind its OpenAI endpoint, with a compressed cache. `make test-engines`."""

import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is in an environment of its own: make test-engines")

import torch
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig
from vllm_server import MODEL, PATIENCE, Server, alike, losses, served, tokens_of_a_text

from kvq_calib.evaluate.caches import FullCache, attending
from kvq_runtime.codec import shared
from kvq_runtime.codec.codec import Context
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import preset
from kvq_runtime.vllm.backend import own_defaults

RECIPE = "lloyd-3bit"
BYTES = 3 << 20  # of the cache


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = served(tmp_path_factory.mktemp("server"), RECIPE, BYTES)
    try:
        started.wait()
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def text() -> list[int]:
    return tokens_of_a_text()


def test_perplexity_is_that_of_a_full_encode(server: Server, text: list[int]):
    """The same tokens through `kvq eval`'s full encode: the same recipe, window and sinks, by other code."""
    tokens = text[:512]
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    expected = {}
    for name in ("exact", RECIPE):
        cache = FullCache(preset(name), model, length=512)
        with torch.no_grad(), attending(model, cache):
            logits = model(torch.tensor([tokens]), past_key_values=cache).logits[0]
        expected[name] = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="none")
    found = losses(server.complete(tokens, prompt_logprobs=0, max_tokens=1), tokens)
    print(alike(found, expected[RECIPE], expected["exact"]))


def test_a_request_does_not_depend_on_what_runs_beside_it(server: Server, text: list[int]):
    """Prompts of many lengths, half with a shared prefix, alone and all at once: in chunks, with shared pages."""
    prompts = [text[:300] + text[400 + 40 * n : 420 + 60 * n] for n in range(8)]
    prompts += [text[500 + 7 * n : 503 + 47 * n] for n in range(1, 9)]
    alone = [server.complete(prompt)["choices"][0] for prompt in prompts]
    with ThreadPoolExecutor(16) as pool:
        together = [answer["choices"][0] for answer in pool.map(server.complete, prompts)]
    same = sum(one["text"] == other["text"] for one, other in zip(alone, together, strict=True))
    print(f"{same} of {len(prompts)} texts are the same")
    assert same >= len(prompts) - 4  # a code may fall to the other side: matrix products round by the batch's shape
    first = [(one["logprobs"]["token_logprobs"][0], other["logprobs"]["token_logprobs"][0])
             for one, other in zip(alone, together, strict=True)]  # fmt: skip
    assert all(abs(one - other) < 0.1 for one, other in first)


def test_tokens_that_fit_are_the_recipes_bits(server: Server):
    """From vLLM's own log: capacity is that of 3.25 bits, scales counted, where float32 has 32 and 16 bits 16."""
    found = re.search(r"KV cache size: ([\d,]+) tokens", server.log)
    assert found is not None, server.log[-2000:]
    tokens = int(found[1].replace(",", ""))
    per_token = 6 * 2 * 2 * (64 * 3 // 8 + 2)  # layers, keys and values, heads; codes and a scale
    assert tokens == BYTES // (per_token * 128) * 128


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Gemma 3 with the embedded model's tokens: of two layers one slides over 128 tokens."""
    folder = tmp_path_factory.mktemp("sliding")
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, query_pre_attn_scalar=4, sliding_window=128, initializer_range=0.2,
        max_position_embeddings=2048, layer_types=["sliding_attention", "full_attention"],
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    ))  # fmt: skip
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((MODEL / name).read_bytes())
    return folder


def test_layers_that_slide_answer_beside_layers_that_are_compressed(sliding: Path, text: list[int], tmp_path: Path):
    """Their pages take turns in the same memory: what a layer left there is read as numbers of another format."""
    server = served(tmp_path, RECIPE, 4 << 20, model=sliding).wait()
    try:
        tokens, others = text[:700], text[1000:1900]
        found = []
        for _ in range(3):
            found.append(losses(server.complete(tokens, prompt_logprobs=0, max_tokens=1), tokens))
            assert server.complete(others)["choices"][0]["text"] == server.complete(others)["choices"][0]["text"]
    finally:
        server.stop()
    assert "pages of 1280 tokens" in server.log  # ten of kvq's fill one of the layer that slides, of 32 bits
    assert all(torch.allclose(again, found[0], atol=1e-3) for again in found)
    model, expected = AutoModelForCausalLM.from_pretrained(sliding, dtype=torch.float32), {}
    for name in ("exact", RECIPE):
        cache = FullCache(preset(name), model, length=len(tokens))
        with torch.no_grad(), attending(model, cache):
            logits = model(torch.tensor([tokens]), past_key_values=cache).logits[0]
        expected[name] = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="none")
    print(alike(found[0], expected[RECIPE], expected["exact"]))


@pytest.mark.parametrize(
    ("reference", "message"),
    [("no-such-recipe", "no-such-recipe"), ("aqua-2bit", "has to be fitted"), ("subkv-2bit", "nearest recipe")],
)
def test_what_cannot_be_served_stops_the_start(reference: str, message: str, tmp_path: Path):
    """With our sentence as the last, an exit code, and nothing left running."""
    refused = served(tmp_path, reference, BYTES)
    try:
        assert refused.process.wait(PATIENCE) != 0
    finally:
        refused.stop()
    assert f"KVQ_CACHE={reference}" in refused.log.splitlines()[-1] and message in refused.log.splitlines()[-1]


def test_preempted_requests_answer_as_alone(tmp_path: Path, text: list[int]):
    """More requests than pages: vLLM drops some and computes them again, in other pages, with other first tokens."""
    tight = served(tmp_path, RECIPE, 1 << 20, "--max-num-seqs", "8").wait()
    try:
        prompts = [text[100 * n : 100 * n + 90] for n in range(8)]
        alone = [tight.complete(prompt, max_tokens=300)["choices"][0] for prompt in prompts]
        assert tight.metric("vllm:num_preemptions_total") == 0
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(lambda prompt: tight.complete(prompt, max_tokens=300), prompts)
            together = [answer["choices"][0] for answer in answers]
        preempted = tight.metric("vllm:num_preemptions_total")
    finally:
        tight.stop()
    same = sum(one["text"] == other["text"] for one, other in zip(alone, together, strict=True))
    print(f"{preempted:g} preemptions; {same} of {len(prompts)} texts of 300 tokens are the same")
    assert preempted > 0 and same >= len(prompts) - 2


def test_a_client_that_goes_away_leaves_nothing_behind(server: Server, text: list[int]):
    """In the middle of an answer; its pages are free, and others are answered as before."""
    before = server.complete(text[:150])["choices"][0]["text"]
    with urllib.request.urlopen(server.request(text[:150], max_tokens=800, stream=True), timeout=300) as answer:
        assert answer.readline()
    until = time.monotonic() + 60
    while server.metric("vllm:num_requests_running") and time.monotonic() < until:
        time.sleep(0.5)
    assert server.metric("vllm:num_requests_running") == server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.complete(text[:150])["choices"][0]["text"] == before


def test_codecs_are_made_as_elsewhere():
    """While vLLM builds a model, its dtype is torch's default; a codec's matrices stay in float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with own_defaults():
            codec = shared.build(preset("lloyd-3bit"), Geometry(1, 3, 32), {})[0][0]
    finally:
        torch.set_default_dtype(before)
    x = torch.randn(1, 8, 96)
    decoded = codec.decode(codec.encode(x, Context()), Context())
    assert (decoded - x).norm() < 0.25 * x.norm()
