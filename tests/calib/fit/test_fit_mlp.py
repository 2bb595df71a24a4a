"""An MLP fitted to all tokens: what it gains over a sample, that it repeats itself, and what it holds in memory."""

from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor

from kvq_calib.cli import calibrate as cli
from kvq_calib.fit.predict import fit_mlp_to_all
from kvq_calib.fit.statistics import Centred, CrossMoments
from kvq_runtime.artifact.recipe_text import read
from kvq_runtime.codec.codec import all_specs
from kvq_runtime.geometry import MODELS
from kvq_runtime.registry import resolve as registry
from kvq_runtime.stages.predict import MLP
from kvq_runtime.store.memory import Sizes


def moments(z: Tensor, y: Tensor) -> Centred:
    sums = CrossMoments(torch.zeros(z.shape[1]), torch.zeros(y.shape[1]))
    sums.update(z[None], y[None])
    return sums.value()


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["layer", "none"])
def test_it_learns_a_curve_repeats_itself_and_is_centred_on_all_tokens(norm):
    random = torch.Generator().manual_seed(0)
    z = 5 * torch.randn(3000, 12, generator=random)
    scaled = z / 5 if norm == "none" else torch.nn.functional.layer_norm(z, (12,))
    y = 30 * torch.tanh(scaled @ torch.randn(12, 6, generator=random) / 4)
    predictor = MLP(norm=norm, hidden="width", tokens="all")
    chunks = list(torch.cat([z, y], 1).split([1400, 100, 1500]))
    first, second, other = (
        fit_mlp_to_all(predictor, moments(z, y), lambda: chunks, seed, steps=400, batch=256) for seed in (3, 3, 4)
    )
    specs = predictor.specs(12, 6)
    assert {n: (tuple(t.shape), t.dtype) for n, t in first.items()} == {n: s for n, s in specs.items() if n != "mean"}
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["out"], other["out"])
    residual = y - predictor.apply(z, first)
    assert float(residual.double().mean(0).abs().max()) < 1e-5 * float(y.std())
    assert float(residual.var()) < 0.2 * float(y.var())


MLPS = "aqua-2bit+key.predict=mlp+value.predict=mlp"
PAPERS = f"{MLPS}+all.predict.hidden=width+all.predict.tokens=all"


def test_the_papers_memory():
    """Table 9: 540 MiB on Llama 3.2 3B: 27 layers of 4 C² weights for keys and 6 C² for values, in 16 bits."""
    llama = MODELS["llama-3.2-3b"]
    weights = 27 * (4 + 6) * llama.width**2
    found = Sizes(read(PAPERS), llama).shared
    assert weights * 2 / (1 << 20) == 540 and found == pytest.approx(weights * 2, rel=0.02)
    before = 27 * (4 + 12) * llama.width**2
    assert Sizes(read(MLPS), llama).shared == pytest.approx(before * 2, rel=0.02)


@pytest.mark.slow
def test_a_calibration_fits_it_and_gives_the_same_bytes_again(tmp_path, capsys):
    """Chunk by chunk from the run folder, keys and values; a prediction that is worth something on this text."""
    model = tmp_path / "tiny-model"
    model.mkdir()
    tiny.save(model, "llama", layers=2)
    tiny.text(model)
    words = ["--model", str(model), "--corpus", str(model / "corpus.txt"), "--samples", "4", "--seq-len", "128"]
    words += ["--recipe", PAPERS, "--no-eval"]
    found = []
    for run in ("one", "two"):
        assert cli.main([*words, "--run", str(Path(tmp_path, run)), "--name", "mlp"]) == 0
        capsys.readouterr()
        found.append(registry.resolve("mlp").sha256)
    assert found[0] == found[1] and registry.resolve("mlp").version == "1.0.0"
    artifact = registry.load_artifact("mlp")
    geometry = artifact.fingerprint.geometry
    for name, (shape, dtype) in all_specs(artifact.recipe, geometry).items():
        assert (tuple(artifact.tensors[name].shape), artifact.tensors[name].dtype) == (shape, dtype)
    assert artifact.tensors["layers.1.value.predict.hidden"].shape == (2 * geometry.width, 2 * geometry.width)
    assert artifact.recipe == read(PAPERS)
