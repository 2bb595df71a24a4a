"""Split-K decode attention to calibrated latents, a basis a KV head, and the product of the queries that comes before.

A head's block is a row of slabs, 16 latents of 128 tokens each, by falling width. How many slabs there are of a width
is read on the device, so that all layers share one machine code: the loops over slabs are of the program, those over a
slab's tiles of tokens are unrolled. Latents come as points of unit variance (fragment.py); deviations, steps and bases
are in what they are multiplied with:

    scores   s_t = q · R_t μ + g_t Σ_r u_r c_rt     u = σ ∘ Dᵀ R_-τ q, for each segment of positions around τ: `project`
    values   y_r = Σ_t p_t g_t c_rt                 Σ p v = μ Σ p + D (σ ∘ y), which the merge does once: kernel.py

A program scores a block at a time, then multiplies its latents of values, slab after slab. Registers have no place that
is known at run time alone: a slab's sum is added to each of the sums of a head, but where it belongs times zero. Before
a block is read, the next one is fetched into the cache: loops over a few slabs would wait for memory each.

The state of M query rows, w = 2^(s - top):

    b_top    [M]       largest s_t + log2 g_t so far
    b_total  [16, M]   Σ w, by tokens of a tile
    b_sums   [16, M]   Σ w g c, a tuple: one of each slab that a head may have
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.attend import fragment, rope
from kvq_runtime.kernels.attend.arguments import CODES, COMPILED, SCALE, place_of
from kvq_runtime.kernels.attend.queries import capped, store_level

TILES = tl.constexpr(8)  # of a slab: 128 tokens
LINE = tl.constexpr(128)  # bytes of the cache's
PAGED_LENGTHS = tl.constexpr(4)


@triton.jit
def scan(
    q, q_exact, scale, p_rope, p_keys, p_values, p_key_latents, p_value_latents, i_first, i_last, i_b, i_h, start,
    part, L: tl.constexpr, SCORES: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr,
):  # fmt: skip
    """Loop over the blocks of a split, see kernel.py; `SCORES` is None."""
    M: tl.constexpr = L.M
    b_top = tl.full((M,), float("-inf"), tl.float32)
    b_total = tl.zeros((16, M), tl.float32)
    b_sums = (tl.zeros((16, M), tl.float32),) * tl.constexpr(L.D // 16)
    i_first = tl.maximum(i_first, start // L.T)
    keys, values = tl.load(p_key_latents.counts), tl.load(p_value_latents.counts)
    key_bytes, value_bytes = _bytes(keys, KS), _bytes(values, VS)
    if i_first < i_last:
        _prefetch(_codes_of(p_keys, key_bytes, i_first, i_b, i_h, L, KS), key_bytes)
        _prefetch(_codes_of(p_values, value_bytes, i_first, i_b, i_h, L, VS), value_bytes)
    for i_block in tl.range(i_first, i_last, disable_licm=True):
        following = tl.minimum(i_block + 1, i_last - 1)
        _prefetch(_codes_of(p_keys, key_bytes, following, i_b, i_h, L, KS), key_bytes)
        _prefetch(_codes_of(p_values, value_bytes, following, i_b, i_h, L, VS), value_bytes)
        p_codes = _codes_of(p_keys, key_bytes, i_block, i_b, i_h, L, KS)
        p_u = _projected(part, p_rope, p_key_latents, keys, i_block, L, KS)
        b_s = _scores(part, p_codes, keys, p_u, p_rope, L, KS)
        b_gains = _load_gains(p_keys, i_block, i_b, i_h, L, KS)
        b_value_gains = _load_gains(p_values, i_block, i_b, i_h, L, VS)
        b_seen = ()
        b_highest = tl.full((16, M), float("-inf"), tl.float32)
        for tile in tl.static_range(TILES):
            o_t = i_block * L.T + tile * 16 + tl.arange(0, 16)
            b_one = b_s[tile]
            if KS.GAIN > 0:
                b_one = b_one * tl.exp2(_gain(b_gains, p_key_latents, i_h, tile, KS))[:, None]
            b_one = capped(_add_mean(b_one, part, p_u, p_rope, p_key_latents, keys, i_block, tile, L, KS), L)
            b_one = tl.where((o_t >= start)[:, None], b_one, float("-inf"))
            b_seen = b_seen + (b_one,)
            if VS.GAIN > 0:
                b_one = b_one + _gain(b_value_gains, p_value_latents, i_h, tile, VS)[:, None]
            b_highest = tl.maximum(b_highest, b_one)
        b_level = tl.maximum(b_top, tl.max(b_highest, 0))
        b_base = tl.where(b_level == float("-inf"), 0.0, b_level)
        b_fade = tl.exp2(b_top - b_base)
        b_top = b_level
        b_total = b_total * b_fade[None, :]
        b_weights = ()
        for tile in tl.static_range(TILES):
            b_w = tl.exp2(b_seen[tile] - b_base[None, :])
            b_total += b_w
            if VS.GAIN > 0:
                b_w = b_w * tl.exp2(_gain(b_value_gains, p_value_latents, i_h, tile, VS))[:, None]
            b_weights = b_weights + (b_w.to(tl.float16),)
        p_codes = _codes_of(p_values, value_bytes, i_block, i_b, i_h, L, VS)
        b_sums = _add_values(b_sums, b_fade, b_weights, p_codes, values, L, VS)
    b_share, p_mean, m_m = store_level(b_top, b_total, part, L)
    for slab in tl.static_range(len(b_sums)):
        tl.store(p_mean + slab * 16 + tl.arange(0, 16)[:, None], b_sums[slab] * b_share, mask=m_m)


@triton.jit
def _count(counts, NUMBER: tl.constexpr):
    """Return a head's slabs of the NUMBER-th of WIDTHS; -1: all of them."""
    return ((counts >> (8 * NUMBER + 8)) & 255).to(tl.int32)


