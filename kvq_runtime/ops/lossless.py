"""Code the model's own numbers without loss: their signs, exponents and first digits by what a channel is like.

    | 1: coded, 0: as they are | crc32 4 | last bits of mantissas, packed | words of 4 bytes: channels, tops, far ones |

A channel of a block is taken for a Gaussian: of its deviation, to a third of an octave, and its mean over that, one of
MEANS. It says these two in some 6 bits. The top of a number is its sign, its exponent and TOP digits of its mantissa;
what a Gaussian makes of these is a table, and numbers of channels of one table are coded together. The other digits
are as good as random, and are stored. A number that is far from all that a table has, a zero or a NaN, says its top
again: every bit comes back, of bfloat16, float16 and float32. Tables are whole numbers, the same on every machine.

What was tried and takes more: the difference to the token before (1.7 bits more, of SmolLM2's keys); how loud a token
is (0.02 bits less, and slower).

Source: Duda, 2013 (asymmetric numeral systems); Hershcovitch et al., 2024 (ZipNN: exponents apart from mantissas).
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvq_runtime.errors import ArtifactError
from kvq_runtime.ops import entropy, pack
from kvq_runtime.ops.entropy import HEADER

TOP = 3  # digits of a mantissa
PER = 3  # deviations of an octave
MEANS = (*(step / 2 for step in range(8)), *(float(step) for step in range(4, 17)))  # in deviations
WIDE, WEIGHT = 3.0, 0.04  # of numbers that are of a wider Gaussian
BELOW, OCTAVES = 24, 32  # that a table has, and as many of them below the deviation's
BITS = 20  # of a probability
REACH = 2048  # of differences of deviations from one channel to the next
_MAGNITUDES = OCTAVES << TOP
PART = 1 << 16  # numbers that are worked on at a time, in some 100 bytes each
FAR = 2 * _MAGNITUDES  # the symbol of a number that says its top again


class _Kind(NamedTuple):
    """A dtype's words: as numpy's, bits of a mantissa, the exponent of 1, and what holds a mantissa's last bits."""

    word: Any
    mantissa: int
    one: int
    rest: Any = np.uint8


_KINDS = {
    torch.bfloat16: _Kind(np.uint16, 7, 127),
    torch.float16: _Kind(np.uint16, 10, 15),
    torch.float32: _Kind(np.uint32, 23, 127, np.int32),
}


def most(count: int, dtype: torch.dtype) -> int:
    """Bytes that no stream of so many numbers exceeds."""
    return HEADER + count * dtype.itemsize


