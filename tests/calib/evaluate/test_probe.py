"""Probes: planted relations are found, and a real model's numbers agree with scikit-learn's."""

import argparse
import json

import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score

from kvq_calib.cli import commands
from kvq_calib.evaluate import probe
from kvq_calib.evaluate.record import load_model
from kvq_calib.fit.statistics import Centred, CrossMoments
from kvq_calib.model import find as models


def centred(x, y) -> Centred:
    total = CrossMoments(torch.zeros(x.shape[1]), torch.zeros(y.shape[1]))
    total.update(x[None], y[None])
    return total.value()


def test_a_planted_relation_is_found():
    random = torch.Generator().manual_seed(0)
    x, noise = torch.randn(8000, 12, generator=random), torch.randn(8000, 5, generator=random)
    weight = torch.randn(12, 5, generator=random)
    y = 3 + x @ weight + 0.5 * noise  # a mean far from 0 must not count
    expected = 1 - 0.25 * 5 / float((y - y.mean(0)).square().mean(0).sum())
    fit, held = centred(x[:6000], y[:6000]), centred(x[6000:], y[6000:])
    assert probe.explained(fit, held, 1e-6) == pytest.approx(expected, abs=0.01)
    unrelated = probe.explained(centred(x[:6000], noise[:6000]), centred(x[6000:], noise[6000:]), 1e-6)
    assert -0.02 < unrelated < 0.005
    moved = centred(x[6000:], y[6000:] + 100)
    assert probe.explained(fit, moved, 1e-6) < -100  # held-out text with another mean is not explained


@pytest.fixture(scope="module")
def found():
    torch.set_num_threads(1)
    files = models.resolve("demo")
    return files, probe.probe(files, probe.Settings("demo", samples=12, held_out=4, length=256), dtype=torch.float32)


def test_it_agrees_with_scikit_learn(found):
    files, result = found
    model, taken = load_model(files), {}
    for layer, name in ((2, "k_proj"), (2, "v_proj"), (3, "k_proj"), (3, "v_proj")):
        module = getattr(model.model.layers[layer].self_attn, name)
        module.register_forward_hook(lambda m, i, out, key=(layer, name[0]): taken.__setitem__(key, out.double()))
    schemes = []
    for split, count in (("fit", 12), ("held-out", 4)):
        with torch.inference_mode():
            model(probe.corpus.select("demo", files.path, count, 256, 0, split).tokens_BT.long())
        schemes.append(dict(taken))
    cases = {
        ("key", "L-1"): lambda t: (t[2, "k"][:, 4:], t[3, "k"][:, 4:]),
        ("value", "role + L-1"): lambda t: (torch.cat([t[3, "k"], t[2, "v"]], -1)[:, 4:], t[3, "v"][:, 4:]),
        ("key", "T-2"): lambda t: (t[3, "k"][:, 2:-2], t[3, "k"][:, 4:]),
    }
    for (target, source), of in cases.items():
        (x, y), (x_held, y_held) = ((part.flatten(0, 1).numpy() for part in of(scheme)) for scheme in schemes)
        fitted = Ridge(1e-3 * len(x) * x.var(0).mean(), solver="cholesky").fit(x, y)
        expected = r2_score(y_held, fitted.predict(x_held), multioutput="variance_weighted")
        row = next(r for r in result["rows"] if (r["layer"], r["target"], r["source"]) == (3, target, source))
        assert row["explained"] == pytest.approx(expected, abs=2e-4), (target, source)


def test_tables(found):
    result = found[1]
    rows = probe.by_layer(result)
    assert [(row["target"], row["layer"]) for row in rows] == [(h, n) for h in ("key", "value") for n in range(6)]
    means = {row["source"]: row for row in probe.means(result)}
    assert means["L-1"]["keys"] == pytest.approx(sum(row["L-1"] for row in rows[1:6]) / 5)
    assert means["L-3"]["values"] == pytest.approx(sum(row["L-3"] for row in rows[9:]) / 3)
    assert rows[0]["L-1"] is None and rows[2]["L-3"] is None  # nothing lies below the first layer
    assert means["L-1"]["keys"] > 0.5 > means["T-1"]["keys"]  # the paper's finding


def test_the_command(tmp_path, capsys):
    top = argparse.ArgumentParser()
    commands.add_probe(top.add_subparsers())
    words = "probe --model demo --samples 2 --held-out 1 --length 64 --device cpu --json --plot"
    args = top.parse_args([*words.split(), str(tmp_path / "probe.png")])
    assert args.run(args) == 0
    assert {row["target"] for row in json.loads(capsys.readouterr().out)["rows"]} == {"key", "value"}
    assert (tmp_path / "probe.png").read_bytes().startswith(b"\x89PNG")


def test_sequences_that_are_too_short():
    with pytest.raises(ValueError, match=r"length 4; demo takes sequences of 5 to"):
        probe.settings(models.resolve("demo"), None, None, None, 4, 0)
