"""A real vLLM on a CPU: the embedded model behind its OpenAI endpoint, with a compressed cache. `make test-engines`.

Of a recipe whose codes belong to single tokens, and of one whose codes belong to a whole page.
"""

import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is in an environment of its own: make test-engines")

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig
from vllm_server import MODEL, PATIENCE, Server, alike, apart, losses, save_fisher, served, tokens_of_a_text

from kvq_runtime import KVQCache
from kvq_runtime.recipe import preset

BY_TOKEN, WHOLE = "lloyd-3bit", "kivi-2bit"
BYTES, PAGE = 3 << 20, 128  # of the cache, and tokens of a page
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
Servers = Callable[[str], Server]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The server of a recipe, started when it is first asked for."""
    started: dict[str, Server] = {}

    def server_of(recipe: str) -> Server:
        if recipe not in started:
            started[recipe] = served(tmp_path_factory.mktemp(Path(recipe).stem), recipe, BYTES)
        return started[recipe].wait()

    yield server_of
    for each in started.values():
        each.stop()


@pytest.fixture(scope="module")
def text() -> list[int]:
    return tokens_of_a_text()


def losses_by_transformers(recipe: str, tokens: list[int], folder: Path = MODEL) -> Tensor:
    """Losses by transformers with a page a forward pass: a query's own page is exact, as in vLLM."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        cache = KVQCache(preset(recipe).with_exact(recent=0), model)
        logits = torch.cat([
            model(torch.tensor([tokens[start : start + PAGE]]), past_key_values=cache).logits[0]
            for start in range(0, len(tokens), PAGE)
        ])  # fmt: skip
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="none")


@pytest.mark.parametrize("recipe", [BY_TOKEN, WHOLE])
def test_losses_are_those_of_transformers(recipe: str, server: Servers, text: list[int]):
    """vLLM's chunks are 256 tokens; the same recipe, window and sinks, by other code."""
    tokens = text[:700]
    by_vllm = losses(server(recipe).complete(tokens, prompt_logprobs=0, max_tokens=1), tokens)
    print(alike(by_vllm, losses_by_transformers(recipe, tokens), losses_by_transformers("exact", tokens)))


