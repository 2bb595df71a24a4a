"""The coder of files: what goes in comes out, in as many bits as probabilities say, and nothing else is taken."""

import sys
import zlib
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq_runtime.errors import ArtifactError
from kvq_runtime.ops import entropy, ladder

pytest.importorskip("constriction")


def places(seed: int = 0, tokens: int = 32) -> tuple[list, list]:
    """Codes and rungs of three places of unequal width, whose tokens are of unequal loudness."""
    generator, codes, rungs = torch.Generator().manual_seed(seed), [], []
    for width in (40, 7, 64):
        deviation_R = 2.0 ** torch.linspace(3, -3, width)
        z_TR = deviation_R * torch.randn(tokens, width, generator=generator)
        z_TR *= torch.exp(0.5 * torch.randn(tokens, 1, generator=generator))
        rungs.append(ladder.of_deviation(deviation_R))
        codes.append(ladder.encode(z_TR[None], torch.ones(width), rungs[-1])[0])
    return codes, rungs


def shapes(codes: list) -> list:
    return [tuple(one.shape) for one in codes]


def test_codes_come_back_and_take_what_their_probabilities_say():
    codes, rungs = places(tokens=128)
    coded = entropy.encode(codes, rungs)
    found = entropy.decode(coded, shapes(codes), rungs)
    assert all(one.dtype == torch.int8 and torch.equal(one, own) for one, own in zip(found, codes, strict=True))
    expected = entropy.bits(codes, rungs) / 8
    assert coded[0] == 1 and expected <= len(coded) <= 1.001 * expected + entropy.HEADER + 8


def test_tokens_of_unequal_loudness_are_told_apart():
    """Against the same tokens at their channels' own rungs: what it says of each token, it earns."""
    codes, rungs = places(tokens=128)
    lengths = ladder.ladder().lengths
    alone = sum(
        float(lengths[own.long().expand_as(one), one.long() + ladder.MOST].sum())
        for one, own in zip(codes, rungs, strict=True)
    )
    assert entropy.bits(codes, rungs) < 0.97 * alone
    off = entropy.off(torch.tensor([[100, 100], [0, 0]], dtype=torch.int8), torch.tensor([20, 20], dtype=torch.uint8))
    assert off[0] > 3 and off[1] < -2


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 2**31))
def test_any_codes_come_back_and_are_never_longer_than_they_were(rows, width, seed):
    """Those that no probability expects, too."""
    random = np.random.default_rng(seed)
    codes = [torch.from_numpy(random.integers(-127, 128, (rows, width)).astype(np.int8))]
    rungs = [torch.from_numpy(random.integers(0, ladder.RUNGS, width).astype(np.uint8))]
    coded = entropy.encode(codes, rungs)
    assert len(coded) <= entropy.most(rows * width)
    assert torch.equal(entropy.decode(coded, [(rows, width)], rungs)[0], codes[0])


def test_what_is_not_the_stream_is_refused():
    """Every byte, cut and addition: a decoder of such numbers makes codes of anything."""
    codes, rungs = places()
    good = entropy.encode(codes, rungs).numpy().tobytes()
    damaged = [bytes([*good[:at], good[at] ^ 0x41, *good[at + 1 :]]) for at in range(0, len(good), 7)]
    damaged += [b"", good[:3], good[:5], good[:-1], good[:-4], good + b"\1\0\0\0", good + good, good[:5] + b"\0" * 8]
    damaged += [b"\0" + good[1:], b"\2" + good[1:], good[:5] + b"\xff" * 4096, b"\1" + bytes(4) + b"\xff" * 100_000]
    for data in damaged:
        given = torch.tensor([*data], dtype=torch.uint8)
        with pytest.raises(ArtifactError, match="coded: "):
            entropy.decode(given, shapes(codes), rungs)


def test_words_that_no_code_takes_are_refused(monkeypatch):
    """The right codes, on top of words that a coder held before."""
    codes, rungs = places()
    held = partial(entropy.stack().AnsCoder, np.array([3, 5, 7], np.uint32))
    with monkeypatch.context() as patch:
        patch.setattr(entropy, "stack", lambda: SimpleNamespace(AnsCoder=held))
        coded = entropy.encode(codes, rungs)
    with pytest.raises(ArtifactError, match="left after the last code"):
        entropy.decode(coded, shapes(codes), rungs)


