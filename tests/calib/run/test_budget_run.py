"""A run with budgets: measured right, chosen for the better, and the same bytes however it is done."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch

from kvq_calib.cli import calibrate as cli
from kvq_calib.fit.scheme import SchemeFit
from kvq_calib.job.job import Job
from kvq_calib.job.prepare import prepare
from kvq_calib.model import find as models
from kvq_calib.model.streamed import Stream
from kvq_calib.run import budget, checkpoint
from kvq_calib.run import calibrate as runs
from kvq_calib.run import plan as plans
from kvq_calib.run.run import Run
from kvq_calib.text import corpus
from kvq_runtime.artifact import artifact
from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.ops import rope
from kvq_runtime.recipe import ROLES, Recipe
from kvq_runtime.registry import resolve as registry
from kvq_runtime.store.memory import asymptotic_bits
from kvq_runtime.vllm import plugin

pytestmark = pytest.mark.xdist_group("budget")  # one worker calibrates for all
NAME = "auto-3bit-vllm"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny-model"
    folder.mkdir()
    tiny.save(folder, layers=3)
    text = tiny.text(folder).read_text(encoding="utf-8")
    (folder / "other.txt").write_text(text[::-1], encoding="utf-8")
    return folder


def asked(model: Path, folder: Path, bits=(3.0,), **settings) -> Job:
    given = {
        "recipes": ("auto",),
        "engine": "vllm",
        "samples": 6,
        "seq_len": 256,
        "held_out": 2,
        "publish": False,
        "also": ("none",),
        "transfer": str(model / "other.txt"),
    } | settings
    return Job.from_settings(model=str(model), bits=bits, corpus=str(model / "corpus.txt"), run=str(folder), **given)


def a_run(job: Job, **settings) -> Run:
    return replace(prepare(job), **settings)


@pytest.fixture(scope="module")
def heard():
    """What the undisturbed run says of its progress."""
    return []


@pytest.fixture(scope="module")
def undisturbed(model, heard, tmp_path_factory):
    """A run and its artifacts' bytes."""
    work = a_run(asked(model, tmp_path_factory.mktemp("run"), bits=(3.0, 4.0)), listener=heard.append)
    return work, {name: artifact.to_bytes(found) for name, found in runs.calibrate(work).items()}


@pytest.fixture(scope="module")
def first_layer(model, tmp_path_factory):
    """The first layer of round 0: its run, its record, the sums of its queries, and what its settings are fitted to,
    each beside the recipe's own fit."""
    work, found = (
        a_run(asked(model, tmp_path_factory.mktemp("layer"))),
        SimpleNamespace(given={role: [] for role in ROLES}),
    )
    capture, rounded = runs._capture, SchemeFit.with_rounding

    def capturing(*given):
        found.queries = (collected := capture(*given)).queries
        return collected

    def rounding(self, scheme, shared, more):
        found.given[self.codec.role].append((self, shared))
        return rounded(self, scheme, shared, more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "_capture", capturing)
        patch.setattr(SchemeFit, "with_rounding", rounding)
        runs.fit_layer(work, runs.start(work), 0)
    found.work, found.record = work, checkpoint.record(work.folder, 0)
    return found


