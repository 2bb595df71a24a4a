"""Evaluation: what must be equal, what must be closer, and what a record keeps."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvq_calib.evaluate import perplexity, record
from kvq_calib.evaluate.candidate import Candidate, find
from kvq_calib.evaluate.perplexity import REFERENCE
from kvq_calib.model import find as models
from kvq_calib.text import corpus
from kvq_runtime.artifact import artifact
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.cli.main import main
from kvq_runtime.codec import codec
from kvq_runtime.hf import KVQCache
from kvq_runtime.recipe import preset
from kvq_runtime.registry.local import LocalRegistry

LENGTH = 256


def scored(model, tokens_BT, *recipes, **settings):
    made = {recipe.name: lambda recipe=recipe: KVQCache.from_recipe(recipe, model) for recipe in recipes}
    return perplexity.scores(model, tokens_BT, made, **settings)


def zeros(recipe, files) -> dict[str, torch.Tensor]:
    """Tensors of a recipe, as if nothing had been found."""
    specs = codec.all_specs(recipe, files.geometry).items()
    return {name: torch.zeros(*shape, dtype=kind) for name, (shape, kind) in specs}


@pytest.fixture(scope="module")
def demo():
    files = models.resolve("demo")
    batch = corpus.select("demo", files.path, 2, LENGTH, 0, "held-out")
    return SimpleNamespace(files=files, batch=batch, tokens=batch.tokens_BT, model=record.load_model(files))


@pytest.fixture(scope="module")
def scores(demo):
    recipes = [preset(name).with_exact(recent=0) for name in ("exact", "higgs-2bit", "higgs-4bit")]
    return scored(demo.model, demo.tokens, *recipes)


def test_exact_is_the_16_bit_model_and_more_bits_are_closer(scores):
    exact, reference = scores["exact"], scores[REFERENCE]
    assert exact.perplexity == pytest.approx(reference.perplexity, rel=1e-5)
    assert abs(exact.kl) < 1e-9 and exact.top1 == 1
    assert reference.kl == 0 and reference.tokens == 2 * (LENGTH - 1)
    assert 0 < 5 * scores["higgs-4bit"].kl < scores["higgs-2bit"].kl
    assert scores["higgs-4bit"].top1 > scores["higgs-2bit"].top1


def test_perplexity_is_that_of_one_forward_pass(demo, scores):
    with torch.inference_mode():
        logits = demo.model(demo.tokens.long()).logits[:, :-1].double()
    losses = torch.nn.functional.cross_entropy(logits.mT, demo.tokens[:, 1:].long(), reduction="none").mean(1)
    assert scores[REFERENCE].losses == pytest.approx(losses.tolist(), rel=1e-5)
    assert scores[REFERENCE].perplexity == pytest.approx(math.exp(losses.mean()), rel=1e-5)


def test_kl_by_its_definition(demo, scores):
    recipe = preset("higgs-2bit").with_exact(recent=0)
    cache, window = KVQCache.from_recipe(recipe, demo.model), demo.tokens[:1].long()
    with torch.inference_mode():
        logits = torch.cat([demo.model(part, past_key_values=cache).logits for part in window.split(32, 1)], 1)
        p, q = (torch.softmax(x[0, :-1].double(), -1) for x in (demo.model(window).logits, logits))
    expected = torch.nn.functional.kl_div(q.log(), p, reduction="batchmean")
    assert scores["higgs-2bit"].kls[0] == pytest.approx(float(expected), rel=1e-3)


def test_distance_from_the_reference():
    """Windows differ more among each other than what is compared: the error is that of the gaps, window by window."""
    own, other = perplexity.Score(losses=[1.1, 2.3]), perplexity.Score(losses=[1.0, 2.0])
    relative, spread = own.against(other)
    assert relative == pytest.approx(own.perplexity / other.perplexity - 1)
    assert spread == pytest.approx(math.exp(0.2) * 0.1)  # gaps of 0.1 and 0.3: deviation 0.2 / √2, of two windows
    assert perplexity.Score(losses=[1.1]).against(perplexity.Score(losses=[1.0]))[1] is None


@pytest.fixture
def fitted(demo) -> Artifact:
    """An artifact of the demo model whose means are zero: nothing needs to be calibrated for it."""
    recipe, provenance = preset("mean-higgs-2bit"), {"model": "demo", "corpus": {"source": "demo"}}
    return Artifact(recipe, demo.files.fingerprint(), zeros(recipe, demo.files), provenance, {})


def run(*words: str) -> int:
    return main(["eval", *words, "--model", "demo", "--windows", "1", "--device", "cpu"])


def test_the_command_stores_records(demo, fitted, tmp_path, capsys):
    registry = LocalRegistry(tmp_path / "registry")
    version = registry.publish("demo-mean", artifact.to_bytes(fitted))
    words = ["demo-mean", "exact", "--length", "300", "--json"]
    words += ["--registry", registry.url, "--output", str(tmp_path / "out.json")]
    assert run(*words) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out.json").read_text())
    assert registry.evaluations(version.sha256) == printed[:1]
    assert printed[0]["artifact"] == version.sha256 and printed[1]["artifact"] == "exact"
    for part in printed[0]["result"]["protocols"].values():
        assert part["relative"] == pytest.approx(part["perplexity"] / part["reference_perplexity"] - 1, abs=1e-9)
        assert part["kl"] > 0 and 0 < part["decoded"]["reads"] < 1
    assert printed[0]["protocol"]["model"]["parameters"] == demo.model.num_parameters()


def test_a_recipe_is_found_as_it_is_written(demo, tmp_path):
    """By name, with other settings, and in a file, under a name of its own; none of it asks the registry."""
    (tmp_path / "mine.json").write_text(json.dumps(preset("kivi-2bit").to_json() | {"name": "mine"}))
    texts = ["kivi-2bit", "kivi-2bit+window.recent=32", f"{tmp_path}/mine.json+window.recent=32"]
    candidates = [find(text, demo.files, str(tmp_path / "none")) for text in texts]
    assert [one.name for one in candidates] == ["kivi-2bit", "kivi-2bit-window.recent-32", "mine-window.recent-32"]
    assert [one.recipe.window.recent for one in candidates] == [128, 32, 32] and not any(
        s.published for s in candidates
    )


def test_what_cannot_be_evaluated(demo, fitted, tmp_path):
    with pytest.raises(ValueError, match=r"aqua-2bit has fitted stages, and no artifact has that name"):
        find("aqua-2bit", demo.files, str(tmp_path))
    other = replace(fitted, fingerprint=replace(fitted.fingerprint, rope={"rope_type": "default", "rope_theta": 5.0}))
    artifact.save(other, tmp_path / "other.safetensors")
    with pytest.raises(artifact.ArtifactError, match="rope"):
        find(str(tmp_path / "other.safetensors"), demo.files)
    short = replace(demo.files, config={**demo.files.config, "max_position_embeddings": 64})
    exact = Candidate("exact", preset("exact"), {})
    with pytest.raises(ValueError, match=r"windows of 256 tokens; .* at most 64"):
        record.evaluate(short, demo.batch, [exact])
    with pytest.raises(ValueError, match="name each once"):
        record.evaluate(demo.files, demo.batch, [exact] * 2)
