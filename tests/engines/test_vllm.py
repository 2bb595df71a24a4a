"""A real vLLM on a CPU: the embedded model behind its OpenAI endpoint, with a compressed cache. `make test-engines`."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="vLLM has an environment of its own: make test-engines")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvq_calib.evaluate.full import FullCache
from kvq_calib.evaluate.reads import counting
from kvq_runtime.codec import codec as codecs
from kvq_runtime.codec.codec import Context
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import preset
from kvq_runtime.vllm import backend

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "artifacts" / "demo-model"
RECIPE = "lloyd-3bit"
BYTES = 3 << 20  # of the cache
PATIENCE = 540  # seconds until a server answers
ENVIRONMENT = os.environ | {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}  # fmt: skip


class Server:
    """A server of the embedded model, its log, and what it answers."""

    def __init__(self, folder: Path, reference: str, *more: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.path = folder / f"{reference}.log"
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--served-model-name",
            "demo", "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--kv-cache-memory-bytes",
            str(BYTES), "--max-num-batched-tokens", "256", "--host", "127.0.0.1", "--port", str(self.port), *more,
        ]  # fmt: skip
        with self.path.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=ENVIRONMENT | {"KVQ_CACHE": reference}, stdout=log, stderr=subprocess.STDOUT, cwd=folder
            )

    @property
    def log(self) -> str:
        return self.path.read_text(errors="replace")

    def wait(self) -> None:
        """Return once it answers; fail with its log if it ends, or takes too long."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        pytest.fail(f"no server: {self.log[-4000:]}")

    def complete(self, tokens: list[int], **settings: Any) -> dict[str, Any]:
        """Complete a prompt, greedily unless told otherwise."""
        body = {"model": "demo", "prompt": tokens, "max_tokens": 24, "temperature": 0, "logprobs": 0} | settings
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("server"), RECIPE)
    try:
        started.wait()
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def text() -> list[int]:
    """Tokens of a text that was in no calibration."""
    return AutoTokenizer.from_pretrained(MODEL)((ROOT / "docs" / "architecture.md").read_text())["input_ids"]


def _loss(answer: dict[str, Any], tokens: list[int]) -> float:
    """Mean negative log-likelihood of a prompt, by `prompt_logprobs`."""
    stated = answer["choices"][0]["prompt_logprobs"][1:]
    return -sum(row[str(token)]["logprob"] for row, token in zip(stated, tokens[1:], strict=True)) / len(stated)


def test_perplexity_is_that_of_a_full_encode(server: Server, text: list[int]):
    """The same tokens through `kvq eval`'s full encode: the same recipe, window and sinks, by other code.

    Not to the last digit: a code on the edge between two falls to the other side, and later layers feel it.
    """
    tokens = text[:512]
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    losses = {}
    for name in ("exact", RECIPE):
        cache = FullCache(preset(name), model, length=512)
        with torch.no_grad(), counting(model, cache):
            logits = model(torch.tensor([tokens]), past_key_values=cache).logits[0]
        losses[name] = float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:])))
    found = _loss(server.complete(tokens, prompt_logprobs=0, max_tokens=1), tokens)
    cost = losses[RECIPE] - losses["exact"]
    print(f"loss {found:.4f}; full encode {losses[RECIPE]:.4f}; 16 bit {losses['exact']:.4f}")
    assert cost > 0.01, "a recipe that costs nothing tells nothing"
    assert abs(found - losses[RECIPE]) < 0.2 * cost


def test_a_request_does_not_depend_on_what_runs_beside_it(server: Server, text: list[int]):
    """Prompts of many lengths, half with a shared prefix, alone and all at once: in chunks, with shared pages."""
    prompts = [text[:300] + text[400 + 40 * n : 420 + 60 * n] for n in range(8)]
    prompts += [text[500 + 7 * n : 503 + 47 * n] for n in range(1, 9)]
    alone = [server.complete(prompt)["choices"][0] for prompt in prompts]
    with ThreadPoolExecutor(16) as pool:
        together = [answer["choices"][0] for answer in pool.map(server.complete, prompts)]
    same = sum(one["text"] == other["text"] for one, other in zip(alone, together, strict=True))
    print(f"{same} of {len(prompts)} texts are the same")
    assert same >= len(prompts) - 2  # a code may fall to the other side: matrix products round by the batch's shape
    first = [(one["logprobs"]["token_logprobs"][0], other["logprobs"]["token_logprobs"][0])
             for one, other in zip(alone, together, strict=True)]  # fmt: skip
    assert all(abs(one - other) < 0.1 for one, other in first)


def test_several_answers_share_a_prompt(server: Server, text: list[int]):
    """n > 1: three answers of one prompt see the same cache, whatever is drawn; and draw differently."""
    alone = server.complete(text[:200], logprobs=5)["choices"][0]["logprobs"]["top_logprobs"][0]
    choices = server.complete(text[:200], n=3, temperature=1.0, seed=1, logprobs=5)["choices"]
    for choice in choices:
        first = choice["logprobs"]["top_logprobs"][0]
        assert all(abs(first[token] - alone[token]) < 0.01 for token in alone if token in first)
        assert len(set(first) & set(alone)) >= 4
    assert len({choice["text"] for choice in choices}) > 1


def test_tokens_that_fit_are_the_recipes_bits(server: Server):
    """From vLLM's own log: capacity is that of 3.25 bits, scales counted, where float32 has 32 and 16 bits 16."""
    found = re.search(r"KV cache size: ([\d,]+) tokens", server.log)
    assert found is not None, server.log[-2000:]
    tokens = int(found[1].replace(",", ""))
    per_token = 6 * 2 * 2 * (64 * 3 // 8 + 2)  # layers, keys and values, heads; codes and a scale
    assert tokens == BYTES // (per_token * 128) * 128


@pytest.mark.parametrize(
    ("reference", "message"),
    [("no-such-recipe", "no-such-recipe"), ("aqua-2bit", "has to be fitted"), ("kivi-2bit", "nearest recipe")],
)
def test_what_cannot_be_served_stops_the_start(reference: str, message: str, tmp_path: Path):
    """With our sentence as the last, an exit code, and nothing left running."""
    refused = Server(tmp_path, reference)
    try:
        assert refused.process.wait(PATIENCE) != 0
    finally:
        refused.stop()
    assert f"KVQ_CACHE={reference}" in refused.log.splitlines()[-1] and message in refused.log.splitlines()[-1]


def test_codecs_are_made_as_elsewhere():
    """While vLLM builds a model, its dtype is torch's default; a codec's matrices stay in float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with backend._own_defaults():
            codec = codecs.build(preset("lloyd-3bit"), Geometry(1, 3, 32), {})[0][0]
    finally:
        torch.set_default_dtype(before)
    x = torch.randn(1, 8, 96)
    decoded = codec.decode(codec.encode(x, Context()), Context())
    assert (decoded - x).norm() < 0.25 * x.norm()
