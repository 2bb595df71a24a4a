"""Code small integers in as many bits as they say something: asymmetric numeral systems over a ladder of scales.

    | 1: coded, 0: as they are | crc32 of the codes 4 | words of 4 bytes: tokens' rungs, then codes |

A code of channel r in token t has the probabilities of rung(r) + off(t): of what channels are in the mean the artifact
knows, how loud a token is as a whole it says itself, in about 3 bits. Codes of one rung, of all places, are coded
together, so that a block takes some tens of calls. What would take more bytes than the codes is left as it is, so that
nothing is longer than that and a header.

A decoder of such numbers makes codes of any bytes: that these are all, and the right ones, is what the state that is
left and the crc32 say. Needs `constriction`.

Source: Duda, 2013 (asymmetric numeral systems); Bamler, 2022 (constriction).
"""

import sys
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise, starmap
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from kvq_runtime.errors import ArtifactError
from kvq_runtime.ops import ladder
from kvq_runtime.ops.constant import constant

HEADER = 5  # bytes
OFF = 16  # how many rungs a token may be off
BELOW = 6  # as many of these are below 0
SPREAD = 2.5  # of their bell
PART = 1 << 14  # codes that are decoded at a time
WHOLE = 1 << 24  # of what the library's models are parts
_CLAMPED = np.arange(-BELOW, ladder.RUNGS + OFF).clip(0, ladder.RUNGS - 1).astype(np.uint8)  # of a sum, the rung
_WIDTH = 2 * ladder.MOST + 1


def check() -> None:
    """Raise a RuntimeError, a sentence, unless the library that codes is there."""
    _constriction()


def found() -> bool:
    """True if it is there."""
    return find_spec("constriction") is not None


def most(elements: int) -> int:
    """Bytes that no stream of so many codes exceeds."""
    return HEADER + elements


def encode(codes: Sequence[Tensor], rungs: Sequence[Tensor]) -> Tensor:
    """The stream, uint8 [bytes], of codes int8 [T, R] of each place, whose channels have these rungs [R]."""
    off = [off_of(one, own) for one, own in zip(codes, rungs, strict=True)]
    offs = np.concatenate([one.numpy() for one in off]).astype(np.int32)
    order, ends = _order(off, rungs)
    seated_X = np.empty(ends[-1], np.int8)
    for one, own, seat_X in zip(codes, rungs, order, strict=True):
        seated_X[seat_X] = one.numpy().take(_channels(own)[0], 1).ravel()
    symbols_X = np.add(seated_X, ladder.MOST, dtype=np.int32)
    coder = stack().AnsCoder()
    for rung in range(ladder.RUNGS - 1, -1, -1):  # what is coded last is decoded first
        part = symbols_X[ends[rung] : ends[rung + 1]]
        if len(part):
            coder.encode_reverse(part, _model(rung))
    if len(offs):
        coder.encode_reverse(offs, _bell())
    return framed(coder, b"", b"".join(one.numpy().tobytes() for one in codes))


def framed(coder: Any, before: bytes, flat: bytes) -> Tensor:
    """The stream, uint8, of what a coder holds, behind other bytes; of what is coded as it is, if that is shorter."""
    words = coder.get_compressed()
    coded = before + (words.byteswap() if sys.byteorder == "big" else words).tobytes()
    kind, data = (1, coded) if len(coded) < len(flat) else (0, flat)
    return torch.frombuffer(bytearray([kind, *zlib.crc32(flat).to_bytes(4, "little")]) + data, dtype=torch.uint8)


def coder_of(data: bytes, what: str) -> Any:
    """A coder that holds these words. ArtifactError, which begins with `what`: none can."""
    if len(data) % 4:
        raise ArtifactError(f"{what}: {len(data)} bytes are no words")
    try:
        return stack().AnsCoder(np.frombuffer(data, "<u4").astype(np.uint32))
    except ValueError as error:
        raise ArtifactError(f"{what}: {error}") from None


