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
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from kvq_runtime.errors import ArtifactError
from kvq_runtime.ops import ladder

HEADER = 5  # bytes
OFF = 16  # how many rungs a token may be off
BELOW = 6  # as many of these are below 0
SPREAD = 2.5  # of their bell
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
    flat_X = _flat(codes)
    off = [off_of(one, own) for one, own in zip(codes, rungs, strict=True)]
    offs = np.concatenate([one.numpy() for one in off]).astype(np.int32)
    order, ends = _sorted(off, rungs)
    symbols_X = (flat_X.astype(np.int32) + ladder.MOST)[order]
    coder = stack().AnsCoder()
    for rung in range(ladder.RUNGS - 1, -1, -1):  # what is coded last is decoded first
        part = symbols_X[ends[rung] : ends[rung + 1]]
        if len(part):
            coder.encode_reverse(part, _model(rung))
    if len(offs):
        coder.encode_reverse(offs, _bell())
    words = coder.get_compressed()
    if sys.byteorder == "big":
        words = words.byteswap()
    coded = words.tobytes()
    kind, data = (1, coded) if len(coded) < len(flat_X) else (0, flat_X.tobytes())
    head = bytes([kind]) + zlib.crc32(flat_X.tobytes()).to_bytes(4, "little")
    return torch.frombuffer(bytearray(head + data), dtype=torch.uint8)


def decode(stream_X: Tensor, shapes: Sequence[tuple[int, int]], rungs: Sequence[Tensor]) -> list[Tensor]:
    """The codes of places of these shapes. ArtifactError: the stream is not of these."""
    data = stream_X.numpy().tobytes()
    count = sum(rows * width for rows, width in shapes)
    if len(data) < HEADER or data[0] > 1 or len(data) > most(count):
        raise ArtifactError(f"coded: {len(data)} bytes are no stream of {count} codes")
    flat_X = _decoded(data[HEADER:], shapes, rungs) if data[0] else np.frombuffer(data[HEADER:], np.int8)
    if len(flat_X) != count or zlib.crc32(flat_X.tobytes()) != int.from_bytes(data[1:HEADER], "little"):
        raise ArtifactError("coded: the codes are others than were coded; the artifact or the file is another")
    parts = torch.from_numpy(flat_X.copy()).split([rows * width for rows, width in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _decoded(data: bytes, shapes: Sequence[tuple[int, int]], rungs: Sequence[Tensor]) -> np.ndarray:
    if len(data) % 4:
        raise ArtifactError(f"coded: {len(data)} bytes are no words")
    try:
        coder = stack().AnsCoder(np.frombuffer(data, "<u4").astype(np.uint32))
    except ValueError as error:
        raise ArtifactError(f"coded: {error}") from None
    offs = torch.from_numpy(coder.decode(_bell(), sum(rows for rows, _ in shapes)).astype(np.int64))
    order, ends = _sorted(offs.split([rows for rows, _ in shapes]), rungs)
    flat_X = np.empty(len(order), np.int8)
    for rung in range(ladder.RUNGS):
        part = order[ends[rung] : ends[rung + 1]]
        if len(part):
            flat_X[part] = coder.decode(_model(rung), len(part)) - ladder.MOST
    if not coder.is_empty():
        raise ArtifactError("coded: something is left after the last code")
    return flat_X


def off_of(codes_TR: Tensor, rung_R: Tensor) -> Tensor:
    """Rungs, from BELOW below, that a token's codes are off their channels' for the fewest bits: int64 [T]."""
    place_TR = rung_R.long() * _WIDTH + codes_TR.long() + ladder.MOST
    begin_T = place_TR.shape[1] * torch.arange(len(place_TR), device=codes_TR.device)
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


def _flat(codes: Sequence[Tensor]) -> np.ndarray:
    return torch.cat([one.flatten() for one in codes]).numpy() if codes else np.empty(0, np.int8)


def _sorted(off: Sequence[Tensor], rungs: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Places of codes, by rung, and where each rung's begin and end among them."""
    parts = []
    for off_T, rung_R in zip(off, rungs, strict=True):
        rung_TR = rung_R.long() + (off_T[:, None] - BELOW)
        parts.append(rung_TR.clamp(0, ladder.RUNGS - 1).to(torch.uint8).flatten())
    rung_X = torch.cat(parts).numpy() if parts else np.empty(0, np.uint8)
    counts = np.bincount(rung_X, minlength=ladder.RUNGS)
    return np.argsort(rung_X, kind="stable"), np.concatenate([[0], counts.cumsum()])


@lru_cache(maxsize=ladder.RUNGS)
def _model(rung: int) -> Any:
    counts = ladder.ladder().counts[rung].numpy()
    return models().Categorical((counts / 2.0**ladder.BITS).astype(np.float32), perfect=False)


def _weights() -> np.ndarray:
    return np.exp(-(((np.arange(OFF) - BELOW) / SPREAD) ** 2) / 2) + 1e-3


@lru_cache(maxsize=1)
def _bell() -> Any:
    weights = np.round(_weights() / _weights().sum() * 2**16) / 2**16
    return models().Categorical(weights.astype(np.float32), perfect=False)


@lru_cache(maxsize=1)
def _lengths_off() -> Tensor:
    """Bits of a code of a rung in a token that is so many rungs off, float32 [rungs · codes, OFF]."""
    rung_KO = (torch.arange(ladder.RUNGS)[:, None] + torch.arange(OFF) - BELOW).clamp(0, ladder.RUNGS - 1)
    return ladder.ladder().lengths[rung_KO].transpose(1, 2).flatten(0, 1).contiguous()


@lru_cache(maxsize=1)
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
