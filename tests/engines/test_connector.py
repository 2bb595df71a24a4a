"""Prefixes of a real, otherwise unmodified vLLM, in a folder: stored, loaded after a restart, damaged on the way.

`make test-engines`
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

pytest.importorskip("vllm.v1", reason="vLLM is in an environment of its own: make test-engines")

from vllm_server import PATIENCE, Server, tokens_of_a_text

RECIPE = "exact-pre"  # keys before RoPE: blocks are decoded with the positions of their tokens
BYTES = 8 << 20  # of vLLM's cache, 1,365 tokens in float32
PROMPT, ANSWER, BLOCK = 700, 48, 128
HITS = "vllm:external_prefix_cache_hits_total"  # tokens


@pytest.fixture(scope="module")
def text() -> list[int]:
    return tokens_of_a_text()


def options(path: Path, recipe: str = RECIPE, policy: str = "recompute") -> list[str]:
    given = {
        "kv_connector": "KVQConnector", "kv_connector_module_path": "kvq_runtime.prefix.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": policy, "kv_connector_extra_config": {"path": str(path), "recipe": recipe},
    }  # fmt: skip
    return ["--kv-transfer-config", json.dumps(given)]


def answered(server: Server, tokens: list[int], **more: str) -> tuple[list[str], float]:
    """The next tokens of a prompt, greedily, and the sum of their log-probabilities."""
    choice = server.complete(tokens, max_tokens=ANSWER, **more)["choices"][0]["logprobs"]
    return choice["tokens"], sum(choice["token_logprobs"])


def kept(folder: Path, count: int) -> list[Path]:
    """The files of a folder, once there are so many."""
    until = time.monotonic() + 120
    while len(files := [*folder.rglob("*.safetensors")]) < count and time.monotonic() < until:
        time.sleep(0.5)
    assert len(files) >= count, files
    return files


def tokens_of(file: Path) -> list[int]:
    with safe_open(file, "pt") as opened:
        return json.loads(opened.metadata()["kvq"])["tokens"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefixes")


@pytest.fixture(scope="module")
def first(folder: Path, text: list[int], tmp_path_factory) -> tuple[list[str], float]:
    """What a server that finds nothing answers; then it is stopped, and its prefix is kept."""
    with Server(tmp_path_factory.mktemp("first"), "first", {}, BYTES, *options(folder)) as server:
        answer = answered(server, text[:PROMPT])
        kept(folder, (PROMPT + ANSWER - 1) // BLOCK)
        assert server.metric(HITS) == 0
    return answer


@pytest.fixture(scope="module")
def server(folder: Path, first, tmp_path_factory) -> Iterator[Server]:
    """Another server on the folder, without a prefix cache of its own: it has to load what it does not compute."""
    given = *options(folder), "--no-enable-prefix-caching"
    with Server(tmp_path_factory.mktemp("second"), "second", {}, BYTES, *given) as started:
        yield started


def test_after_a_restart_the_prefix_is_loaded_and_the_answer_is_the_same(server, first, text):
    """640 of 700 tokens are kept, the newest 128 are computed: 512 are loaded."""
    tokens, total = answered(server, text[:PROMPT])
    assert server.metric(HITS) == 512
    assert tokens == first[0] and abs(total - first[1]) < 0.01


def test_another_prompt_shares_what_it_begins_with_and_a_tenant_nothing(server, text):
    before = server.metric(HITS)
    answered(server, text[:300] + text[900:1200])
    assert server.metric(HITS) - before == 256
    answered(server, text[1:PROMPT])  # no token is where it was
    answered(server, text[:PROMPT], cache_salt="another")
    assert server.metric(HITS) - before == 256


def test_a_damaged_block_is_computed_and_kept_again(server, folder, first, text):
    """vLLM is told which pages were not filled, and computes from there; the next request finds the block whole."""
    third = next(file for file in kept(folder, 5) if tokens_of(file) == text[2 * BLOCK : 3 * BLOCK])
    whole = third.read_bytes()
    third.write_bytes(whole[:-7] + b"damaged")
    assert answered(server, text[:PROMPT])[0] == first[0]
    assert "Recovered from KV load failure" in server.log and "damaged, and removed" in server.log
    until = time.monotonic() + 60
    while not third.exists() and time.monotonic() < until:
        time.sleep(0.5)
    before = server.log.count("damaged, and removed")
    assert answered(server, text[:PROMPT])[0] == first[0] and server.log.count("damaged, and removed") == before


@pytest.mark.parametrize(("recipe", "policy", "message"), [
    ("subkv-2bit", "recompute", "KVQConnector, recipe subkv-2bit: subkv-2bit is fitted to each prompt, or chooses"),
    ("exact", "fail", '"kv_load_failure_policy": "recompute"'),
])  # fmt: skip
def test_what_cannot_be_kept_stops_the_start(recipe: str, policy: str, message: str, tmp_path: Path):
    """A recipe that depends on arrival, a policy that fails requests."""
    refused = Server(tmp_path, "refused", {}, BYTES, *options(tmp_path / "kept", recipe, policy))
    try:
        assert refused.process.wait(PATIENCE) != 0
    finally:
        refused.stop()
    assert message in refused.log, refused.log[-3000:]  # the log begins with the options, so a name says nothing