@triton.jit
def _bytes(counts, S: tl.constexpr):
    """Return the bytes of a head's codes of a block."""
    size = 0
    for number in tl.static_range(len(S.WIDTHS)):
        size += _count(counts, number) * S.WIDTHS[number].BYTES
    return size


@triton.jit
def _codes_of(p_table, size, i_block, i_b, i_h, L: tl.constexpr, S: tl.constexpr):
    """Return the address of a head's codes of a block, of `size` bytes."""
    address = place_of(p_table, i_block, i_b, CODES, S.FIELDS, L.H * size, L)
    return address.to(tl.pointer_type(tl.uint8)) + i_h * size


@triton.jit
def _prefetch(p_codes, size):
    """Fetch codes into the second cache; wait for nothing."""
    if COMPILED:
        for i in range(0, size, 32 * LINE):
            o_line = tl.minimum(i + tl.arange(0, 32) * LINE, size - 1)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [(p_codes + o_line).to(tl.int64)], dtype=tl.int32,
                is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def _wide(counts, p_rope, S: tl.constexpr):
    """Return the numbers that `project` has for a query and segment."""
    return _count(counts, -1) * 16 + (0 if p_rope is None else S.SEGMENT)


@triton.jit
def _projected(part, p_rope, p_latents, counts, i_block, L: tl.constexpr, S: tl.constexpr):
    """Return pointers to a slab of the projected queries of a block's first segment, float16 [M, 16]."""
    o_m = part.first + tl.arange(0, L.M)
    wide = _wide(counts, p_rope, S)
    segment = part.line * p_latents.segments + i_block * (L.T // S.SEGMENT)
    return p_latents.projected + segment * part.rows * wide + o_m[:, None] * wide + tl.arange(0, 16)[None, :]


@triton.jit
def _operand(p_slab, part, L: tl.constexpr):
    """Return a slab of projected queries as the product's operand, float16 [16, M]: see `project` for its order."""
    M: tl.constexpr = L.M
    m_m = (part.first + tl.arange(0, M) < part.rows)[:, None]
    b_one = tl.reshape(tl.load(p_slab, mask=m_m, other=0.0), (M, 4, 2, 2))
    return tl.reshape(tl.permute(b_one, (2, 1, 3, 0)), (16, M))


@triton.jit
def _scores(part, p_codes, counts, p_u, p_rope, L: tl.constexpr, S: tl.constexpr):
    """Return the block's scores over its gains and without the mean: float32 [16, M] of each tile."""
    M: tl.constexpr = L.M
    SEGMENTS: tl.constexpr = L.T // S.SEGMENT
    step = part.rows * _wide(counts, p_rope, S)
    b_s = (tl.zeros((16, M), tl.float32),) * TILES
    i_slab = 0
    for number in tl.static_range(len(S.WIDTHS)):
        count = _count(counts, number)
        for i in range(count):
            b_words = fragment.load_words(tl.multiple_of(p_codes + i * S.WIDTHS[number].BYTES, 16), S.WIDTHS[number])
            b_u = ()
            for segment in tl.static_range(SEGMENTS):
                b_u = b_u + (_operand(p_u + (segment * step + (i_slab + i) * 16), part, L),)
            b_more = ()
            for tile in tl.static_range(TILES):
                b_x = fragment.rows_of_tokens(fragment.point(b_words, tile, S.WIDTHS[number]), S.WIDTHS[number], 0)
                b_more = b_more + (tl.dot(b_x, b_u[tile * SEGMENTS // TILES], b_s[tile]),)
            b_s = b_more
        i_slab += count
        p_codes += count * S.WIDTHS[number].BYTES
    return b_s


@triton.jit
def _add_mean(
    b_s, part, p_u, p_rope, p_latents, counts, i_block, TILE: tl.constexpr, L: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Return a tile's scores [16, M] plus the mean's share, which `project` has written: q · R_τ μ of the segment, and
    of each of its tokens what is left. A product with 1 brings it to the scores' lanes."""
    SEGMENTS: tl.constexpr = L.T // S.SEGMENT
    if p_rope is not None:
        segment = TILE * SEGMENTS // TILES
        o_m = part.first + tl.arange(0, L.M)
        place = (part.line * p_latents.segments + i_block * SEGMENTS + segment) * part.rows
        b_base = tl.load(p_latents.base + place + o_m, mask=o_m < part.rows, other=0.0)
        o_rest = _count(counts, -1) * 16 + TILE * 16 % S.SEGMENT
        b_rest = _operand(p_u + (segment * part.rows * _wide(counts, p_rope, S) + o_rest), part, L)
        o_lane = tl.arange(0, 256)[None, :]  # as a tile of codes lies: 8 g, 4 t, 2 r, 2 w, 2 h
        same = o_lane // 32 + o_lane // 4 % 2 * 8 == o_lane // 8 % 4 * 2 + o_lane % 2 + o_lane // 2 % 2 * 8
        b_one = fragment.rows_of_tokens(tl.where(same, 1.0, 0.0).to(tl.float16), S.WIDTHS[0], 0)
        b_s = tl.dot(b_one, b_rest, b_s) + b_base[None, :]
    return b_s


@triton.jit
def _add_values(b_sums, b_fade, b_weights, p_codes, counts, L: tl.constexpr, S: tl.constexpr):
    """Return the sums, faded, with the block's latents times weights, float16 [16, M] of each tile."""
    M: tl.constexpr = L.M
    b_faded = ()
    for slab in tl.static_range(len(b_sums)):
        b_faded = b_faded + (b_sums[slab] * b_fade[None, :],)
    b_sums = b_faded
    i_slab = 0
    for number in tl.static_range(len(S.WIDTHS)):
        count = _count(counts, number)
        for i in range(count):
            b_words = fragment.load_words(tl.multiple_of(p_codes + i * S.WIDTHS[number].BYTES, 16), S.WIDTHS[number])
            b_sum = tl.zeros((16, M), tl.float32)
            for tile in tl.static_range(TILES):
                b_x = fragment.rows_of_channels(fragment.point(b_words, tile, S.WIDTHS[number]), S.WIDTHS[number], 0)
                b_sum = tl.dot(b_x, b_weights[tile], b_sum)
            b_more = ()
            for slab in tl.static_range(len(b_sums)):
                b_more = b_more + (b_sums[slab] + b_sum * tl.where(i_slab + i == slab, 1.0, 0.0),)
            b_sums = b_more
        i_slab += count
        p_codes += count * S.WIDTHS[number].BYTES
    return b_sums


@triton.jit
def _load_gains(p_table, i_block, i_b, i_h, L: tl.constexpr, S: tl.constexpr):
    """Return the bytes of a block's gains, in words that have those of a tile's tokens, int32 [16] each.

    () where there are none. They are packed along the tokens (ops/pack.py): a plane of w bits is w · 16 bytes. Not
    loaded as bytes: Triton would take the weights for numbers of eight bits, and reorder what they are multiplied with.
    """
    b_gains = ()
    if S.GAIN > 0:
        address = place_of(p_table, i_block, i_b, SCALE, S.FIELDS, L.H * 16 * S.GAIN, L)
        p_gain = address.to(tl.pointer_type(tl.int32)) + i_h * (4 * S.GAIN) + tl.arange(0, 16) // 4
        for number in tl.static_range(tl.constexpr(S.GAIN)):
            b_gains = b_gains + (tl.load(p_gain + number * 4) >> (tl.arange(0, 16) % 4 * 8),)
    return b_gains


@triton.jit
def _gain(b_gains, p_latents, i_h, TILE: tl.constexpr, S: tl.constexpr):
    """Return log2 of the gains of a tile's tokens, float32 [16]."""
    b_code = tl.zeros((16,), tl.int32)
    for plane in tl.static_range(4):
        b_code |= _plane(b_gains, TILE, 8 >> plane, S)
    p_ends = p_latents.gains + i_h * 2
    return tl.load(p_ends) + b_code.to(tl.float32) * tl.load(p_ends + 1)


@triton.jit
def _plane(b_gains, TILE: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr):
    """Return what a plane of WIDTH bits, if there is one, has of the codes of a tile's gains: int32 [16]."""
    UP: tl.constexpr = S.GAIN & (16 - 2 * WIDTH)  # wider planes come first, and have the lower bits
    b_bits = tl.zeros((16,), tl.int32)
    if (S.GAIN & WIDTH) != 0:
        b_bits = b_gains[UP + TILE % WIDTH] >> (TILE // WIDTH * WIDTH)
        b_bits = (b_bits & ((1 << WIDTH) - 1)) << UP
    return b_bits


@triton.jit(do_not_specialize=["rows"])
def project(
    p_q, scale, p_rope, p_latents, p_lengths, rows, L: tl.constexpr, S: tl.constexpr, K: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write u = σ ∘ Dᵀ R_-τ q, times `scale`, of all segments of the blocks: a program several tiles of COLUMNS.

    After a query's latents come the shares that a mean has in its scores of the segment's tokens t, q · (R_t - R_τ) μ;
    q · R_τ μ is float32: slow channels have large means, and turn little.

    p_q        queries [B, Hq, tokens, D]
    p_rope     RopePointers of `RopeTables.segments`
    p_latents  Latents of keys, S their settings
    p_lengths  as in `attend` of kernel.py
    rows       of queries, of each KV head; a column is one of a segment's
    K          half of the head, padded to a power of two

    Slabs lie in the order of the tensor core's operand B, 4 t, 2 w, 2 h: latent 2 t + h + 8 w.
    """
    i_bh = tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // L.H, i_bh % L.H
    if L.PAGED == 1:
        p_lengths += i_b * PAGED_LENGTHS
    columns = tl.load(p_lengths) * (L.T // S.SEGMENT) * rows
    counts = tl.load(p_latents.counts)
    latents, wide = _count(counts, -1) * 16, _wide(counts, p_rope.mean, S)
    HALF: tl.constexpr = L.D // 2
    o_k, o_i = tl.arange(0, K), tl.arange(0, 16)
    m_k = o_k < HALF
    o_place = o_i % 8 // 2 * 4 + o_i // 8 * 2 + o_i % 2
    for first in range(tl.program_id(0) * COLUMNS, columns, tl.num_programs(0) * COLUMNS):
        o_n = first + tl.arange(0, COLUMNS)
        o_segment, o_row, m_n = o_n // rows, o_n % rows, o_n < columns
        m = m_k[:, None] & m_n[None, :]
        p = p_q + (i_bh * rows + o_row)[None, :] * L.D + o_k[:, None]
        b_left = tl.load(p, mask=m, other=0.0).to(tl.float32) * scale
        b_right = tl.load(p + HALF, mask=m, other=0.0).to(tl.float32) * scale
        b_left, b_right = rope.to_row(b_left, b_right, o_k, p_rope, i_b, HALF)
        p_angles = p_rope.bases + o_segment[None, :] * L.D + o_k[:, None]
        b_cos, b_sin = tl.load(p_angles, mask=m, other=1.0), tl.load(p_angles + HALF, mask=m, other=0.0)
        b_left, b_right = b_left * b_cos + b_right * b_sin, b_right * b_cos - b_left * b_sin
        b_q1, b_q2 = b_left.to(tl.float16), b_right.to(tl.float16)
        o_column = (i_bh * p_latents.segments + o_segment) * rows + o_row
        p_u = p_latents.projected + o_column[None, :] * wide + o_place[:, None]
        for i in range(0, latents, 16):
            p_basis = p_latents.basis + (i_h * latents + i + o_i)[:, None] * L.D + o_k[None, :]
            b_u = tl.dot(tl.load(p_basis, mask=m_k[None, :], other=0.0), b_q1)
            b_u = tl.dot(tl.load(p_basis + HALF, mask=m_k[None, :], other=0.0), b_q2, b_u)
            tl.store(p_u + i, b_u.to(tl.float16), mask=m_n[None, :])
        if p_rope.mean is not None:
            b_mean1 = tl.load(p_rope.mean + i_h * L.D + o_k, mask=m_k, other=0.0)
            b_mean2 = tl.load(p_rope.mean + i_h * L.D + HALF + o_k, mask=m_k, other=0.0)
            b_base = tl.sum(b_left * b_mean1[:, None] + b_right * b_mean2[:, None], 0)
            tl.store(p_latents.base + o_column, b_base, mask=m_n)
            for i in range(0, S.SEGMENT, 16):
                p_inside = p_rope.block + (i + o_i)[:, None] * L.D + o_k[None, :]
                b_less = tl.load(p_inside, mask=m_k[None, :], other=0.0)
                b_turn = tl.load(p_inside + HALF, mask=m_k[None, :], other=0.0)
                b_u = tl.dot((b_mean1[None, :] * b_less - b_mean2[None, :] * b_turn).to(tl.float16), b_q1)
                b_u = tl.dot((b_mean2[None, :] * b_less + b_mean1[None, :] * b_turn).to(tl.float16), b_q2, b_u)
                tl.store(p_u + latents + i, b_u.to(tl.float16), mask=m_n[None, :])
