"""A real language model behind vLLM on a CPU: SmolLM2-135M with each family that needs no fit, and one that is fitted.

`make test-engines`.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is in an environment of its own: make test-engines")

import torch
from transformers import AutoModelForCausalLM
from vllm_server import ROOT, Server, losses, served, tokens_of_a_text

from kvq_calib.evaluate.caches import FullCache, attending
from kvq_calib.model import find as models
from kvq_runtime.artifact import artifact
from kvq_runtime.recipe import preset

LENGTH = 512
RECIPES = (  # of each family that vLLM serves without a fit
    "lloyd-3bit", "rtn-4bit", "kivi-4bit", "higgs-4bit", "quarot-2bit", "gear-4bit", "turboquant-3bit",
    "polar-3bit",
)  # fmt: skip
FITTED = "oscar-2bit"
BYTES = 64 << 20  # of the cache
NAME = "smollm2-135m"


@pytest.fixture(scope="module")
def folder() -> Path:
    """The model, where it is: nothing is downloaded."""
    try:
        path = models.resolve(NAME).path
    except (ValueError, RuntimeError, OSError) as error:
        pytest.skip(f"{NAME} is not on this machine: {error}")
    if not (path / "model.safetensors").is_file():
        pytest.skip(f"{path} has no model.safetensors, which vLLM reads")
    return path


@pytest.fixture(scope="module", params=[*RECIPES, FITTED])
def recipe(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A recipe's name, or the file of an artifact that is fitted here."""
    if request.param != FITTED:
        return request.param
    fits, run = ROOT / ".venv" / "bin" / "kvq-calibrate", tmp_path_factory.mktemp("fit") / "run"
    if not fits.is_file():
        pytest.skip("what fits is in another environment: make env")
    asked = ["--model", folder, "--recipe", FITTED, "--corpus", "demo", "--samples", "4", "--seq-len", "256"]
    subprocess.run([fits, *asked, "--no-eval", "--no-publish", "--quiet", "--run", run], check=True)
    return str(next(run.rglob("kvq.safetensors")))


@pytest.fixture(scope="module")
def server(folder: Path, recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = served(tmp_path_factory.mktemp("server"), recipe, BYTES, model=folder)
    try:
        started.wait()
        yield started
    finally:
        started.stop()


def test_perplexity_is_that_of_a_full_encode(server: Server, folder: Path, recipe: str):
    """As `kvq eval` finds it, by other code: the same tokens, recipe and sinks.

    In the mean: 30 layers carry a code on the edge between two so far that single tokens' losses are 0.2 to 0.4 nats
    apart, and pages put KIVI's groups elsewhere.
    """
    tokens = tokens_of_a_text(folder)[:LENGTH]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = {}
    fitted = artifact.load(Path(recipe)) if recipe.endswith(".safetensors") else None
    of_recipe = (preset(recipe), None) if fitted is None else (fitted.recipe, fitted.tensors)
    for name, (own, tensors) in {"exact": (preset("exact"), None), recipe: of_recipe}.items():
        cache = FullCache(own, model, tensors, length=LENGTH)
        with torch.no_grad(), attending(model, cache):
            logits = model(torch.tensor([tokens]), past_key_values=cache).logits[0]
        expected[name] = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="none")
    found = losses(server.complete(tokens, prompt_logprobs=0, max_tokens=1), tokens)
    apart_T = found - expected[recipe]
    error = float(apart_T.std()) / len(apart_T) ** 0.5
    said = (
        f"loss {found.mean():.4f}; by transformers {expected[recipe].mean():.4f}; 16 bit {expected['exact'].mean():.4f}"
    )
    print(said)
    assert error < 0.05 and abs(float(apart_T.mean())) < 4 * error, f"{said}; standard error {error:.4f}"


def test_it_answers_as_it_does_alone(server: Server, folder: Path):
    """Twice the same prompt, the second time from pages that are there."""
    tokens = tokens_of_a_text(folder)[:700]
    first, again = (server.complete(tokens, max_tokens=48)["choices"][0]["text"] for _ in range(2))
    assert first.strip() and first == again