@pytest.mark.parametrize("recipe", [BY_TOKEN, WHOLE])
def test_a_request_does_not_depend_on_what_runs_beside_it(recipe: str, server: Servers, text: list[int]):
    """Prompts of many lengths, half with a shared prefix, alone and all at once: in chunks, over the ends of pages."""
    asked = server(recipe)
    prompts = [text[:300] + text[400 + 40 * n : 420 + 60 * n] for n in range(4)]
    prompts += [text[500 + 7 * n : 503 + 47 * n] for n in range(1, 5)]
    alone = [asked.complete(prompt)["choices"][0] for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = [answer["choices"][0] for answer in pool.map(asked.complete, prompts)]
    pairs = list(zip(alone, together, strict=True))
    same = sum(first["text"] == second["text"] for first, second in pairs)
    print(f"{same} of {len(prompts)} texts are the same")
    assert same >= len(prompts) - 2  # a code may fall to the other side: matrix products round by the batch's shape
    for first, second in pairs:
        assert abs(first["logprobs"]["token_logprobs"][0] - second["logprobs"]["token_logprobs"][0]) < 0.1
    assert asked.metric("vllm:prefix_cache_hits_total") > 0


def test_tokens_that_fit_are_the_recipes_bits(server: Servers):
    """From vLLM's own log: capacity is that of 3.25 bits, scales counted, where float32 has 32 and 16 bits 16."""
    stated = re.search(r"KV cache size: ([\d,]+) tokens", server(BY_TOKEN).log)
    assert stated is not None, server(BY_TOKEN).log[-2000:]
    per_token = 6 * 2 * 2 * (64 * 3 // 8 + 2)  # layers, keys and values, heads; codes and a scale
    assert int(stated[1].replace(",", "")) == BYTES // (per_token * PAGE) * PAGE


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
    tokens, others, runs = text[:700], text[200:1700], []  # of more tokens than a page of vLLM's
    with served(tmp_path, WHOLE, 6 << 20, "--max-model-len", "2048", model=sliding) as server:
        for _ in range(3):
            runs.append(losses(server.complete(tokens, prompt_logprobs=0, max_tokens=1), tokens))
            assert server.complete(others)["choices"][0]["text"] == server.complete(others)["choices"][0]["text"]
        assert server.metric("vllm:prefix_cache_hits_total") > 0
    assert "pages of 1408 tokens" in server.log  # eleven of kvq's fill one of the layer that slides, of 32 bits
    assert all(torch.allclose(again, runs[0], atol=1e-3) for again in runs)
    print(alike(runs[0], *(losses_by_transformers(recipe, tokens, sliding) for recipe in (WHOLE, "exact"))))


@pytest.mark.parametrize(
    ("reference", "message"),
    [("no-such-recipe", "no-such-recipe"), ("aqua-2bit", "cannot serve aqua-2bit"), ("subkv-2bit", "use kivi-4bit")],
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
    prompts = [text[100 * n : 100 * n + 90] for n in range(8)]
    with served(tmp_path, BY_TOKEN, 1 << 20, "--max-num-seqs", "8") as tight:
        alone = [tight.complete(prompt, max_tokens=300)["choices"][0] for prompt in prompts]
        assert tight.metric("vllm:num_preemptions_total") == 0
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(lambda prompt: tight.complete(prompt, max_tokens=300), prompts)
            together = [answer["choices"][0] for answer in answers]
        preempted = tight.metric("vllm:num_preemptions_total")
    same = sum(first["text"] == second["text"] for first, second in zip(alone, together, strict=True))
    print(f"{preempted:g} preemptions; {same} of {len(prompts)} texts of 300 tokens are the same")
    assert preempted > 0 and same >= len(prompts) - 2


def test_a_client_that_goes_away_leaves_nothing_behind(server: Servers, text: list[int]):
    """In the middle of an answer; its pages are free, and others are answered as before."""
    asked = server(BY_TOKEN)
    before = asked.complete(text[:150])["choices"][0]["text"]
    with urllib.request.urlopen(asked.request(text[:150], max_tokens=800, stream=True), timeout=300) as answer:
        assert answer.readline()
    until = time.monotonic() + 60
    while asked.metric("vllm:num_requests_running") and time.monotonic() < until:
        time.sleep(0.5)
    assert asked.metric("vllm:num_requests_running") == asked.metric("vllm:kv_cache_usage_perc") == 0
    assert asked.complete(text[:150])["choices"][0]["text"] == before


@pytest.mark.parametrize(("recipe", "method"), [(BY_TOKEN, "ngram"), (BY_TOKEN, "draft"), (WHOLE, "draft")])
def test_drafts_change_nothing(recipe: str, method: str, server: Servers, text: list[int], tmp_path: Path):
    """Tokens that are refused may have filled a page. The draft model is the first half of the model's layers."""
    prompts = [text[:60], text[:90] + text[:20], text[:90] + text[:60]]  # what repeats is drafted
    plain = [server(recipe).complete(prompt, max_tokens=200, logprobs=2)["choices"][0] for prompt in prompts]
    options = NGRAM
    if method == "draft":
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        model.model.layers, model.config.num_hidden_layers = model.model.layers[:3], 3
        model.config.layer_types = model.config.layer_types[:3]
        model.save_pretrained(tmp_path / "draft")
        options = {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 4}
    with served(tmp_path, recipe, 4 * BYTES, "--speculative-config", json.dumps(options)) as drafting:
        speculated = [drafting.complete(prompt, max_tokens=200, logprobs=2)["choices"][0] for prompt in prompts]
        drafted, accepted = (
            drafting.metric(f"vllm:spec_decode_num_{name}_tokens_total") for name in ("draft", "accepted")
        )
    print(f"{recipe}, {method}: {drafted:g} drafted, {accepted:g} accepted")
    assert accepted < drafted and (accepted > 0 or method == "draft")  # that draft is refused throughout
    for first, second in zip(plain, speculated, strict=True):
        assert apart(first, second) < 0.05  # a code on the edge between two may fall to the other side


@pytest.mark.parametrize("recipe", [WHOLE, "fisher.safetensors"])
def test_two_workers_answer_as_one(recipe: str, server: Servers, text: list[int], tmp_path: Path):
    """Tensor parallelism: each encodes the one KV head that it has; the last has a basis and gains of its own."""
    if recipe != WHOLE:
        recipe = str(tmp_path / recipe)
        save_fisher(Path(recipe))
    tokens, prompts = text[:400], [text[100 * n : 100 * n + 60] for n in range(3)]

    def answers(asked: Server) -> tuple[Tensor, list]:
        greedy = [asked.complete(prompt, max_tokens=100, logprobs=2)["choices"][0] for prompt in prompts]
        return losses(asked.complete(tokens, prompt_logprobs=0, max_tokens=1), tokens), greedy

    alone, texts = answers(server(recipe))
    with served(tmp_path, recipe, BYTES, "--tensor-parallel-size", "2") as split:
        shared, others = answers(split)
    off = (shared - alone).abs().mean()
    print(f"{recipe}: loss {shared.mean():.5f} on two workers, {alone.mean():.5f} on one; {off:.6f} nats apart")
    assert off < 0.01
    for first, second in zip(texts, others, strict=True):
        assert apart(first, second) < 0.05  # a code on the edge between two may fall to the other side
