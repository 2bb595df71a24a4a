"""Channel-separable rounding against itself by hand: scales, codes, what a loud channel costs, and the bill."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scheme_fit import NOWHERE, WIDTH, fitted
from torch import Tensor

from kvq_runtime.codec.codec import Codec
from kvq_runtime.geometry import Geometry
from kvq_runtime.policies.shadow_chunks import ShadowChunks
from kvq_runtime.recipe import Scheme, preset
from kvq_runtime.stages.rotate import Hadamard
from kvq_runtime.stages.rtn import Rtn
from kvq_runtime.stages.separable import Separable


def activations(blocks: int = 8, seed: int = 0, loud: float = 1.0) -> Tensor:
    """Tokens [blocks, 128, C] whose channels differ in size; channel 5 is `loud` times as large as it would be."""
    x = torch.randn(blocks, 128, WIDTH, generator=torch.Generator().manual_seed(seed)) * 1.03 ** torch.arange(WIDTH)
    x[..., 5] *= loud
    return x


def rounded(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x, NOWHERE), NOWHERE)


def by_hand(x_RC: np.ndarray, c_C: np.ndarray, bits: int, range: str) -> np.ndarray:
    """c · dequant(quant(x / c)), token by token; step and low end as float16 holds them."""
    out = np.empty_like(x_RC)
    for token, x_C in enumerate(x_RC / c_C):
        top = 2**bits - 1
        if range == "minmax":
            low = float(np.float16(x_C.min()))
            step = float(np.float16(max(x_C.max() - low, 0) / top))
        else:
            step = float(np.float16(np.abs(x_C).max() * 2 / top))
            low = -step * top / 2
        codes = np.clip(np.rint((x_C - low) / step), 0, top)
        out[token] = c_C * (low + step * codes)
    return out


# ---- what it does


@pytest.mark.parametrize("range", ["minmax", "absmax"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_codec_divides_rounds_and_multiplies_back(bits, range):
    calibration, x = activations(), activations(1, seed=1)
    codec = fitted(Scheme(Separable(bits, range=range)), calibration).codec
    c_C = np.sqrt(np.abs(calibration.numpy().reshape(-1, WIDTH)).max(0))
    np.testing.assert_allclose(codec.tensors["quantize.scale"].numpy(), c_C, rtol=1e-6)
    expected = by_hand(x[0].double().numpy(), c_C.astype(np.float64), bits, range)
    error = np.abs(rounded(codec, x)[0].numpy() - expected)
    assert (error > 1e-4).mean() < 1e-3  # an element halfway between two codes may take either


def test_scales_are_those_of_what_is_rounded():
    """After a rotation, and about the mean where one is removed."""
    x = activations(loud=40.0)
    turned = fitted(Scheme(Separable(), rotate=Hadamard("head")), x).codec
    expected = turned.rotated(x).flatten(0, 1).abs().amax(0).sqrt()
    torch.testing.assert_close(turned.tensors["quantize.scale"], expected)
    assert float(expected.max() / expected.min()) < 2 < 6 < float(by_channel(x).max() / by_channel(x).min())


def by_channel(x: Tensor) -> Tensor:
    return x.flatten(0, 1).abs().amax(0).sqrt()


# ---- the paper's claim


def test_a_loud_channel_costs_the_others_less_than_in_plain_rounding():
    """Section 4.1: a channel n times as loud widens a token's range √n times, not n times."""
    quiet = torch.arange(WIDTH) != 5

    def others(scheme: Scheme, loud: float) -> float:
        new = activations(2, seed=1, loud=loud)
        codec = fitted(scheme, activations(loud=loud)).codec
        return float((rounded(codec, new) - new)[..., quiet].norm())

    schemes = Scheme(Rtn(8, "all")), Scheme(Separable(8))
    plain, separable = ([others(scheme, loud) for loud in (1, 256, 1024)] for scheme in schemes)
    assert plain[2] / plain[1] == pytest.approx(4, rel=0.05) and separable[2] / separable[1] < 2
    assert plain[2] / plain[0] > 50 and separable[2] / separable[0] < 5


def test_single_tokens_are_decoded_as_in_their_block():
    codec = fitted(preset("zipcache-2bit").value, activations()).codec
    x = activations(3, seed=1)
    fields, block, token = codec.encode(x, NOWHERE), torch.tensor([2, 0, 2]), torch.tensor([7, 127, 0])
    found = codec.tokens(fields, block, token, slice(3, 40))
    assert torch.equal(found, codec.decode(fields, NOWHERE)[block, token, 3:40])
    two = replace(preset("zipcache-2bit"), key=Scheme(Separable(2)), position="pre")
    replace(two, policies=(ShadowChunks(),)).check(Geometry(2, 2, 64))
