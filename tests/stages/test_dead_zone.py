"""Dead zones: the codec by hand, one step against steps of each channel's own, and what theory promises of codes."""

import hashlib
import math

import numpy as np
import pytest
import torch

from kvq_calib.fit import latent
from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import entropy, ladder
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.stages.latent import DeadZone
from kvq_runtime.stages.rotate import Basis

GEOMETRY = Geometry(1, 4, 32)
WIDTH = GEOMETRY.width


def latents(tokens: int, falling: float = 0.075, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, WIDTH, generator=generator) * torch.exp(-falling * torch.arange(WIDTH))


def rate(z_NR: torch.Tensor, own: dict) -> tuple[float, float]:
    """(bits per element, mean squared error) of a sample."""
    codes_NR = ladder.encode(z_NR[None], own["cell"], own["rung"])
    error = float((ladder.decode(codes_NR, own["cell"], own["rung"])[0] - z_NR).square().mean())
    return entropy.bits([codes_NR[0]], [own["rung"]]) / z_NR.numel(), error


def test_the_codec_by_hand():
    stage, basis = DeadZone(step=0.3, channels=20), torch.linalg.qr(latents(WIDTH, 0.0)).Q.bfloat16()[:, :20]
    tensors = {"rotate.basis": basis, "quantize.cell": torch.linspace(0.6, 0.3, 20),
               "quantize.rung": torch.arange(8, 28, dtype=torch.uint8)}  # fmt: skip
    scheme = Scheme(stage, rotate=Basis())
    codec, x = Codec(Recipe("r", scheme, scheme), 0, "key", GEOMETRY, tensors), latents(128, 0.0, 1)
    x[-1] *= 100  # beyond the largest code
    fields = codec.encode(x[None], Context())
    z = (x.numpy() @ basis.float().numpy()) / tensors["quantize.cell"].numpy()
    zone, shift = (table.numpy()[tensors["quantize.rung"].long().numpy()] for table in ladder.ladder()[:2])
    codes = np.sign(z) * np.clip(np.floor(np.abs(z) + 1 - zone), 0, 127)
    assert fields["codes"].dtype == torch.int8 and (fields["codes"][0].numpy() == codes).mean() > 0.999
    back = (codes + np.sign(codes) * shift) * tensors["quantize.cell"].numpy() @ basis.float().numpy().T
    assert codec.decode(fields, Context())[0, :-1].numpy() == pytest.approx(back[:-1], abs=0.01)
    assert int(fields["codes"][0, -1].abs().max()) == 127
    assert codec.fields(torch.bfloat16) == {"codes": ((128, 20), torch.int8)}


@pytest.mark.parametrize("target", [0.5, 1.0, 2.0])
def test_one_step_meets_the_target_with_the_error_that_theory_promises(target):
    """Of a Gaussian source: within a quarter of a bit of the rate that its error needs at least, and what tokens say of
    themselves."""
    z_NR = latents(2048)
    variances_C = torch.exp(-0.15 * torch.arange(WIDTH).double())
    stage = latent.schedule(DeadZone(target=target), variances_C)
    bits, error = rate(z_NR[:, : stage.channels], latent.rungs(z_NR[:, : stage.channels], stage.step))
    bits *= stage.channels / WIDTH
    lost = error * stage.channels / WIDTH + float(variances_C[stage.channels :].sum()) / WIDTH
    assert bits == pytest.approx(target, rel=0.12)
    low, high = 1e-9, 1.0
    for _ in range(60):  # reverse water-filling: the level at which so much is lost
        level = math.sqrt(low * high)
        low, high = (level, high) if float(variances_C.clamp_max(level).mean()) < lost else (low, level)
    least = float((variances_C / low).clamp_min(1).log2().mean()) / 2
    assert least < bits < least + 0.25 + 4 / WIDTH


def test_one_step_beats_steps_in_proportion_to_channels():
    """At equal bits: what channels get by their size alone, as quantizers of equal bits do."""
    z_NR = latents(2048)
    one = latent.rungs(z_NR, 0.2)
    bits, error = rate(z_NR, one)
    deviation_R = z_NR.square().mean(0).sqrt()
    low, high = 0.05, 16.0
    for _ in range(20):
        part = math.sqrt(low * high)
        cell_R = deviation_R * part
        own = {"cell": cell_R, "rung": ladder.of_deviation(deviation_R / cell_R)}
        low, high = (part, high) if rate(z_NR, own)[0] > bits else (low, part)
    assert rate(z_NR, own)[0] == pytest.approx(bits, rel=0.1) and rate(z_NR, own)[1] > 1.5 * error


def test_loud_channels_have_wider_cells_so_that_codes_are_bytes():
    z_NR = latents(1024, 0.1)
    own = latent.rungs(z_NR, 0.001)
    codes_NR = ladder.encode(z_NR[None], own["cell"], own["rung"])[0]
    assert int(codes_NR.abs().max()) < 127 and float(own["cell"][0]) > 0.05 and float(own["cell"][-1]) < 0.0011


def test_probabilities_are_of_what_codes_are():
    """The ladder's counts against many draws of its own density."""
    table = ladder.ladder()
    assert (table.counts.sum(1) == 2**ladder.BITS).all() and int(table.counts.min()) >= 1
    random, shape = np.random.default_rng(0), ladder.SHAPE
    for rung in (9, 15, 21):
        deviation = 2.0 ** ((ladder.LOWEST + rung) / ladder.PER)
        scale = deviation * math.sqrt(math.gamma(1 / shape) / math.gamma(3 / shape))
        x = scale * random.gamma(1 / shape, size=400_000) ** (1 / shape) * random.choice([-1, 1], 400_000)
        codes = ladder.encode(torch.from_numpy(x).float()[None, :, None], torch.ones(1), torch.tensor([rung]))
        share = np.bincount(codes.numpy().flatten().astype(int) + 127, minlength=255) / 400_000
        assert share == pytest.approx(table.counts[rung].numpy() / 2**ladder.BITS, abs=0.004)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"target": -1.0}, "use 0 to 6"), ({"target": 6.1}, "use 0 to 6"), ({"step": math.inf}, "at least 0"),
     ({"channels": -1}, "at least 0"), ({"shared": True}, "no target to share")],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DeadZone(**settings)


def test_all_channels_are_stored_but_no_more():
    assert DeadZone(step=0.1, channels=WIDTH).stored(WIDTH) == DeadZone(step=0.1).stored(WIDTH) == WIDTH
    with pytest.raises(ValueError, match=f"a token has {WIDTH}"):
        DeadZone(step=0.1, channels=WIDTH + 1).stored(WIDTH)


def test_rungs_beyond_the_ladder_are_its_last():
    """A file that someone else made may have them."""
    last, beyond, cell = torch.tensor([ladder.RUNGS - 1]), torch.tensor([255], dtype=torch.uint8), torch.ones(1)
    z_NTR = latents(64)[None, :, :1]
    codes_NTR = ladder.encode(z_NTR, cell, beyond)
    assert torch.equal(codes_NTR, ladder.encode(z_NTR, cell, last))
    assert torch.equal(ladder.decode(codes_NTR, cell, beyond), ladder.decode(codes_NTR, cell, last))


def test_every_machine_has_the_same_probabilities():
    """Files of another machine are decoded by these: they were computed on AVX2, in float64, and rounded."""
    counts = ladder.ladder().counts.numpy().astype("<i4").tobytes()
    assert hashlib.sha256(counts).hexdigest()[:16] == "94bcbe806db6a1e8"