def encode(rows: Sequence[Tensor]) -> Tensor:
    """The stream, uint8 [bytes], of numbers [T, C] of each place, of one T and one dtype."""
    kind, dtype = _KINDS[rows[0].dtype], rows[0].dtype
    words_CT = np.concatenate([_words(one, kind) for one in rows])
    symbol_CT, rest_CT = np.empty(words_CT.shape, np.int16), np.empty(words_CT.shape, kind.rest)
    deviation_C, mean_C, negative_C = (np.empty(len(words_CT), np.int64) for _ in range(3))
    for part in _parts(*words_CT.shape):
        numbers_CT = _signed(words_CT[part]).view(dtype).float().numpy()
        deviation_C[part], mean_C[part], negative_C[part] = _channels(numbers_CT)
        sign_CT, top_CT, rest_CT[part] = _apart(words_CT[part], kind)
        lowest_C = (deviation_C[part] // PER + kind.one - BELOW) << TOP
        place_CT = top_CT.astype(np.int32) - lowest_C.astype(np.int32)[:, None]
        far_CT = (place_CT < 0) | (place_CT >= _MAGNITUDES)
        place_CT += _MAGNITUDES * (sign_CT.astype(np.int32) ^ negative_C[part].astype(np.int32)[:, None])
        symbol_CT[part] = np.where(far_CT, FAR, place_CT)
    order_C, ends = _order(deviation_C, mean_C)
    symbol_CT = symbol_CT[order_C]
    coder = entropy.stack().AnsCoder()
    sign_X, top_X, _ = _apart(words_CT[order_C][symbol_CT == FAR], kind)
    if len(top_X):
        coder.encode_reverse(((sign_X << 15) + top_X).astype(np.int32), _uniform(16))
    for table in range(len(ends) - 2, -1, -1):  # what is coded last is decoded first
        part = symbol_CT[ends[table] : ends[table + 1]].ravel().astype(np.int32)
        if len(part):
            coder.encode_reverse(part, _table(table))
    if len(words_CT):
        coder.encode_reverse((2 * mean_C + negative_C).astype(np.int32), _means())
        coder.encode_reverse(np.diff(deviation_C, prepend=0).astype(np.int32) + REACH, _steps())
    packed = pack.pack_places(torch.from_numpy(rest_CT.ravel()), kind.mantissa - TOP)
    return entropy.framed(coder, packed.numpy().tobytes(), _stored(words_CT).tobytes())


def decode(stream_X: Tensor, tokens: int, widths: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """The numbers [tokens, C] of places of these widths. ArtifactError: the stream is not of these."""
    data, kind, count = stream_X.numpy().tobytes(), _KINDS[dtype], tokens * sum(widths)
    if len(data) < HEADER or data[0] > 1 or len(data) > most(count, dtype):
        raise ArtifactError(f"lossless: {len(data)} bytes are no stream of {count} numbers")
    if data[0]:
        words_CT = _decoded(data[HEADER:], tokens, sum(widths), kind)
    elif len(data) == HEADER + count * dtype.itemsize:
        words_CT = np.frombuffer(data[HEADER:], np.dtype(kind.word).newbyteorder("<")).astype(kind.word)
        words_CT = words_CT.reshape(sum(widths), tokens)
    else:
        raise ArtifactError(f"lossless: {len(data)} bytes are not {count} numbers as they are")
    if zlib.crc32(_stored(words_CT).data) != int.from_bytes(data[1:HEADER], "little"):
        raise ArtifactError("lossless: the numbers are others than were coded")
    parts = _signed(words_CT).split([*widths])
    return [part.mT.contiguous().view(dtype) for part in parts]


def _decoded(data: bytes, tokens: int, width: int, kind: _Kind) -> np.ndarray:
    rest = kind.mantissa - TOP
    size = pack.places_size(tokens * width, rest)
    if len(data) < size:
        raise ArtifactError(f"lossless: {len(data)} bytes are less than {size} of mantissas")
    coder = entropy.coder_of(data[size:], "lossless")
    deviation_C = (coder.decode(_steps(), width).astype(np.int64) - REACH).cumsum()
    mean_C, negative_C = np.divmod(coder.decode(_means(), width).astype(np.int64), 2)
    order_C, ends = _order(deviation_C, mean_C)
    symbol_CT, words_CT = np.empty((width, tokens), np.int16), np.empty((width, tokens), kind.word)
    for table, (begin, end) in enumerate(pairwise(ends.tolist())):
        if (end - begin) * tokens:
            symbol_CT[begin:end] = coder.decode(_table(table), (end - begin) * tokens).reshape(-1, tokens)
    count, begin = int((symbol_CT == FAR).sum()), 0
    far_X = coder.decode(_uniform(16), count).astype(np.int64) if count else np.empty(0, np.int64)
    if not coder.is_empty():
        raise ArtifactError("lossless: something is left after the last number")
    for part in _parts(width, tokens):
        own_C, part_CT = order_C[part], symbol_CT[part].astype(np.int64)
        negative_CT, place_CT = np.divmod(part_CT, _MAGNITUDES)
        top_CT = place_CT + ((deviation_C[own_C] // PER + kind.one - BELOW) << TOP)[:, None]
        sign_CT, far_CT = negative_CT ^ negative_C[own_C][:, None], part_CT == FAR
        end = begin + int(far_CT.sum())
        sign_CT[far_CT], top_CT[far_CT] = far_X[begin:end] >> 15, far_X[begin:end] & 0x7FFF
        words_CT[own_C] = ((sign_CT << (8 * words_CT.itemsize - 1)) + (top_CT << rest)).astype(kind.word)
        begin = end
    packed = torch.frombuffer(bytearray(data[:size]) or bytearray(1), dtype=torch.uint8)[:size]
    undo = pack.unpack if rest <= 8 else pack.unpack_places
    words_CT |= undo(packed, rest, tokens * width).numpy().astype(kind.word).reshape(width, tokens)
    return words_CT


def _parts(channels: int, tokens: int) -> Iterator[slice]:
    """Channels of about PART numbers, which are worked on at a time."""
    each = max(1, PART // max(1, tokens))
    return (slice(start, min(start + each, channels)) for start in range(0, channels, each))


def _signed(words_CT: np.ndarray) -> Tensor:
    return torch.from_numpy(words_CT.view(np.int16 if words_CT.itemsize == 2 else np.int32))


def _stored(words_CT: np.ndarray) -> np.ndarray:
    """Words as files have them, low bytes first on any machine."""
    return words_CT.astype(words_CT.dtype.newbyteorder("<"), copy=False)


def _words(x_TC: Tensor, kind: _Kind) -> np.ndarray:
    signed = x_TC.contiguous().view(torch.int16 if kind.word is np.uint16 else torch.int32)
    return np.ascontiguousarray(signed.numpy().view(kind.word).T)


def _apart(words_CT: np.ndarray, kind: _Kind) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Signs, exponents with TOP digits, and the other digits."""
    rest, high = kind.mantissa - TOP, 8 * np.dtype(kind.word).itemsize - 1
    return words_CT >> high, (words_CT & ((1 << high) - 1)) >> rest, words_CT & ((1 << rest) - 1)


def _channels(x_CT: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Deviations, as PER-ths of octaves, places among MEANS, and whether means are below 0: int64 [C] each."""
    tokens = x_CT.shape[1]
    if not tokens:
        x_CT, tokens = np.zeros((len(x_CT), 1)), 1
    places = [tokens // 6, tokens // 2, tokens - 1 - tokens // 6]  # a Gaussian's deviation below its middle, and above
    # numpy sorts rows of such a length in a twentieth of the time in which it parts them
    low_C, mean_C, high_C = np.sort(np.where(np.isfinite(x_CT), x_CT, 0), 1)[:, places].T.astype(np.float64)
    spread_C = np.maximum((high_C - low_C) / 2, np.maximum(np.abs(mean_C) / MEANS[-1], 2.0**-126))
    deviation_C = np.rint(PER * np.log2(spread_C)).astype(np.int64)
    over_C = np.abs(mean_C) / 2.0 ** (deviation_C / PER)
    return deviation_C, np.abs(over_C[:, None] - np.array(MEANS)).argmin(1), (mean_C < 0).astype(np.int64)


def _order(deviation_C: np.ndarray, mean_C: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Channels by table, and where those of each begin and end."""
    table_C = deviation_C % PER * len(MEANS) + np.minimum(mean_C, len(MEANS) - 1)
    counts = np.bincount(table_C, minlength=PER * len(MEANS))
    return np.argsort(table_C, kind="stable"), np.concatenate([[0], counts.cumsum()])


@lru_cache(maxsize=PER * len(MEANS))
def _table(number: int) -> Any:
    """Of tops of a channel of a deviation of 1 to 2, by the number of its table."""
    phase, mean = divmod(number, len(MEANS))
    deviation = 2.0 ** (phase / PER)
    centre = MEANS[mean] * deviation
    digits = 1 << TOP
    ends = [2.0 ** (place // digits - BELOW) * (1 + place % digits / digits) for place in range(_MAGNITUDES + 1)]
    ends[0] = 0.0

    def below(x: float) -> float:
        parts = [(1 - WEIGHT, deviation), (WEIGHT, WIDE * deviation)]
        return sum(weight * math.erf((x - centre) / (own * 2**0.5)) / 2 for weight, own in parts)

    masses = [below(high) - below(low) for low, high in pairwise(ends)]
    masses += [below(-low) - below(-high) for low, high in pairwise(ends)]
    return _model([*masses, 2.0**-12])


@lru_cache(maxsize=1)
def _steps() -> Any:
    return _model([0.85 ** abs(step - REACH) for step in range(2 * REACH + 1)])


@lru_cache(maxsize=1)
def _means() -> Any:
    return _model([0.5 ** (place // 2) for place in range(2 * len(MEANS))])


@lru_cache(maxsize=1)
def _uniform(bits: int) -> Any:
    return entropy.models().Uniform(1 << bits)


def _model(masses: Sequence[float]) -> Any:
    """Of symbols of these masses, as whole numbers of 2^-BITS, none of them 0."""
    whole = np.array(masses) / math.fsum(masses)
    counts = np.rint(whole * (2**BITS - 2 * len(whole))).astype(np.int64) + 1
    counts[counts.argmax()] += 2**BITS - counts.sum()
    return entropy.models().Categorical((counts / 2.0**BITS).astype(np.float32), perfect=False)
