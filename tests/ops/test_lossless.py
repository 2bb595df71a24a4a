"""The coder of numbers as they are: every bit comes back, in about what a Gaussian needs, and nothing else is taken."""

import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq_runtime.errors import ArtifactError
from kvq_runtime.ops import lossless

pytest.importorskip("constriction")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def returned(rows: list[torch.Tensor]) -> int:
    """Bytes of a stream, of which every bit came back."""
    coded = lossless.encode(rows)
    found = lossless.decode(coded, len(rows[0]), [one.shape[1] for one in rows], rows[0].dtype)
    for one, own in zip(found, rows, strict=True):
        assert one.shape == own.shape and one.dtype == own.dtype and torch.equal(bits(one), bits(own))
    assert len(coded) <= lossless.most(sum(one.numel() for one in rows), rows[0].dtype)
    return len(coded)


def gaussian(dtype: torch.dtype, tokens: int = 256) -> list[torch.Tensor]:
    """Two places, of deviations over 12 octaves and of means up to 10 deviations."""
    generator, found = torch.Generator().manual_seed(0), []
    for width in (48, 17):
        deviation_C = 2.0 ** torch.linspace(5, -7, width)
        mean_C = deviation_C * torch.linspace(-10, 10, width).roll(width // 3)
        found.append((mean_C + deviation_C * torch.randn(tokens, width, generator=generator)).to(dtype))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_gaussian_channels_take_little_more_than_their_entropy(dtype):
    """That of a density, less the logarithm of the width of each number's own cell."""
    rows = gaussian(dtype)
    ideal, digits = 0.0, {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}[dtype]
    for x_TC in rows:
        x = x_TC.double()
        width = torch.frexp(x).exponent.double() - 1 - digits
        ideal += float((0.5 * torch.log2(2 * np.pi * np.e * x.var(0)) - width.mean(0)).sum()) * len(x)
    count = sum(one.numel() for one in rows)
    assert 0 < 8 * returned(rows) / count - ideal / count < 0.2
    assert ideal / count < (16 if dtype != torch.float32 else 32)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(DTYPES), st.integers(0, 9), st.integers(0, 9), st.integers(0, 2**31))
def test_any_bits_come_back_and_are_never_longer_than_they_were(dtype, rows, width, seed):
    """NaN of any payload, infinity, subnormal numbers and zeros of both signs among them."""
    random, word = np.random.default_rng(seed), np.int32 if dtype == torch.float32 else np.int16
    ends = np.iinfo(word)
    x = torch.from_numpy(random.integers(ends.min, ends.max, (rows, width), word, endpoint=True)).view(dtype)
    returned([x])
    returned([x, x[:, :0]])


def test_what_is_far_from_its_channel_comes_back():
    rows = gaussian(torch.bfloat16)
    for place, one in enumerate((float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40, -1e38)):
        rows[place % 2][3 * place, place] = one
    before = len(lossless.encode(gaussian(torch.bfloat16)))
    assert returned(rows) < 1.02 * before


def test_what_is_not_the_stream_is_refused():
    rows = gaussian(torch.bfloat16, 16)
    good = lossless.encode(rows).numpy().tobytes()
    damaged = [bytes([*good[:at], good[at] ^ 0x41, *good[at + 1 :]]) for at in range(0, len(good), 13)]
    damaged += [b"", good[:3], good[:5], good[:-1], good[:-4], good + b"\1\0\0\0", good + good, good[:5] + b"\0" * 8]
    damaged += [b"\0" + good[1:], b"\2" + good[1:], b"\1" + bytes(4) + b"\xff" * 900, b"\1" + bytes(4) + b"\xff" * 99]
    for data in damaged:
        with pytest.raises(ArtifactError, match="lossless: "):
            lossless.decode(torch.tensor([*data], dtype=torch.uint8), 16, [48, 17], torch.bfloat16)


def test_a_whole_block_takes_little_memory_to_code():
    """Threads work on one each: beside the numbers and their stream some 20 bytes a number, not ten times theirs."""
    rows = [torch.randn(128, 4096, generator=torch.Generator().manual_seed(0)).bfloat16() for _ in range(2)]
    coded = lossless.encode(rows)
    peaks = []
    for work in (lambda: lossless.encode(rows), lambda: lossless.decode(coded, 128, [4096, 4096], torch.bfloat16)):
        tracemalloc.start()
        work()
        peaks.append(tracemalloc.get_traced_memory()[1] / 2**20)
        tracemalloc.stop()
    assert max(peaks) < 30, peaks


def test_words_are_stored_low_bytes_first_on_any_machine():
    for word in ("<u2", ">u2", "<u4", ">u4"):
        stored = lossless._stored(np.array([[1, 515]], word)).tobytes()
        assert stored == b"".join(one.to_bytes(int(word[2]), "little") for one in (1, 515))


def test_the_bytes_are_the_same_for_ever():
    """Files of one version are read by the next."""
    x = (torch.arange(8 * 24).view(8, 24) * 37 % 101 - 50).bfloat16() / 16
    assert zlib.crc32(lossless.encode([x, x[:, :5]]).numpy().tobytes()) == 1910966530
