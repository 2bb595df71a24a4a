"""Codebooks of latent channels against slow integration and search."""

import pytest
import torch

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import latent, trellis
from kvq_runtime.stages.latent import Mixed
from scripts import build_tables

# Jayant and Noll, 1984, table 4.4: signal-to-noise ratios of Max quantizers for a Gaussian, in dB
RATIOS = {1: 4.40, 2: 9.30, 3: 14.62, 4: 20.22, 5: 26.01, 6: 31.89, 7: 37.81}


@pytest.mark.parametrize("bits", RATIOS)
def test_the_gaussian_codebook_is_maxs(bits):
    found = -10 * torch.tensor(latent.distortion(bits)).log10()
    assert float(found) == pytest.approx(RATIOS[bits], abs=0.03 if bits < 7 else 0.1)


@pytest.mark.parametrize("bits", [0, 1, 2, 4])
def test_its_boundaries_are_built(bits):
    boundaries, centroids = latent.gaussian(bits)
    torch.testing.assert_close(build_tables.gaussian_boundaries(bits), boundaries, rtol=0, atol=1e-12)
    torch.testing.assert_close((centroids[1:] + centroids[:-1]) / 2, boundaries, rtol=0, atol=1e-9)


@pytest.mark.parametrize("bits", [1, 3, 5])
def test_codes_are_nearest_points(bits):
    z = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(bits))
    deviation = torch.tensor([0.5, 1.0, 3.0])
    found = latent.decode_gaussian(latent.encode_gaussian(z, deviation, bits), deviation, bits)
    points = latent.gaussian(bits)[1].float()[:, None] * deviation
    distances = (z[..., None] - points.mT[None, :, None]).abs()
    torch.testing.assert_close((z - found).abs(), distances.min(-1).values)
    low, high = -2 * deviation, deviation
    found = latent.decode_uniform(latent.encode_uniform(z, low, high, bits), low, high, bits)
    levels = torch.linspace(0, 1, 2**bits)[:, None] * (high - low) + low
    distances = (z[..., None] - levels.mT[None, :, None]).abs()
    torch.testing.assert_close((z - found).abs(), distances.min(-1).values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("codebook", ["gaussian", "uniform", "trellis"])
def test_every_channel_has_its_own_bits(codebook):
    """Against one channel after the other: runs of odd lengths, of widths that make several planes."""
    geometry, stage = Geometry(1, 1, 16), Mixed((8, 5, 3, 1, 0), (1, 3, 2, 3, 7), codebook=codebook)
    z = torch.randn(2, 24, 9, generator=torch.Generator().manual_seed(0)) * torch.arange(9, 0, -1)
    scale = torch.arange(9, 0, -1).float()
    tensors = {"low": -2 * scale, "high": 3 * scale} if codebook == "uniform" else {"deviation": scale}
    fields = stage.encode(z, None, tensors, geometry)
    shapes = {name: (tuple(field.shape[1:]), field.dtype) for name, field in fields.items()}
    assert shapes == stage.fields(24, 16, geometry, torch.bfloat16)
    assert fields["codes"].shape[1] * 8 == 24 * (8 + 3 * 5 + 2 * 3 + 3)
    decoded = stage.decode(fields, 16, geometry, tensors).float()
    for channel, bits in enumerate([8, 5, 5, 5, 3, 3, 1, 1, 1]):
        one, own = z[:, :, channel][:, None], scale[channel : channel + 1]
        if codebook == "trellis" and bits <= trellis.BITS:
            expected = trellis.decode_path(trellis.encode_path(one, own, bits), own, bits)
        elif codebook in ("gaussian", "trellis"):
            expected = latent.decode_gaussian(latent.encode_gaussian(one, own, bits), own, bits)
        else:
            low, high = -2 * own, 3 * own
            expected = latent.decode_uniform(latent.encode_uniform(one, low, high, bits), low, high, bits)
        assert torch.equal(decoded[:, :, channel], expected[:, 0].bfloat16().float())


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_errors_without_codes_are_those_of_the_codes(bits):
    z = torch.randn(2, 4, 300, generator=torch.Generator().manual_seed(bits)) * 2
    deviation = torch.tensor([0.5, 1.0, 3.0, 0.0])
    found = latent.decode_gaussian(latent.encode_gaussian(z, deviation, bits), deviation, bits)
    torch.testing.assert_close(latent.errors_gaussian(z, deviation, bits), (found - z).square(), rtol=1e-4, atol=1e-6)
