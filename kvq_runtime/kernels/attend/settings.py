"""Compile-time settings of the attention kernel: its `tl.constexpr` arguments L, KS and VS, read by name (`S.BITS`).

NamedTuples, one class a reader: hashed and compared at every launch, as fast as tuples are. Every class of a reader of
per_token.py begins with the fields of TileSettings. Inside kernels:

    read fields alone: the source of a property is no part of the key under which Triton keeps compiled code
    in a `constexpr_function`, unpack them in order: Triton 3.6 hands it a plain tuple
    for a shape of tl.zeros, or a factor of a tuple, make constants of them first: Triton 3.6 takes no plain numbers
"""

from typing import NamedTuple

import triton
import triton.language as tl

from kvq_runtime.ops.fragment import Run, Words

# False in Triton's interpreter, which has no inline assembly; as `triton.jit`, decided when this is imported
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


class LayerSettings(NamedTuple):
    """L: the layer, and its tiles. What a step has of rows, queries and splits is known at run time alone.

    H       KV heads
    D       head size, in channels
    T       tokens of a block
    M       columns of the tile of queries
    N       tokens of a tile that is read per token
    SINKS   tokens at the start that are kept exactly
    PAGED   1: a block is a page of a serving engine's cache, and rows have as many as they have; see block_table.py
    CAP     bound of a score times log2 e, see `queries.capped`; 0: there is none
    """

    H: int
    D: int
    T: int
    M: int
    N: int
    SINKS: int
    PAGED: int = 0
    CAP: float = 0.0


class TileSettings(NamedTuple):
    """The settings of every reader, which are all that exact tokens need.

    A read gives a tile for each slot: a run of a head's channels, so that one stream of packed codes is one tile.

    SLOTS     tiles of a read
    COLUMNS   channels of a slot
    P         COLUMNS padded to a power of two, at least 16
    """

    SLOTS: int
    COLUMNS: int
    P: int


class RoundedSettings(NamedTuple):
    """Codes ordered as the tensor core reads them: rounded.py.

    BITS      of a code: 1, 2, 3, 4 or 8
    HAS_LOW   1: scale and low are stored; 0: symmetric, low follows from the scale
    GROUP     tokens with one scale, of keys per channel: 16 times a power of two, which divides T; else T
    GROUPS    parts of a head's channels with scales of their own, of what is rounded per token; else 1
    PAIRS     1: channel c is stored beside c + D / 2, which RoPE rotates it with
    TILES, SUBS, BYTES, WORDS, RUNS   as in `Order` of ops/fragment.py; runs for each table, one after another
    TABLES    for each element that a code stands for, the bits of a float16 for every stored code: fragment.py; ():
              codes are rounded evenly
    """

    BITS: int
    HAS_LOW: int
    GROUP: int
    GROUPS: int
    PAIRS: int
    TILES: int
    SUBS: int
    BYTES: int
    WORDS: tuple[Words, ...]
    RUNS: tuple[Run, ...]
    TABLES: tuple[tuple[int, ...], ...] = ()


class LevelSettings(NamedTuple):
    """One level of angles, packed in a run with its neighbours of equal bits, see ops/polar.py.

    BITS       of a code, 1 to 6
    RUN        byte of a head's codes at which the run begins
    COUNT      codes of the run
    FIRST      code of the run that is the level's first
    WORD       64-bit word of the lookup at which the level's points begin
    MIRRORED   1: the upper half of the codes are the lower one's, negative, and not stored
    """

    BITS: int
    RUN: int
    COUNT: int
    FIRST: int
    WORD: int = 0
    MIRRORED: int = 0


class PolarSettings(NamedTuple):
    """Angles and radii: read_polar.py.

    BYTES    of a head's codes
    LOG8     1: a radius is 8 bits beside a norm; 0: a float16
    LEVELS   of angles: the lowest first, which has a code for every two channels
    """

    SLOTS: int
    COLUMNS: int
    P: int
    BYTES: int
    LOG8: int
    LEVELS: tuple[LevelSettings, ...]


Settings = TileSettings | RoundedSettings | PolarSettings
