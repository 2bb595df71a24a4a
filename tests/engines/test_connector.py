"""Prefixes of a real, otherwise unmodified vLLM, in a folder: stored, loaded after a restart, damaged on the way."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

pytest.importorskip("vllm.v1", reason="vLLM is in an environment of its own: make test-engines")

from vllm_server import PATIENCE, ROOT, Server, tokens_of_a_text

from kvq_calib.model import find as models
from kvq_calib.run import calibrate as runs
from kvq_calib.run import plan as plans
from kvq_calib.run.run import Run
from kvq_runtime.artifact import artifact as saved
from kvq_runtime.prefix import sets
from kvq_runtime.recipe import preset

BYTES = 8 << 20  # of vLLM's cache, 1,365 tokens in float32
PROMPT, ANSWER, BLOCK = 700, 48, 128


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """AQUA-KV at 2 bits, fitted to the embedded model: keys before RoPE, each layer predicted from the one below."""
    folder, files = tmp_path_factory.mktemp("fit"), models.resolve("demo")
    plan = plans.make(files, (preset("aqua-2bit"),), None, samples=16, seq_len=512)
    (made,) = runs.calibrate(Run(plan, files, folder / "run")).values()
    saved.save(made, folder / "aqua-2bit.safetensors")
    return folder / "aqua-2bit.safetensors"


@pytest.fixture(scope="module")
def text() -> list[int]:
    return tokens_of_a_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefixes")


def options(path: Path, recipe: Path | str, module: str = "kvq_runtime.vllm.connector", name: str = "KVQConnector",
            **more) -> list[str]:  # fmt: skip
    given = {
        "kv_connector": name, "kv_connector_module_path": module, "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"path": str(path), "recipe": str(recipe)},
    }  # fmt: skip
    return ["--kv-transfer-config", json.dumps(given | more)]


def answered(server: Server, tokens: list[int]) -> tuple[list[str], float]:
    """The next tokens of a prompt, greedily, and the sum of their log-probabilities."""
    choice = server.complete(tokens, max_tokens=ANSWER)["choices"][0]["logprobs"]
    return choice["tokens"], sum(choice["token_logprobs"])


def kept(folder: Path, count: int) -> list[Path]:
    """The files of a folder, once there are so many, by the number of their block."""
    until = time.monotonic() + 120
    while len(files := [*folder.rglob("*.safetensors")]) < count and time.monotonic() < until:
        time.sleep(0.5)
    assert len(files) >= count, files
    return sorted(files, key=_number)


def _number(file: Path) -> int:
    with safe_open(file, "pt") as opened:
        return json.loads(opened.metadata()["kvq"])["number"]


@pytest.fixture(scope="module")
def blocks(first, folder: Path) -> list[Path]:
    """The files of the first server's prompt, which are all that the folder has before the second begins."""
    return kept(folder, 5)