def test_another_artifact_s_rungs_are_told():
    codes, rungs = places()
    coded = entropy.encode(codes, rungs)
    with pytest.raises(ArtifactError, match="coded: "):
        entropy.decode(coded, shapes(codes), [rungs[0].flip(0), *rungs[1:]])


def test_the_bytes_are_the_same_for_ever():
    """Files of one version are read by the next."""
    codes, rungs = places(tokens=4)
    codes = [(torch.arange(one.numel()) * 7 % 5 - 2).to(torch.int8).view(one.shape) for one in codes]
    assert zlib.crc32(entropy.encode(codes, rungs).numpy().tobytes()) == 4231005649


def test_codes_are_coded_by_rung_and_otherwise_in_their_own_order():
    """Also at the ends of the ladder, where channels of several rungs meet."""
    generator = torch.Generator().manual_seed(0)
    widths, off = (9, 1, 24), [torch.randint(0, entropy.OFF, (7,), generator=generator) for _ in range(3)]
    rungs = [torch.randint(0, ladder.RUNGS, (width,), generator=generator).to(torch.uint8) for width in widths]
    rungs[2][::2] //= 8  # many at the low end
    pairs = zip(off, rungs, strict=True)
    each = [(own.long() + one[:, None] - entropy.BELOW).clamp(0, ladder.RUNGS - 1) for one, own in pairs]
    expected = torch.cat([one.flatten() for one in each]).argsort(stable=True).argsort()
    order, ends = entropy._order(off, rungs)
    for own, seats, numbers in zip(rungs, order, expected.split([one.numel() for one in each]), strict=True):
        arranged = numbers.view(-1, len(own))[:, own.argsort(stable=True)]
        assert torch.equal(torch.from_numpy(seats).view_as(arranged), arranged)
    counts = torch.cat([one.flatten() for one in each]).bincount(minlength=ladder.RUNGS)
    assert np.diff(ends).tolist() == counts.tolist() and counts[0] > 10


def test_likely_codes_are_found_where_the_whole_model_has_them():
    """What is not likely is a sign to look there; a code that a rung never had is one."""
    for rung in range(ladder.RUNGS):
        (likely, reach), whole = entropy._likely(rung), entropy._model(rung)
        assert likely is not whole and 0 <= reach < ladder.MOST
        counts = ladder.ladder().counts[rung]
        assert reach == ladder.MOST - 1 or counts[: ladder.MOST - reach].max() == counts.min()
        for code in (-reach, 0, reach):
            begins = entropy._begin(likely, reach + 1 + code), entropy._begin(whole, ladder.MOST + code)
            assert begins[0] == begins[1]
    codes, rungs = [torch.zeros(3, entropy.PART, dtype=torch.int8)], [torch.full((entropy.PART,), 9, dtype=torch.uint8)]
    codes[0][1, 5], codes[0][1, 6], codes[0][2, -1] = ladder.MOST, 1, -ladder.MOST
    assert torch.equal(entropy.decode(entropy.encode(codes, rungs), shapes(codes), rungs)[0], codes[0])


def test_a_library_that_gives_symbols_other_parts_is_asked_for_all_of_them(monkeypatch):
    begin = entropy._begin
    monkeypatch.setattr(
        entropy, "_begin", lambda model, symbol: begin(model, symbol) + (model is not entropy._model(9))
    )
    assert entropy._likely.__wrapped__(9) == (entropy._model(9), ladder.MOST - 1)


def test_without_the_library_a_sentence_says_what_to_install(monkeypatch):
    for name in [*sys.modules]:
        if name.partition(".")[0] == "constriction":
            monkeypatch.setitem(sys.modules, name, None)
    entropy._model.cache_clear()
    entropy._bell.cache_clear()
    with pytest.raises(RuntimeError, match=r"pip install 'kvq-runtime\[rest\]'"):
        entropy.encode(*places())
    with pytest.raises(RuntimeError, match="constriction"):
        entropy.check()