def texts_of(work: Run) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is fitted on, what is held out of it, and the text of another kind."""
    plan = work.plan
    own = corpus.select(plan.corpus, work.files.path, plan.samples, plan.seq_len, plan.seed).tokens_BT
    other = corpus.select(plan.transfer or "", work.files.path, plan.held_out, plan.seq_len, plan.seed).tokens_BT
    return *own.split([plan.samples - plan.held_out, plan.held_out]), other


@pytest.mark.slow
def test_choosing_lowers_the_error_at_no_more_bits(undisturbed):
    work, made = undisturbed
    assert sorted(made) == ["auto-3bit-vllm", "auto-4bit-vllm"]
    for name, bits in work.plan.budgets.items():
        found = artifact.from_bytes(made[name])
        noted = found.fit["budget"]
        assert asymptotic_bits(found.recipe, found.fingerprint.geometry) <= bits == noted["bits"]
        assert noted["round"] > 0 and noted["rounds"][noted["round"]] == min(noted["rounds"]) < noted["rounds"][0]
        own = sum(layer[role]["attention_error"] for layer in found.fit["layers"] for role in ROLES)
        assert own == pytest.approx(min(noted["rounds"]))
        assert noted["transfer"]["source"] == "other.txt" and noted["transfer"]["split"] == "fit"
        unpredicted = found.recipe.scheme(0, "value").bits(128, found.fingerprint.geometry)
        assert unpredicted >= max(found.recipe.scheme(n, "value").bits(128, found.fingerprint.geometry) for n in (1, 2))


@pytest.mark.slow
def test_a_budget_alone_has_the_bytes_it_has_among_others(model, undisturbed, tmp_path):
    alone = runs.calibrate(a_run(asked(model, tmp_path)))
    assert artifact.to_bytes(alone[NAME]) == undisturbed[1][NAME]


@pytest.mark.parametrize("role", ["value"])
def test_what_is_measured_is_the_share_of_the_stream_that_is_error(first_layer, role):
    """The errors of the settings of round 0 in the first layer, in the mean of two texts, with a plain softmax."""
    noted, texts = first_layer.record["attention"][NAME][role][0], texts_of(first_layer.work)[1:]
    apart = [error_in_layer_0(first_layer.work, role, tokens_BT) for tokens_BT in texts]
    assert noted == pytest.approx(sum(apart) / 2, rel=1e-3) and noted > 1e-6
    assert abs(apart[0] - apart[1]) > 4e-3 * noted, "the error of one text alone is outside of that tolerance"
    assert first_layer.record["fit"][NAME][role]["attention_error"] == noted


@pytest.mark.parametrize("role", ROLES)
def test_the_setting_that_was_fitted_errs_the_same_among_the_others(first_layer, role):
    """Settings are fitted to the text that the recipe is fitted to, and stand in their order: more bits, less error."""
    plan = first_layer.work.plan
    schemes, (noted, *errors) = budget.served_options(plan.geometry), first_layer.record["attention"][NAME][role]
    assert errors[schemes.index(plan.recipes[0].scheme(0, role))] == pytest.approx(noted, rel=1e-3)
    rounded = [error for scheme, error in zip(schemes, errors, strict=True) if scheme.quantize.kind == "lloyd"]
    assert len(rounded) > 3 and rounded == sorted(rounded, reverse=True)


@pytest.mark.parametrize("role", ["value"])
def test_the_errors_of_a_fit_are_those_of_the_held_out_text(first_layer, role):
    """The text of another kind is for settings alone."""
    fitted, own, other = texts_of(first_layer.work)
    sums = []
    stream = Stream(first_layer.work.files, "cpu", torch.float32)
    captured = stream.layer(0).forward(stream.embed(fitted))
    mean_C = (captured.k_NTC if role == "key" else captured.v_NTC)[:, 4:].double().mean((0, 1))
    for tokens_BT in (own, other):
        _, _, heads, back = decoded_in_layer_0(first_layer.work, role, tokens_BT)
        x, found = heads[role][:, 4:].double(), back[:, 4:].double()
        sums.append(torch.stack([(x - found).square().sum(), (x - mean_C).square().sum()]))
    alone, both = (float(error / variance) for error, variance in (sums[0], sums[0] + sums[1]))
    assert first_layer.record["fit"][NAME][role]["relative_error"] == pytest.approx(alone, rel=1e-3)
    assert abs(both - alone) > 3e-3 * alone, "the error of both texts is within that tolerance"


@pytest.mark.parametrize("totals", [[0.5, 0.7, 0.9], [0.9, 0.5, 0.7], [0.9, 0.7, 0.5]])
def test_the_round_with_the_least_error_is_the_artifact(model, tmp_path, totals):
    """Whichever it is: rounds of which none kept what its choice promised."""
    work = a_run(asked(model, tmp_path))
    for number, total in enumerate(totals):
        folder = tmp_path / f"round-{number}" if number else tmp_path
        for layer in range(3):
            own = {role: [total / 6, *(1e-3**n for n, _ in enumerate(budget.served_options(work.plan.geometry), 1))]
                   for role in ROLES}  # fmt: skip
            checkpoint.folder_of(folder, layer).mkdir(parents=True)
            (checkpoint.folder_of(folder, layer) / "done.json").write_text(json.dumps({"attention": {NAME: own}}))
    part, noted = budget.settled(work, NAME)
    best = totals.index(min(totals))
    assert part.round == noted["budget"]["round"] == best and part.folder.name == (
        f"round-{best}" if best else tmp_path.name
    )
    assert noted["budget"]["rounds"] == pytest.approx(totals)


def decoded_in_layer_0(work: Run, role, tokens_BT):
    """(stream, hidden states, its heads side by side, and those of a role as decoded) by what round 0 fitted."""
    plan, name = work.plan, NAME
    fitted = checkpoint.load(checkpoint.folder_of(work.folder, 0) / "fit.safetensors")
    tensors = {n.removeprefix(f"{name}/"): tensor for n, tensor in fitted.items() if n.startswith(f"{name}/")}
    recipe = Recipe.from_json((checkpoint.record(work.folder, 0) or {})["recipes"][name])
    stream = Stream(work.files, "cpu", torch.float32)
    hidden = stream.embed(tokens_BT)
    captured = stream.layer(0).forward(hidden, queries=True)
    heads = {"q": captured.q_NTC, "key": captured.k_NTC, "value": captured.v_NTC}
    prefix = f"layers.0.{role}."
    own = {n.removeprefix(prefix): tensor for n, tensor in tensors.items() if n.startswith(prefix)}
    made_codec = Codec(recipe, 0, role, plan.geometry, own)
    x = heads[role].clone()
    x[:, :4] = x[:, 4:5]  # in the place of sinks, which are kept exact
    blocks = x.reshape(-1, 128, x.shape[-1])
    back = made_codec.restore(made_codec.decode(made_codec.encode(blocks, Context()), Context()).float(), Context())
    return stream, hidden, heads, torch.cat([heads[role][:, :4], back.reshape(x.shape)[:, 4:]], 1)


def error_in_layer_0(work: Run, role, tokens_BT) -> float:
    """The share of the stream that is error under what round 0 fitted, all in float64."""
    stream, hidden, heads, back = decoded_in_layer_0(work, role, tokens_BT)
    exact = {name: x.unflatten(-1, (-1, 16)).transpose(1, 2) for name, x in heads.items()}
    decoded = exact | {role: back.unflatten(-1, (-1, 16)).transpose(1, 2)}
    outs = [attended(given, stream.rope(work.plan.seq_len)) for given in (decoded, exact)]
    weight = work.files.tensor("model.layers.0.self_attn.o_proj.weight").double()
    error = ((outs[0] - outs[1]) @ weight.mT).square().sum(-1)
    energy = (hidden.double() + outs[1] @ weight.mT).square().sum(-1)
    return float((error / energy).mean())


def attended(given: dict[str, torch.Tensor], tables) -> torch.Tensor:
    """Causal attention of two query heads to a KV head, with RoPE, all heads side by side."""
    q, k = (rope.rotate(given[name].transpose(1, 2), *tables).transpose(1, 2).double() for name in ("q", "key"))
    k, v = (x.double().repeat_interleave(2, 1) for x in (k, given["value"]))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Killed(BaseException):
    """Stands for a process that ends at this point."""


@pytest.mark.slow
def test_interrupted_in_every_round_it_resumes_to_the_same_bytes(model, undisturbed, heard, tmp_path):
    stop = next(i for i, said in enumerate(heard) if said.round == 1 and said.layer == 1)
    middle = next(i for i, said in enumerate(heard) if said.stage.endswith("settings") and said.layer == 1)
    for number, limit in enumerate([stop, middle + 3]):
        seen = 0

        def stop_later(progress):
            nonlocal seen
            seen += 1
            if seen > limit:  # noqa: B023
                raise Killed

        job = asked(model, tmp_path / str(number), bits=(3.0, 4.0))
        with pytest.raises(Killed):
            runs.calibrate(a_run(job, listener=stop_later))
        again = {name: artifact.to_bytes(found) for name, found in runs.calibrate(a_run(job)).items()}
        assert again == undisturbed[1]


@pytest.mark.slow
def test_a_budget_is_published_beside_another_recipe_with_what_was_chosen(model, capsys):
    given = ["--model", str(model), "--corpus", str(model / "corpus.txt"), "--samples", "4", "--seq-len", "128"]
    given += ["--recipe", "auto", "--bits", "3", "--for", "vllm", "--recipe", "kivi-2bit", "--json", "--also", "none"]
    given += ["--transfer", str(model / "other.txt")]
    assert cli.main([*given, "--dry-run"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["settings_per_layer"] == 10 and planned["budgets"] == {NAME: 3}
    assert planned["transfer"] == str(model / "other.txt")
    assert cli.main(given) == 0
    other, row = json.loads(capsys.readouterr().out)
    assert (other["recipe"], row["artifact"]) == ("aqua-2bit", "tiny-model-auto-1.5bit@1.0.0")
    assert "layers" not in other and [layer["layer"] for layer in row["layers"]] == [0, 1, 2]
    mean = sum(layer["keys"] + layer["values"] for layer in row["layers"]) / 6
    assert mean == pytest.approx(row["bits_per_element"], abs=1e-3) and row["bits_per_element"] <= 1.5
    held = registry.resolve(row["artifact"])
    assert held.sha256 == row["sha256"]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--recipe", "auto", "--bits", "9"], "--bits 9; this model can have"),
        (["--recipe", "auto", "--bits", "0.01"], "can have"),
        (["--recipe", "auto", "--for", "vllm", "--bits", "3", "--transfer", "CORPUS"], "is the corpus itself"),
        (["--transfer", "demo"], "with --bits; give these, or leave it out"),
        (["--recipe", "auto", "--bits", "nan"], "can have"),
        (["--recipe", "auto"], "--bits 2.1"),
        (["--bits", "2"], "--recipe auto"),
        (["--recipe", "auto", "--bits", "2", "--bits", "2"], "each once"),
        (["--recipe", "auto", "--bits", "2", "--bits", "3", "--name", "mine"], "--name"),
    ],
)
def test_what_cannot_be_is_refused(model, capsys, arguments, says):
    given = ["--model", str(model), "--corpus", str(model / "corpus.txt"), "--samples", "4", "--seq-len", "128"]
    assert cli.main([*given, *(str(model / "corpus.txt") if one == "CORPUS" else one for one in arguments)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_the_flow_makes_the_same_bytes_as_the_process(model, undisturbed, monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    from kvq_calib.flow import flow

    there, _ = flow.run(asked(model, tmp_path / "there"))
    assert [made.sha256 for made in there] == [hashlib.sha256(undisturbed[1][NAME]).hexdigest()]
    assert there[0].layers


@pytest.mark.slow
def test_for_an_engine_errors_are_those_of_keys_after_rope(model, tmp_path):
    """What is chosen is what vLLM serves, and its measured error is attention's with keys decoded after RoPE."""
    work = a_run(asked(model, tmp_path, bits=(3.0,)))
    (made,) = runs.calibrate(work).values()
    assert plugin.refusal(made.recipe) is None and made.recipe.position == "post"
    assert asymptotic_bits(made.recipe, work.plan.geometry) <= 3.0
    notes = [checkpoint.record(work.folder, layer)["attention"]["auto-3bit-vllm"] for layer in range(3)]
    asked_for = work.plan.recipes[0]
    settings = budget.served_options(work.plan.geometry)
    costs = [scheme.bits(128, work.plan.geometry) for scheme in settings]
    for note in notes:
        for role in ROLES:
            own, *errors = note[role]
            place = settings.index(asked_for.scheme(0, role))
            assert min(errors) > 0 and own == pytest.approx(errors[place], rel=1e-4)
            assert errors[costs.index(max(costs))] < 0.2 * errors[costs.index(min(costs))] < 1


def test_what_an_engine_cannot_serve_is_refused_before_a_run(model, tmp_path):
    with pytest.raises(ValueError, match="vLLM cannot serve aqua-2bit"):
        prepare(asked(model, tmp_path, bits=(), recipes=("aqua-2bit",), transfer=None))
    with pytest.raises(ValueError, match="--for llama.cpp; use vllm"):
        prepare(asked(model, tmp_path, engine="llama.cpp"))


def test_a_plan_without_budgets_is_the_plan_it_was(model):
    files = models.resolve(str(model))
    recipe = budget.served(3, files.geometry)
    made = plans.make(files, (recipe,), str(model / "corpus.txt"), samples=4, seq_len=128)
    assert not {"budgets", "transfer", "transfer_samples", "draft"} & made.to_json().keys()
    assert not made.budgets
    assert made.own_chunks == len(made.chunks)
