"""LMCache's server, started by the command of docs/prefix.md; vLLM's connector to it. `make test-lmcache`.

vLLM is in an environment of its own, which `make engines` makes: LMCache is put before it, with what it imports.
"""

import json
import os
import re
import shlex
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("lmcache", reason="LMCache is in an environment of its own: make test-lmcache")

import lmcache
from vllm_server import MODEL, PATIENCE, ROOT, Process, free_ports

ENGINES = ROOT / "build" / "engines" / "bin" / "python"
BESIDE = ("lmcache", "nvtx", "aiofiles", "blake3", "opentelemetry", "sortedcontainers")  # vLLM's own has the rest
QUIET = {"LMCACHE_TRACK_USAGE": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def commands() -> tuple[list[str], list[str]]:
    """The words of `lmcache server ...` and of `vllm serve ...` as the page has them."""
    (block,) = re.findall(r"(?m)^    lmcache server (?:.|\n)*?(?=\n\n)", (ROOT / "docs" / "prefix.md").read_text())
    words = shlex.split(block.replace("\\\n", " "))
    at = words.index("vllm")
    return words[1:at], words[at:]


def server(python: Path | str, folder: Path, port: int, path: str) -> Process:
    """LMCache's, by the page's command; ports, folder, size of memory, model and recipe are the test's.

    A recipe by token, as vLLM's pages on a CPU lie in another order than LMCache thinks; the model's keys have a bias.
    """
    words, (http,) = commands()[0], free_ports(1)
    for old, new in {"6601": str(port), "6602": str(http), "20": "1"}.items():
        words[words.index(old)] = new
    given = {"/cache": str(folder), "Qwen/Qwen2.5-7B": str(MODEL), "kivi-4bit": "lloyd-3bit+key_bias=kept"}
    for old, new in given.items():
        words[-1] = words[-1].replace(old, new)
    command = [str(python), "-m", "lmcache.cli.main", *words]
    environment = {**os.environ, **QUIET, "PYTHONPATH": path}
    return Process(command, f"http://127.0.0.1:{http}/healthcheck", folder / f"lmcache-{port}.log", environment)


def test_the_pages_command_starts_the_server(tmp_path: Path):
    """With the serde: each option is LMCache's, and the log has the recipe and its bits."""
    with server(sys.executable, tmp_path, free_ports(1)[0], os.pathsep.join([str(ROOT), *sys.path])) as started:
        text = started.log
    assert "kvq: lloyd-3bit-key_bias-kept, 3.25 bits per element" in text and "Supported transfer mode: auto" in text


@pytest.mark.skipif(not ENGINES.is_file(), reason="vLLM is in an environment of its own: make engines")
def test_vllm_loads_what_lmcache_kept(tmp_path: Path):
    """Chunks of a prompt are in files as codes; both start anew, and vLLM's next answer is of what these hold."""
    beside = tmp_path / "beside"
    beside.mkdir()
    for name in BESIDE:
        (beside / name).symlink_to(Path(str(lmcache.__file__)).parents[1] / name)
    path = os.pathsep.join([str(beside), str(ROOT)])
    port, asked = free_ports(2)
    words = commands()[1]
    words = [str(MODEL) if word == "Qwen/Qwen2.5-7B" else word.replace("6601", str(port)) for word in words[2:]]
    vllm = [
        str(ENGINES), "-m", "vllm.entrypoints.openai.api_server", "--model", *words, "--served-model-name", "demo",
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--kv-cache-memory-bytes", str(64 << 20),
        "--no-enable-prefix-caching", "--host", "127.0.0.1", "--port", str(asked),
    ]  # fmt: skip
    environment = {
        **os.environ, **QUIET, "PYTHONPATH": path, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"
    }  # fmt: skip
    served = f"http://127.0.0.1:{asked}/health"
    tokens = [7 + n * n % 1999 for n in range(700)]
    with server(ENGINES, tmp_path, port, path) as first, Process(vllm, served, tmp_path / "vllm.log", environment):
        _ask(asked, tokens)
        until = time.monotonic() + PATIENCE
        while len(list(tmp_path.glob("*.data"))) < 2 and time.monotonic() < until:
            time.sleep(0.5)
        sizes = {file.stat().st_size for file in tmp_path.glob("*.data")}
        assert 0 < max(sizes) - 2 * 6 * 256 * 128 * 3.25 / 8 < 1400, first.log[-4000:]
    with server(ENGINES, tmp_path, port, path) as second, Process(vllm, served, tmp_path / "vllm.log", environment):
        until = time.monotonic() + PATIENCE
        while "2 L2" not in second.log and time.monotonic() < until:
            _ask(asked, tokens)
            time.sleep(2)
        assert "2 L2" in second.log, second.log[-4000:]


def _ask(port: int, tokens: list[int]) -> None:
    body = json.dumps({"model": "demo", "prompt": tokens, "max_tokens": 4, "temperature": 0}).encode()
    url, kind = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
    asked = urllib.request.Request(url, body, kind)
    with urllib.request.urlopen(asked, timeout=300) as answer:
        assert json.load(answer)["choices"][0]["text"] is not None
