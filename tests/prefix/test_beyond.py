"""What files keep of blocks beyond their promise: the fewest bits that are far within it, or the tokens."""

import pytest
import torch
from feeding import GEOMETRY
from kept_blocks import ids, rows, store
from safetensors.torch import load as from_safetensors

from kvq_runtime.prefix import chain
from kvq_runtime.store.promise import Check, Promise, decode_beyond, encode_beyond

BLOCK, WIDTH = 128, 24


def tokens(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Channels of unequal means and deviations."""
    generator = torch.Generator().manual_seed(seed)
    deviation_C = torch.linspace(0.2, 2, WIDTH)
    x_TC = torch.randn(BLOCK, WIDTH, generator=generator) * deviation_C + torch.linspace(-20, 20, WIDTH)
    return x_TC.to(dtype)


def promise(bound: float, spread: float = 1.0) -> Promise:
    return Promise(spread, 8, (bound / 1.25,) * 4)


def error(x_TC: torch.Tensor, y_TC: torch.Tensor) -> float:
    return sum(float((x - y).double().square().sum()) for x, y in zip(x_TC, y_TC, strict=True)) / len(x_TC)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bound", [30.0, 3.0, 0.8])
def test_the_fewest_bits_within_an_eighth_of_the_bound_are_taken(bound, dtype):
    """With one bit less the error is larger; what was decoded is encoded to the same codes."""
    x_TC = tokens(dtype)
    kept = encode_beyond(x_TC, 0, promise(bound / 2, 2.0))
    bits = (kept.shape[1] - 4) * 8 // BLOCK
    back_TC = decode_beyond(kept, BLOCK, dtype)
    assert kept.dtype == torch.uint8 and kept.shape == (WIDTH, BLOCK * bits // 8 + 4) and bits < 8
    assert back_TC.dtype == dtype and error(x_TC.float(), back_TC.float()) <= bound / 8 * 1.001
    low_C, high_C = x_TC.float().aminmax(dim=0)
    step_C = (high_C - low_C) / (2 ** (bits - 1) - 1) if bits > 1 else high_C - low_C
    coarse_TC = low_C + step_C * ((x_TC.float() - low_C) / step_C).round()
    assert bits == 1 or error(x_TC.float(), coarse_TC) > bound / 8 * 0.98
    again = encode_beyond(back_TC, 0, promise(bound / 2, 2.0))
    assert torch.equal(again[:, :-4], kept[:, :-4])


def test_tokens_stay_as_they_are_where_few_bits_do_not_do():
    x_TC = tokens()
    for given in (None, promise(1e-9)):
        assert torch.equal(encode_beyond(x_TC, 0, given), x_TC)
    wide_TC = x_TC * 1e6  # ends are of float16
    assert torch.equal(encode_beyond(wide_TC, 0, promise(1e9)), wide_TC)
    assert torch.equal(decode_beyond(x_TC, BLOCK, torch.float32), x_TC)
    two_TC = x_TC[:2].bfloat16()  # two codes and the ends take as many bytes as they do
    assert torch.equal(encode_beyond(two_TC, 0, promise(1e9)), two_TC)


def test_sinks_among_the_tokens_do_not_widen_steps():
    x_TC = tokens()
    plain = encode_beyond(x_TC, 0, promise(3.0))
    x_TC[:4] = 5e4
    kept = encode_beyond(x_TC, 4, promise(3.0))
    assert kept.shape == plain.shape and encode_beyond(x_TC, 0, promise(3.0)).dtype == torch.float32
    assert error(x_TC[4:], decode_beyond(kept, BLOCK, torch.float32)[4:]) <= 3 / 8 * 1.001


def test_a_files_bytes_are_fewer_and_what_is_read_is_within_the_promise():
    """From rows, and from a cache that was loaded: the first block, with sinks, and the second."""
    sites = [(layer, role) for layer in range(GEOMETRY.layers) for role in (0, 1)]
    given, plain = store(promised=Check({site: promise(0.5) for site in sites})), store()
    count = 2 * given.block
    keys, values = rows(count)
    for kept in (given, plain):
        assert kept.put(ids(count), keys, values) == count
    assert given.tally["beyond"] == 2 * len(sites)
    exact = len(sites) * given.block * GEOMETRY.width * 2
    names = chain.names(given.root, chain.token_row(ids(count)), given.block)
    for name in names:
        data = given.shelf.get(name, given.format.largest()) or b""
        of_them = [x for field, x in from_safetensors(data).items() if field.endswith(".exact")]
        assert len(of_them) == len(sites) and sum(x.nbytes for x in of_them) < 0.55 * exact
    sinks = given.format.sinks(0)
    for layer, *pair in given.decode(given.load(ids(count))):
        for x_THD, own_THD in zip(pair, (keys[layer], values[layer]), strict=True):
            assert torch.equal(x_THD[:sinks], own_THD[:sinks])
            for block in (slice(sinks, given.block), slice(given.block, count)):
                assert error(x_THD[block].flatten(1).float(), own_THD[block].flatten(1).float()) <= 0.5 / 8 * 1.4