def decode(stream_X: Tensor, shapes: Sequence[tuple[int, int]], rungs: Sequence[Tensor]) -> list[Tensor]:
    """The codes of places of these shapes. ArtifactError: the stream is not of these."""
    data = stream_X.numpy().tobytes()
    count = sum(rows * width for rows, width in shapes)
    if len(data) < HEADER or data[0] > 1 or len(data) > most(count):
        raise ArtifactError(f"coded: {len(data)} bytes are no stream of {count} codes")
    flat_X = _decoded(data[HEADER:], shapes, rungs) if data[0] else np.frombuffer(data[HEADER:], np.int8).copy()
    if len(flat_X) != count or zlib.crc32(flat_X.data) != int.from_bytes(data[1:HEADER], "little"):
        raise ArtifactError("coded: the codes are others than were coded; the artifact or the file is another")
    parts = torch.from_numpy(flat_X).split([rows * width for rows, width in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _decoded(data: bytes, shapes: Sequence[tuple[int, int]], rungs: Sequence[Tensor]) -> np.ndarray:
    coder = coder_of(data, "coded")
    offs = torch.from_numpy(coder.decode(_bell(), sum(rows for rows, _ in shapes)))
    order, ends = _order(offs.split([rows for rows, _ in shapes]), rungs)
    seated_X = np.empty(ends[-1], np.int8)
    for rung in range(ladder.RUNGS):
        for start in range(ends[rung], ends[rung + 1], PART):
            coder = _read(coder, rung, seated_X[start : min(start + PART, ends[rung + 1])])
    if not coder.is_empty():
        raise ArtifactError("coded: something is left after the last code")
    parts = zip(shapes, rungs, order, strict=True)
    found = [seated_X.take(seat_X).reshape(shape).take(_channels(own)[1], 1).ravel() for shape, own, seat_X in parts]
    return np.concatenate(found) if found else seated_X


def _read(coder: Any, rung: int, out_X: np.ndarray) -> Any:
    """Decode the next codes, all of one rung; returns the coder to go on with."""
    (model, reach), before = _likely(rung), coder.clone()
    symbols_X = coder.decode(model, len(out_X))
    if symbols_X.min() > 0 and symbols_X.max() < 2 * reach + 2:
        np.subtract(symbols_X, reach + 1, out=out_X, casting="unsafe")
        return coder
    np.subtract(before.decode(_model(rung), len(out_X)), ladder.MOST, out=out_X, casting="unsafe")
    return before


def off_of(codes_TR: Tensor, rung_R: Tensor) -> Tensor:
    """Rungs, from BELOW below, that a token's codes are off their channels' for the fewest bits: int64 [T]."""
    place_TR = codes_TR.int() + (rung_R.int() * _WIDTH + ladder.MOST)
    begin_T = place_TR.shape[1] * torch.arange(len(place_TR), dtype=torch.int32, device=codes_TR.device)
    length_TO = embedding_bag(place_TR.flatten(), _lengths_off().to(codes_TR.device), begin_T, mode="sum")
    return (length_TO - _bell_logs().to(codes_TR.device)).argmin(1)


def off(codes_TR: Tensor, rung_R: Tensor) -> Tensor:
    """The same about 0."""
    return off_of(codes_TR, rung_R) - BELOW


def bits(codes: Sequence[Tensor], rungs: Sequence[Tensor]) -> float:
    """The bits that a stream takes, but for its header, by the probabilities alone: no coder is needed."""
    total = 0.0
    for codes_TR, rung_R in zip(codes, rungs, strict=True):
        off_T = off_of(codes_TR, rung_R)
        rung_TR = (rung_R.long() + (off_T[:, None] - BELOW)).clamp(0, ladder.RUNGS - 1)
        lengths = ladder.ladder().lengths.to(codes_TR.device).flatten()
        total += float(lengths[rung_TR * _WIDTH + codes_TR.long() + ladder.MOST].sum(dtype=torch.float64))
        total -= float(_bell_logs()[off_T.cpu()].sum())
    return total


class _Channels(NamedTuple):
    """A place's channels by rung, and their places among these; the rungs that there are, and channels of each."""

    order_R: np.ndarray
    back_R: np.ndarray
    rung_G: np.ndarray
    size_G: np.ndarray


def _channels(rung_R: Tensor) -> _Channels:
    return _channels_of(rung_R.numpy().tobytes())


@lru_cache(maxsize=1024)
def _channels_of(rungs: bytes) -> _Channels:
    order_R = np.frombuffer(rungs, np.uint8).argsort(kind="stable")
    rung_G, size_G = np.unique(np.frombuffer(rungs, np.uint8), return_counts=True)
    return _Channels(order_R, order_R.argsort(), rung_G.astype(np.int64), size_G)


def _order(off: Sequence[Tensor], rungs: Sequence[Tensor]) -> tuple[Iterator[np.ndarray], np.ndarray]:
    """Codes by rung: of each place in turn where its codes are, channels by rung; and where each rung's begin and end.

    What a token has in channels of one rung is side by side in both: a run, of which there are S, ten times fewer.
    """
    rungs_S, sizes_S, lengths = [np.empty(0, np.uint8)], [np.empty(0, np.int64)], [0]
    for off_T, own in zip(off, rungs, strict=True):
        channels = _channels(own)
        rungs_S.append(_CLAMPED.take(channels.rung_G + off_T.numpy()[:, None], mode="clip").ravel())
        sizes_S.append(channels.size_G[None].repeat(len(off_T), 0).ravel())
        lengths.append(len(rungs_S[-1]))
    rung_S, size_S = np.concatenate(rungs_S), np.concatenate(sizes_S)
    order_S = rung_S.argsort(kind="stable")
    first_S = np.empty_like(size_S)
    first_S[order_S] = size_S[order_S].cumsum() - size_S[order_S]
    ends = np.concatenate([[0], np.bincount(rung_S, size_S, ladder.RUNGS).cumsum()]).astype(np.int64)
    parts = zip(starmap(slice, pairwise(np.cumsum(lengths).tolist())), rungs, strict=True)
    return (_seats(rung_S[part], size_S[part], first_S[part], own) for part, own in parts), ends


def _seats(rung_S: np.ndarray, size_S: np.ndarray, first_S: np.ndarray, rung_R: Tensor) -> np.ndarray:
    """The seats of the codes of one place, from the first seats of its runs."""
    seat_X = (first_S - (size_S.cumsum() - size_S)).repeat(size_S)
    seat_X += np.arange(len(seat_X))
    for rung in (0, ladder.RUNGS - 1):  # where channels of several rungs may meet, and are in their own order
        if (rung_S == rung).any():
            at_X = np.flatnonzero((rung_S == rung).repeat(size_S))
            own_X = np.arange(len(seat_X)).reshape(-1, len(rung_R)).take(_channels(rung_R).order_R, 1).ravel()
            seat_X[at_X[own_X[at_X].argsort()]] = seat_X[at_X]
    return seat_X


@lru_cache(maxsize=ladder.RUNGS)
def _model(rung: int) -> Any:
    counts = ladder.ladder().counts[rung].numpy()
    return models().Categorical((counts / 2.0**ladder.BITS).astype(np.float32), perfect=False)


@lru_cache(maxsize=ladder.RUNGS)
def _likely(rung: int) -> tuple[Any, int]:
    """`_model` for the codes that a rung is likely to have, and the largest of these; all below are its first symbol,
    all above its last. The library halves what is left at each step, so that few symbols are found sooner.

    A model's symbols are parts of the numbers below WHOLE, in as many as each is probable. Numbers to which the library
    has nothing to add or to round give the parts that are wanted.
    """
    counts = ladder.ladder().counts[rung].numpy()[ladder.MOST :]
    reach = min(int(np.flatnonzero(counts > counts.min()).max(initial=0)), ladder.MOST - 1)
    begins = [_begin(_model(rung), symbol) for symbol in range(ladder.MOST - reach, ladder.MOST + reach + 2)]
    sizes = np.diff([0, *begins, WHOLE])
    made = models().Categorical((sizes - 1).astype(np.float32), perfect=False)
    same = [_begin(made, symbol) for symbol in range(len(sizes))] == [0, *begins]
    return (made, reach) if same else (_model(rung), ladder.MOST - 1)


def _begin(model: Any, symbol: int) -> int:
    """The first number of a symbol's part: what an empty coder holds after it."""
    coder = stack().AnsCoder()
    coder.encode_reverse(symbol, model)
    return sum(int(word) << (32 * place) for place, word in enumerate(coder.get_compressed()))


def _weights() -> np.ndarray:
    return np.exp(-(((np.arange(OFF) - BELOW) / SPREAD) ** 2) / 2) + 1e-3


@lru_cache(maxsize=1)
def _bell() -> Any:
    weights = np.round(_weights() / _weights().sum() * 2**16) / 2**16
    return models().Categorical(weights.astype(np.float32), perfect=False)


@constant(1)
def _lengths_off() -> Tensor:
    """Bits of a code of a rung in a token that is so many rungs off, float32 [rungs · codes, OFF]."""
    rung_KO = (torch.arange(ladder.RUNGS)[:, None] + torch.arange(OFF) - BELOW).clamp(0, ladder.RUNGS - 1)
    return ladder.ladder().lengths[rung_KO].transpose(1, 2).flatten(0, 1).contiguous()


@constant(1)
def _bell_logs() -> Tensor:
    """Logarithms, to the base 2, of the probabilities of tokens' rungs, float32."""
    return torch.from_numpy(np.log2(_weights() / _weights().sum()).astype(np.float32))


def stack() -> Any:
    """The library's coders of stacks. RuntimeError, a sentence: it is not there."""
    return _constriction().stack


def models() -> Any:
    """Its models, likewise."""
    return _constriction().model


def _constriction() -> Any:
    """Its streams; what says their types does not say them all."""
    try:
        return import_module("constriction").stream
    except ImportError:
        raise RuntimeError(
            "files of this recipe are entropy-coded, which needs constriction: pip install 'kvq-runtime[rest]'"
        ) from None
