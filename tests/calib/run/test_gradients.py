"""Gradients layer by layer against autograd through the whole model; what they promise; runs that are given by them."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from kvq_calib.model import find as models
from kvq_calib.model.streamed import Layer, Stream
from kvq_calib.run import bit_allocation, checkpoint, gradients
from kvq_calib.run import calibrate as runs
from kvq_calib.run import plan as plans
from kvq_calib.run.run import Run
from kvq_runtime.artifact import artifact
from kvq_runtime.codec.block_input import block_input
from kvq_runtime.codec.codec import Codec
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.recipe import ROLES, Recipe, preset
from kvq_runtime.store.memory import asymptotic_bits

RECIPE = "aqua-fisher-1bit"
SINKS = preset(RECIPE).window.sinks


def a_run(model: Path, folder: Path, *recipes: Recipe, chunk: int = 2) -> Run:
    files = models.resolve(str(model))
    made = plans.make(files, recipes, str(model / "corpus.txt"), samples=6, seq_len=256, held_out=2)
    return Run(replace(made, chunk=chunk), files, folder)


def whole_model(
    model: Path, tokens_BT: torch.Tensor, chunk: int, seed: int, sinks: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """Moments and squared lengths by the same draws, one sequence at a time, by transformers' own forward pass and one
    backward pass."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    seen: dict[str, torch.Tensor] = {}
    for layer, module in enumerate(loaded.model.layers):
        attention = module.self_attn
        taps = (getattr(attention, "k_norm", attention.k_proj), attention.v_proj)
        for role, tap in zip(ROLES, taps, strict=True):
            tap.register_forward_hook(lambda _m, _i, out, name=f"{layer}.{role}": seen.__setitem__(name, out))
    sums: dict[str, torch.Tensor] = {}
    lengths: dict[str, list[torch.Tensor]] = {}
    for index, rows_BT in enumerate(tokens_BT.split(chunk)):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        for row_T in rows_BT:
            uniform_T2 = torch.rand(len(row_T), 2, generator=generator)
            log_TV = loaded(row_T[None]).logits[0].log_softmax(-1)
            passed_TV2 = log_TV.detach().double().exp().cumsum(-1)[..., None] < uniform_T2[:, None]
            drawn_T2 = passed_TV2.sum(1).clamp(max=log_TV.shape[-1] - 1)
            names = list(seen)
            first_T, second_T = log_TV.gather(1, drawn_T2).unbind(1)
            loss = (first_T - second_T).sum() / 2**0.5
            for name, gradient in zip(names, torch.autograd.grad(loss, [seen[name] for name in names]), strict=True):
                by_head_TH = gradient.flatten(2)[0].unflatten(-1, (2, 16)).square().sum(-1)
                lengths.setdefault(f"layers.{name}.energy", []).append(by_head_TH)
                for count in sinks:
                    g_THD = gradient.flatten(2)[0, count:].unflatten(-1, (2, 16)).double()
                    moment = torch.einsum("thd,the->hde", g_THD, g_THD) / (tokens_BT.numel() - count * len(tokens_BT))
                    key = f"layers.{name}.{count}"
                    sums[key] = sums.get(key, 0) + moment
    return sums | {name: torch.stack(rows) for name, rows in lengths.items()}


@pytest.mark.parametrize("architecture", ["qwen3", pytest.param("llama", marks=pytest.mark.slow)])
def test_moments_are_those_of_one_backward_pass(tmp_path, architecture):
    model = tmp_path / "model"
    model.mkdir()
    tiny.save(model, architecture)
    tiny.text(model)
    recipe = preset(RECIPE)
    other = replace(recipe, name="other", window=replace(recipe.window, sinks=0))
    run = a_run(model, tmp_path / "run", recipe, other)
    run = replace(run, plan=replace(run.plan, seed=5))
    tokens_BT = torch.randint(0, 256, (6, 256), generator=torch.Generator().manual_seed(1))
    assert gradients.chunks(run.plan) == [range(0, 2), range(2, 4)]  # all to fit on: fewer tokens than are asked for
    (folder := tmp_path / "work").mkdir()
    found = gradients.collect(run, Stream(run.files, dtype=torch.float32), tokens_BT, folder, {})
    expected = whole_model(model, tokens_BT[:4], 2, run.plan.seed, sinks=(0, SINKS))
    assert found.keys() == expected.keys() and gradients.moment_name(1, "key", SINKS) in expected
    for name, sums in expected.items():
        torch.testing.assert_close(found[name], sums, rtol=2e-3, atol=1e-6 * float(sums.abs().max()))
    assert not list(folder.iterdir()), "hidden states are deleted on the way down"


