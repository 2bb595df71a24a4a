"""A full encode one layer at a time is that of the whole model, with one reading of its weights."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import fitted
import pytest
import tiny
import torch
from architectures import random

from kvq_calib.evaluate import perplexity, record
from kvq_calib.evaluate.caches import FullCache
from kvq_calib.evaluate.candidate import Candidate
from kvq_calib.evaluate.perplexity import layered
from kvq_calib.evaluate.record import Protocol
from kvq_calib.evaluate.saved_results import SavedResults
from kvq_calib.model import find as models
from kvq_calib.model.streamed import Stream
from kvq_calib.text.corpus import Batch
from kvq_runtime.cli import main as cli
from kvq_runtime.recipe import preset
from kvq_runtime.registry.evaluation_records import PROTOCOLS

LENGTH = 300  # two blocks of 128, and a rest
# rounded by channel, before RoPE, fitted to the prompt, two predicted, one with a policy of its own
NAMES = ("kivi-2bit", "exact-pre", "polar-online", "aqua-2bit", "squat-2bit", "h2o")


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> SimpleNamespace:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    tiny.save(folder, "llama")
    tokens = torch.randint(1, 256, (3, LENGTH), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    return SimpleNamespace(folder=folder, files=models.resolve(folder), batch=Batch(tokens, "x", DESCRIPTION))


DESCRIPTION = {"source": "random", "corpus_digest": "0" * 64}


def candidate(name: str, files) -> Candidate:
    recipe = preset(name)
    return Candidate(name, recipe, fitted.tensors(recipe, files.geometry) if recipe.fitted else {})


def figures(found: dict) -> dict:
    """One record's full encode."""
    return found["result"]["protocols"]["full"]


def near(one: dict, other: dict) -> None:
    assert one["tokens"] == other["tokens"] and one["top1"] == pytest.approx(other["top1"], abs=2 / one["tokens"])
    for name in ("perplexity", "reference_perplexity", "kl"):
        assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-7), name
    assert one["decoded"] is None or one["decoded"] == pytest.approx(other["decoded"], rel=1e-5)
    assert one["windows"]["loss"] == pytest.approx(other["windows"]["loss"], rel=1e-5)


def test_it_is_the_whole_models_full_encode(small):
    """Of recipes of every kind; what has no full encode says so, and in use is not measured."""
    candidates = [candidate(name, small.files) for name in NAMES]
    whole = record.evaluate(small.files, small.batch, candidates, Protocol(protocols=PROTOCOLS, by_layer=False))
    parts = record.evaluate(small.files, small.batch, candidates, Protocol(protocols=PROTOCOLS, by_layer=True))
    for name, one, other in zip(NAMES, parts, whole, strict=True):
        if name == "h2o":
            assert figures(one) == figures(other) and "reason" in figures(one)
        else:
            near(figures(one), figures(other))
        assert one["result"]["protocols"]["in-use"] == {"reason": perplexity.ONLY_FULL}
        assert {**one["result"], "protocols": 0} == {**other["result"], "protocols": 0}


KINDS = ["qwen3_moe", "smollm3", "granite", "phi3", "gemma3_text", "olmo3", "gpt_oss", "gemma2", "qwen3_5"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_of_other_architectures(kind: str, tmp_path: Path):
    """Experts, layers without RoPE, that slide or recur, multipliers, learned sinks, caps, text beside images."""
    random(kind).save_pretrained(tmp_path)
    files = models.resolve(tmp_path)
    tokens = torch.randint(
        1, files.vocabulary, (2, LENGTH), generator=torch.Generator().manual_seed(3), dtype=torch.int32
    )
    candidates = [candidate("kivi-2bit", files), candidate("higgs-2bit", files)]
    both = [
        record.evaluate(files, Batch(tokens, "x", DESCRIPTION), candidates, Protocol(protocols=("full",), by_layer=way))
        for way in (True, False)
    ]
    for one, other in zip(*both, strict=True):
        near(figures(one), figures(other))


def test_each_layer_is_read_once_and_what_is_kept_is_not_done_again(small, tmp_path, monkeypatch):
    stream, read, done = Stream(small.files, dtype=torch.float32), Counter(), []
    layer = Stream.layer
    monkeypatch.setattr(perplexity, "ROW_TOKENS", LENGTH)
    monkeypatch.setattr(Stream, "layer", lambda self, index: read.update([index]) or layer(self, index))

    def caches(*names: str):
        return {name: lambda name=name: FullCache(preset(name), stream.blank, length=LENGTH) for name in names}

    given, saved = (stream, small.batch.tokens_BT), SavedResults(tmp_path)
    first = layered(*given, caches("higgs-2bit", "kivi-2bit"), done.append, saved)
    assert read == dict.fromkeys(range(stream.layers), 1) and sum(done) == 3 * small.batch.tokens_BT.numel()
    assert len(done) > stream.layers, "it is told while layers are run"
    again = layered(*given, caches("higgs-2bit", "kivi-2bit"), done.append, saved)
    assert again == first and read.total() == stream.layers
    more = layered(*given, caches("higgs-2bit", "rtn-4bit"), done.append, saved)
    assert read.total() == 2 * stream.layers and more["higgs-2bit"] == first["higgs-2bit"]
    assert more[perplexity.REFERENCE] == first[perplexity.REFERENCE] and sum(done) == 9 * small.batch.tokens_BT.numel()


@pytest.mark.slow
def test_it_is_done_where_the_model_does_not_fit(small, tmp_path, monkeypatch, capsys):
    """Without being asked for; `kvq eval` says why there are no figures in use."""
    text = tmp_path / "text.txt"
    draw = torch.Generator().manual_seed(1)
    text.write_text("".join(f"{number:x} " for number in torch.randint(1 << 20, (9000,), generator=draw).tolist()))
    words = ["eval", "higgs-2bit", "--model", str(small.folder), "--corpus", str(text), "--length", "384"]
    words += ["--windows", "2", "--json", "--protocol", "both"]
    assert cli.main(words) == 0
    (whole,) = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(record, "free_on", lambda device: small.files.weight_bytes // 2)
    monkeypatch.setattr(record, "load_model", lambda *given: pytest.fail("the whole model was loaded"))
    assert cli.main(words) == 0
    (found,) = json.loads(capsys.readouterr().out)
    near(figures(found), figures(whole))
    assert found["result"]["protocols"]["in-use"] == {"reason": perplexity.ONLY_FULL}
    assert "relative" in whole["result"]["protocols"]["in-use"]
    assert cli.main([*words, "--protocol", "in-use"]) != 0
    assert "use --protocol full" in capsys.readouterr().err