@pytest.fixture(scope="module")
def first(artifact: Path, folder: Path, text: list[int], tmp_path_factory) -> tuple[list[str], float]:
    """What a server that finds nothing answers, at 16 bit, computed; then it is stopped, and its prefix is kept."""
    server = Server(tmp_path_factory.mktemp("first"), "first", {}, BYTES, *options(folder, artifact))
    try:
        answer = answered(server.wait(), text[:PROMPT])
        kept(folder, (PROMPT + ANSWER - 1) // BLOCK)
        assert server.metric("kvq_prefix_tokens_loaded_total") == 0
    finally:
        server.stop()
    return answer


@pytest.fixture(scope="module")
def server(artifact: Path, folder: Path, blocks, tmp_path_factory) -> Iterator[Server]:
    """Another server on the folder, without a prefix cache of its own: it has to load what it does not compute."""
    folder_of = tmp_path_factory.mktemp("second")
    started = Server(folder_of, "second", {}, BYTES, *options(folder, artifact), "--no-enable-prefix-caching")
    try:
        yield started.wait()
    finally:
        started.stop()


def test_after_a_restart_the_prefix_is_loaded_and_the_answer_is_that_of_16_bit(server, first, text):
    """640 of 700 tokens are kept, the newest 128 are computed: 512 are loaded, decoded from 2.46 bits."""
    tokens, total = answered(server, text[:PROMPT])
    assert server.metric("kvq_prefix_tokens_loaded_total") == 512
    same = sum(one == other for one, other in zip(tokens, first[0], strict=True))
    print(f"{same} of {ANSWER} tokens are those of 16 bit; log-probability {total:.3f}, 16 bit {first[1]:.3f}")
    assert tokens == first[0] and abs(total - first[1]) < 1.0
    assert server.metric("kvq_prefix_hits_total") == 1 and server.metric("kvq_prefix_bytes_loaded_total") > 0


def test_another_prompt_shares_what_it_begins_with(server, folder, text):
    before = server.metric("kvq_prefix_tokens_loaded_total")
    answered(server, text[:300] + text[900:1200])
    assert server.metric("kvq_prefix_tokens_loaded_total") - before == 256
    answered(server, text[1:PROMPT])
    assert server.metric("kvq_prefix_tokens_loaded_total") - before == 256  # no token is where it was


def test_a_tenant_loads_nothing_of_another(server, text):
    before = server.metric("kvq_prefix_tokens_loaded_total")
    server.complete(text[:PROMPT], cache_salt="another")
    assert server.metric("kvq_prefix_tokens_loaded_total") == before


def test_a_damaged_file_is_computed_again_and_kept_again(server, blocks, folder, first, text):
    """It is never decoded, the answer is the same, the log says so, and the next request finds it whole."""
    answered(server, text[:PROMPT])
    third = blocks[2]
    whole = third.read_bytes()
    third.write_bytes(whole[:-7] + b"damaged")
    before = server.metric("kvq_prefix_tokens_loaded_total")
    assert answered(server, text[:PROMPT])[0] == first[0]
    assert server.metric("kvq_prefix_tokens_loaded_total") - before == 256
    assert "damaged, and removed" in server.log and server.metric("kvq_prefix_blocks_damaged_total") == 1
    until = time.monotonic() + 60
    while not third.exists() and time.monotonic() < until:
        time.sleep(0.5)
    assert not [*sets.damaged(folder)]
    answered(server, text[:PROMPT])
    assert server.metric("kvq_prefix_tokens_loaded_total") - before == 256 + 512


def test_side_by_side_requests_answer_as_alone(server, text):
    """Loads and steps of others take turns."""
    from concurrent.futures import ThreadPoolExecutor

    prompts = [text[:PROMPT], text[40:140], text[:300] + text[900:1000], text[:500]]
    for prompt in prompts:  # once, so that all is kept that will be
        answered(server, prompt)
    time.sleep(5)
    alone = [answered(server, prompt)[0] for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = [answer[0] for answer in pool.map(lambda prompt: answered(server, prompt), prompts)]
    assert sum(one == other for one, other in zip(alone, together, strict=True)) >= len(prompts) - 1


def test_metrics_are_in_the_log(server, text):
    until = time.monotonic() + 60
    while "kvq tokens_loaded" not in server.log and time.monotonic() < until:
        answered(server, text[:PROMPT])
        time.sleep(1)
    assert "KV Transfer metrics: " in server.log and "kvq tokens_loaded" in server.log


def test_a_block_that_is_damaged_after_the_check_is_computed(artifact, folder, first, text, tmp_path):
    """vLLM is told which pages were not filled, computes from there, and does not try again."""
    given = options(folder, artifact, "late_damage", "LateDamage")
    late = Server(tmp_path, "late", {}, BYTES, *given, "--no-enable-prefix-caching").wait()
    try:
        assert answered(late, text[:PROMPT])[0] == first[0]
        assert late.metric("kvq_prefix_loads_failed_total") == 1
        assert late.metric("kvq_prefix_tokens_loaded_total") == 256
    finally:
        late.stop()
    assert "Recovered from KV load failure" in late.log and "damaged, and removed" in late.log


def test_two_workers_keep_and_load_the_heads_that_they_have(text, tmp_path):
    """Tensor parallelism: a set of blocks each; another pair of workers loads them."""
    given = [*options(tmp_path / "prefixes", "lloyd-3bit"), "--tensor-parallel-size", "2"]
    answers = []
    for name in ("one", "other"):
        pair = Server(tmp_path, name, {}, BYTES, *given, "--no-enable-prefix-caching").wait()
        try:
            answers.append(answered(pair, text[:PROMPT]))
            kept(tmp_path / "prefixes", 2 * ((PROMPT + ANSWER - 1) // BLOCK))
            loaded = pair.metric("kvq_prefix_tokens_loaded_total")
        finally:
            pair.stop()
        assert loaded == (2 * 512 if name == "other" else 0)  # summed over workers
    same = sum(one == other for one, other in zip(answers[0][0], answers[1][0], strict=True))
    print(f"{same} of {ANSWER} tokens are those of 16 bit; log-probabilities {answers[1][1]:.3f}, {answers[0][1]:.3f}")
    assert same > ANSWER // 2


@pytest.mark.parametrize(("recipe", "more", "message"), [
    ("subkv-2bit", {}, "KVQConnector, recipe subkv-2bit: subkv-2bit decides by how tokens arrive"),
    ("exact", {"kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
    ("tiny", {}, ".safetensors: fingerprint: "),
])  # fmt: skip
def test_what_cannot_be_kept_stops_the_start(recipe: str, more: dict, message: str, tmp_path: Path):
    """A recipe that depends on arrival, a policy that fails requests, an artifact of another model."""
    if recipe == "tiny":
        recipe = str(ROOT / "artifacts" / "golden" / "v1" / "aqua-2bit.safetensors")
    refused = Server(tmp_path, "refused", {}, BYTES, *options(tmp_path / "kept", recipe, **more))
    try:
        assert refused.process.wait(PATIENCE) != 0
    finally:
        refused.stop()
    assert message in refused.log, refused.log[-3000:]  # the log begins with the options, so a name says nothing