@pytest.mark.parametrize("segment", [-1, 4])
def test_gradients_turn_as_keys_do(segment):
    """The gradient at keys as they are encoded, by autograd, is that at keys before RoPE, turned."""
    tables = Rotary(10000.0 ** (-torch.arange(4) / 4), 1.25, torch.float32).tables(torch.arange(9, 21)[None])
    k_NTC = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    x_NTC, _ = block_input(k_NTC, None, tables, "apply", 2, max(segment, 0))
    x_NTC.retain_grad()
    (x_NTC * torch.randn_like(x_NTC)).sum().backward()
    torch.testing.assert_close(gradients._turned(k_NTC.grad, segment, tables, 2), x_NTC.grad)


def test_errors_cost_half_their_square_in_nats(tmp_path):
    """Noise on the values of one layer, small and white: the divergence that follows against ½ trace(M) σ²."""
    model = tmp_path / "model"
    model.mkdir()
    tiny.save(model, "llama")
    tiny.text(model)
    run = a_run(model, tmp_path / "run", preset(RECIPE), chunk=4)
    tokens_BT = torch.randint(0, 256, (6, 256), generator=torch.Generator().manual_seed(1))
    (folder := tmp_path / "work").mkdir()
    found = gradients.collect(run, Stream(run.files, dtype=torch.float32), tokens_BT, folder, {})
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    layer, sigma, generator = 1, 0.02, torch.Generator().manual_seed(5)
    with torch.no_grad():
        exact = loaded(tokens_BT[:4]).logits.double().log_softmax(-1)

        def noisy(_module, _inputs, out):
            noise = sigma * torch.randn(out.shape, generator=generator)
            noise[:, :SINKS] = 0
            return out + noise

        loaded.model.layers[layer].self_attn.v_proj.register_forward_hook(noisy)
        kls = []
        for _ in range(8):
            moved = loaded(tokens_BT[:4]).logits.double().log_softmax(-1)
            kls.append(float((exact.exp() * (exact - moved)).sum(-1).mean()))
    trace = float(found[gradients.moment_name(layer, "value", SINKS)].diagonal(dim1=-2, dim2=-1).sum())
    # a token's share of the window's divergence, over the tokens of a window that have noise
    assert sum(kls) / len(kls) == pytest.approx(0.5 * trace * sigma**2 * (256 - SINKS) / 256, rel=0.25)


def test_gradients_are_of_as_much_as_is_asked_for_and_the_plan_says_so(model, tmp_path):
    plan = replace(a_run(model, tmp_path / "run", preset(RECIPE)).plan, chunk=2)
    asked = replace(plan, gradient_tokens=700)  # two sequences and three quarters of one
    assert gradients.chunks(asked) == [range(0, 2), range(2, 3)]
    assert bit_allocation.draft_plan(asked).beginning().samples == 3
    assert asked.digest != plan.digest
    with pytest.raises(ValueError, match="gradient_tokens=0; use at least 1"):
        replace(plan, gradient_tokens=0)


@pytest.mark.slow
def test_a_run_shares_its_bits_by_gradients_and_resumes(model, tmp_path, monkeypatch):
    recipe, forward, ran = preset(RECIPE), Layer.forward, []
    monkeypatch.setattr(Layer, "forward", lambda self, *given: ran.append(len(given[0])) or forward(self, *given))
    decode, searched = Codec.encode_decode, []
    monkeypatch.setattr(
        Codec, "encode_decode", lambda codec, *given: searched.append(len(given[0])) or decode(codec, *given)
    )
    made = runs.calibrate(a_run(model, tmp_path / "one", recipe))[RECIPE]
    assert searched == [4] * 6  # paths, of what is held out alone: two blocks of either sequence
    assert ran == [2] * (6 + 6 + 9)  # sequences of the chunks of gradients, draft and fit, in 3 layers each
    assert {"forward", "gradients", "capture", RECIPE} == runs.seconds(a_run(model, tmp_path / "one", recipe)).keys()
    geometry = made.fingerprint.geometry
    assert asymptotic_bits(made.recipe, geometry) == pytest.approx(1.0)
    stages = [made.recipe.scheme(layer, role).quantize for layer in range(3) for role in ROLES]
    assert len({stage.target for stage in stages}) > 1 and {stage.codebook for stage in stages} == {"trellis"}
    folders = [tmp_path / "one", tmp_path / "one" / bit_allocation.DRAFT]
    assert len({(checkpoint.folder_of(folder, -1) / gradients.FILE).read_bytes() for folder in folders}) == 1
    stopped = a_run(model, tmp_path / "two", recipe)
    runs.start(stopped)  # and killed there
    again = runs.calibrate(a_run(model, tmp_path / "two", recipe))[RECIPE]
    assert artifact.to_bytes(again) == artifact.to_bytes(made)
