"""Servers in processes of their own: a real vLLM on a CPU with the embedded model, to start, ask and stop."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from kvq_runtime.artifact import artifact, fingerprint
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.codec import codec
from kvq_runtime.recipe import preset, with_each
from kvq_runtime.vllm import served_recipe

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "artifacts" / "demo-model"
PATIENCE = 540  # seconds until a server answers
# numba, in vLLM's search for drafts, gives OpenMP as many threads as it has itself: else one for each processor, each a
# wait for a busy one in every operation of vLLM's
ENVIRONMENT = os.environ | {
    "NUMBA_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}",
}  # fmt: skip


class Process:
    """A server in a process of its own, and its log; it is ready once it answers at `url`."""

    def __init__(self, command: Sequence[str], url: str, log: Path, environment: Mapping[str, str]):
        self.url, self.path = url, log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=subprocess.STDOUT, cwd=log.parent, start_new_session=True
            )

    @property
    def log(self) -> str:
        return self.path.read_text(errors="replace")

    def wait(self) -> Self:
        """Return once it answers; fail with its log if it ends, or takes too long."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and self.process.poll() is None:
            try:
                urllib.request.urlopen(self.url, timeout=5)
                return self
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        self.stop()
        pytest.fail(f"no server: {self.log[-4000:]}")

    def stop(self) -> None:
        """End the server, and if it does not end, at once, with the processes that it started."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            self.process.wait(60)

    def __enter__(self) -> Self:
        return self.wait()

    def __exit__(self, *_: object) -> None:
        self.stop()


class Server(Process):
    """A vLLM server of a model, and what it answers.

    name       of its log
    variables  of its environment
    size       bytes of its cache
    """

    def __init__(
        self, folder: Path, name: str, variables: Mapping[str, str], size: int, *more: str, model: Path = MODEL
    ):
        (self.port,) = free_ports(1)
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name",
            "demo", "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--kv-cache-memory-bytes",
            str(size), "--max-num-batched-tokens", "256", "--host", "127.0.0.1", "--port", str(self.port), *more,
        ]  # fmt: skip
        url = f"http://127.0.0.1:{self.port}/health"
        super().__init__(command, url, folder / f"{name}.log", ENVIRONMENT | variables)

    def request(self, tokens: list[int], **settings: Any) -> urllib.request.Request:
        """Complete a prompt, greedily unless told otherwise."""
        body = {"model": "demo", "prompt": tokens, "max_tokens": 24, "temperature": 0, "logprobs": 0} | settings
        return urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip

    def complete(self, tokens: list[int], **settings: Any) -> dict[str, Any]:
        with urllib.request.urlopen(self.request(tokens, **settings), timeout=PATIENCE) as answer:
            return json.load(answer)

    def metric(self, name: str) -> float:
        """The sum of a Prometheus metric over its labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        return sum(float(number) for number in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.M))


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def served(folder: Path, reference: str, size: int, *more: str, model: Path = MODEL, **variables: str) -> Server:
    """A server whose pages, of so many bytes in all, hold what a reference names; of the embedded model by default."""
    variables = {"KVQ_CACHE": reference} | variables
    return Server(folder, reference.replace("/", "_"), variables, size, *more, model=model)


def save_fisher(path: Path) -> None:
    """Save `fisher-head-3bit` of the embedded model, not fitted: bases that change nothing, 4 bits and 2."""
    config = json.loads((MODEL / "config.json").read_text())
    of_model = fingerprint.from_config(config, served_recipe.projections(MODEL))
    size = of_model.geometry
    counts = tuple(size.width // 2 if bits in (4, 2) else 0 for bits in range(7, -1, -1))
    recipe = with_each(
        preset("fisher-head-3bit"), lambda scheme: replace(scheme, quantize=replace(scheme.quantize, counts=counts))
    )
    tensors = {name: torch.ones(shape).to(dtype) for name, (shape, dtype) in codec.all_specs(recipe, size).items()}
    for name, x in tensors.items():
        if name.endswith("mean"):
            x.zero_()
        elif name.endswith(("basis", "dual")):
            x[:] = torch.eye(size.head_size)
        elif name.endswith("gain_ends"):
            x[:] = torch.tensor([-2.0, 2.0])
    artifact.save(Artifact(recipe, of_model, tensors, {"model": "demo"}, {}), path)


def tokens_of_a_text(model: Path = MODEL) -> list[int]:
    """Of a text that was in no calibration, and does not change."""
    return AutoTokenizer.from_pretrained(model)((ROOT / "LICENSE").read_text())["input_ids"]


def losses(answer: dict[str, Any], tokens: list[int]) -> Tensor:
    """Negative log-likelihoods of a prompt's tokens but the first, by `prompt_logprobs`: [T - 1]."""
    stated = answer["choices"][0]["prompt_logprobs"][1:]
    return torch.tensor([-row[str(token)]["logprob"] for row, token in zip(stated, tokens[1:], strict=True)])


def apart(first: dict[str, Any], second: dict[str, Any]) -> float:
    """How much likelier than the second token the first was where two greedy texts part; 0.0: they are the same."""
    tokens = zip(first["logprobs"]["tokens"], second["logprobs"]["tokens"], strict=True)
    part = next((place for place, (one, other) in enumerate(tokens) if one != other), None)
    if part is None:
        return 0.0
    best, *_, other = sorted(first["logprobs"]["top_logprobs"][part].values(), reverse=True)
    return best - other


def alike(found_T: Tensor, expected_T: Tensor, exact_T: Tensor) -> str:
    """Compare losses of tokens: those of the server, of the same recipe by transformers, and of 16 bit.

    Tokens one by one, as losses of a text may cancel. Not to the last digit: a code on the edge between two falls to
    the other side, and later layers feel it.
    """
    apart, cost = ((x_T - expected_T).abs().mean() for x_T in (found_T, exact_T))
    means = f"loss {found_T.mean():.4f}; by transformers {expected_T.mean():.4f}; 16 bit {exact_T.mean():.4f}"
    said = f"{means}; {apart:.5f} nats a token apart, {cost:.5f} from 16 bit"
    assert cost > 0.01, "a recipe that changes nothing tells nothing"
    assert apart < 0.2 * cost, said
    return said
