"""Bits in whole slabs of channels, gains of parts of a token, points that a kernel computes."""

from dataclasses import replace

import pytest
import torch
from scheme_fit import GEOMETRY, fitted, low_rank

from kvq_calib.fit.latent import schedule
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import latent
from kvq_runtime.recipe import Recipe, Scheme, preset
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import GradientBasis

METRIC = torch.eye(32).expand(2, 32, 32).double()


def scheme(**settings) -> Scheme:
    group = settings.pop("group", "all")
    return Scheme(Mixed(**{"codebook": "stepped", "slab": 8} | settings), predict=Mean(), rotate=GradientBasis(group))


@pytest.mark.parametrize("bits", [5, 6, 7, 8])
def test_even_steps_leave_a_gaussian_what_they_say(bits):
    """And more than Lloyd–Max points, which are not even; a wider or narrower step leaves more."""
    z = torch.randn(1, 1, 400_000, generator=torch.Generator().manual_seed(bits))
    error = latent.step(bits)[1]

    def measured(factor: float) -> float:
        return float(latent.errors_stepped(z, torch.tensor([factor]), bits).double().mean())

    assert measured(1.0) == pytest.approx(error, rel=0.05)
    assert latent.distortion(bits) < error < 2.2 * latent.distortion(bits)
    assert error < measured(1.1) and error < measured(0.9)
    codes = torch.arange(2**bits, dtype=torch.uint8)[None, None]
    points = latent.decode_steps(codes, torch.ones(1), bits)
    assert torch.equal(latent.encode_steps(points, torch.ones(1), bits), codes)
    torch.testing.assert_close(points.flatten(), latent.points(bits, True, torch.device("cpu")))


@pytest.mark.parametrize(("group", "gains", "unit"), [("all", 3, 8), ("head", "head", 16)])
def test_runs_are_whole_slabs_of_every_head(group, gains, unit):
    """And bits, gains included, are within the target, by less than a slab."""
    found = fitted(scheme(target=2.2, gain=2, gains=gains, group=group), low_rank(), "value", METRIC)
    stage, width = found.scheme.quantize, GEOMETRY.width
    assert all(count % unit == 0 for count in stage.counts) and sum(stage.counts) == width
    assert 2.2 - unit / width < found.codec.bits() <= 2.2
    assert tuple(found.codec.tensors["rotate.basis"].shape) == (
        (width, stage.stored(width)) if group == "all" else (2, 32, stage.stored(width) // 2)
    )


def test_a_basis_by_head_keeps_heads_apart():
    """An error in one head's latents moves no other head; basis and dual undo each other."""
    codec = fitted(
        scheme(bits=(4,), counts=(64,), gain=2, gains="head", group="head"), low_rank(), "value", METRIC
    ).codec
    basis, dual = GradientBasis("head").pair(64, GEOMETRY, {n: codec.tensors[f"rotate.{n}"] for n in ("basis", "dual")})
    torch.testing.assert_close(basis.float() @ dual.float(), torch.eye(64), atol=0.02, rtol=0)
    for head in (0, 1):
        assert not basis[32 * head : 32 * head + 32, 1 - head :: 2].any()


@pytest.mark.parametrize("gains", [3, "head"])
def test_every_gain_is_the_best_for_its_channels(gains):
    """Against each gain alone: the channels of a gain lose no more with any other of its levels."""
    stage = Mixed((3, 2), (16, 8), codebook="stepped", gain=2, gains=gains, slab=8)
    geometry, count = Geometry(1, 3, 8), 3
    shape = (3, 8) if gains == "head" else (24,)
    tensors = {"deviation": torch.rand(shape) + 0.5, "gain_ends": torch.tensor([[-1.0, 1.0], [-0.5, 0.5], [0.0, 2.0]])}
    z_NRT = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(1))
    best_NGT, index_R = stage.best_gain(z_NRT, tensors, 24), stage.gain_index(24, count)
    assert best_NGT.shape == (2, 3, 16) and index_R.unique().tolist() == [0, 1, 2]
    errors = []
    for level in range(4):
        gain_NRT = stage.gains_of(torch.full_like(best_NGT, level), tensors, 24)
        over = z_NRT / gain_NRT
        parts = stage._parts(24, tensors)
        back = torch.cat([stage._values(stage._codes(over[:, p], s, b), s, b) for p, b, s in parts], 1)
        error_NRT = (back * gain_NRT - z_NRT).square()
        errors.append(torch.stack([error_NRT[:, index_R == group].sum(1) for group in range(count)], 1))
    assert torch.equal(best_NGT.long(), torch.stack(errors).argmin(0))
    fields = stage.encode(z_NRT.mT, None, tensors, geometry)
    assert fields["gain"].shape == (2, *stage.fields(16, 24, geometry, torch.bfloat16)["gain"][0])
    whole = stage.decode(fields, 24, geometry, tensors)
    block, token = torch.tensor([0, 1, 1]), torch.tensor([0, 15, 7])
    assert torch.equal(stage.at(fields, block, token, 16, geometry, tensors), whole[block, token])


def test_slabs_are_filled_in_the_order_of_what_they_bring():
    variances = torch.logspace(1, -2, 64, dtype=torch.float64)
    found = schedule(scheme(target=2.0), variances, GEOMETRY)
    one = schedule(replace(scheme(target=2.0), quantize=Mixed(codebook="stepped", target=2.0)), variances, GEOMETRY)
    assert sum(c * b for c, b in found.runs(64)) == sum(c * b for c, b in one.runs(64)) == 128
    assert max(abs(a - b) for a, b in zip(found.counts, one.counts, strict=True)) <= 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gains": "head"}, "gains of each head and a basis of each head belong together"),
        ({"slab": 24}, "slab=24 asks for runs of 24 channels"),
        ({"gains": 0}, "gains=0"),
    ],
)
def test_settings_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        made = scheme(**{"target": 2.0, "gain": 2} | changes)
        Recipe("r", made, made, "pre").check(GEOMETRY)


@pytest.mark.parametrize(("segment", "policy"), [(48, ""), (1, "")])
def test_segments_divide_blocks(segment, policy):
    with pytest.raises(ValueError, match=f"segment={segment}; use a divisor of the 128 tokens"):
        replace(preset("fisher-2bit"), segment=segment).check()
