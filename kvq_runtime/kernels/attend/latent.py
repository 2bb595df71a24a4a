"""Split-K decode attention to calibrated latents, a basis a KV head, and the product of the queries that comes before.

A head's block is a row of slabs, 16 latents of 128 tokens each, by falling width. How many slabs there are of a width
is read on the device, so that all layers share one machine code: the loops over slabs are of the program, those over a
slab's tiles of tokens are unrolled. Latents come as points of unit variance (fragment.py); deviations, steps and bases
are in what they are multiplied with:

    scores   s_t = q · R_t μ + g_t Σ_r u_r c_rt     u = σ ∘ Dᵀ R_-τ q, for each segment of positions around τ: `project`
    values   y_r = Σ_t p_t g_t c_rt                 Σ p v = μ Σ p + D (σ ∘ y), which the merge does once: kernel.py

A program scores a block at a time, then multiplies its latents of values, slab after slab, and adds them to its part of
the results, where they lie in memory: registers take no place that is known at run time. What a block adds is as many
bytes for 128 tokens as a part has at all, and stays in the cache. Before a block is read, the next one is fetched
into the cache: loops over a few slabs would wait for memory each.

The state of M query rows, w = 2^(s - top):

    b_top    [M]       largest s_t + log2 g_t so far
    b_total  [16, M]   Σ w, by tokens of a tile
    mean     [R, M]    Σ w g c, in memory
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
    """The loop over the blocks of a split, see kernel.py; `SCORES` is None."""
    M: tl.constexpr = L.M
    o_m = part.first + tl.arange(0, M)
    m_m = (o_m < part.rows)[None, :]
    p_mean = part.mean + ((part.line * part.parts + part.number) * part.rows + o_m)[None, :] * L.D
    for i in range(0, L.D, 16):
        tl.store(p_mean + i + tl.arange(0, 16)[:, None], tl.zeros((16, M), tl.float32), mask=m_m)
    b_top = tl.full((M,), float("-inf"), tl.float32)
    b_total = tl.zeros((16, M), tl.float32)
    i_first = tl.maximum(i_first, start // L.T)
    if i_first < i_last:
        _prefetch(p_keys, p_key_latents, i_first, i_b, i_h, L, KS)
        _prefetch(p_values, p_value_latents, i_first, i_b, i_h, L, VS)
    for i_block in tl.range(i_first, i_last, disable_licm=True):
        following = tl.minimum(i_block + 1, i_last - 1)
        _prefetch(p_keys, p_key_latents, following, i_b, i_h, L, KS)
        _prefetch(p_values, p_value_latents, following, i_b, i_h, L, VS)
        b_s = _scores(part, p_keys, p_key_latents, i_block, i_b, i_h, L, KS)
        b_gains = _load_gains(p_keys, i_block, i_b, i_h, L, KS)
        b_value_gains = _load_gains(p_values, i_block, i_b, i_h, L, VS)
        b_mean = rope.mean_of_block(q_exact, scale, p_rope, i_b, i_h, i_block, L)
        b_seen = ()
        b_highest = tl.full((16, M), float("-inf"), tl.float32)
        for tile in tl.static_range(TILES):
            o_t = i_block * L.T + tile * 16 + tl.arange(0, 16)
            b_one = b_s[tile]
            if KS.GAIN > 0:
                b_one = b_one * tl.exp2(_gain(b_gains, p_key_latents, i_h, tile, KS))[:, None]
            b_one = capped(rope.add_mean(b_one, b_mean, p_rope, tile, i_block, L), L)
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
        b_sum = tl.sum(b_total, 0)
        b_share = tl.where((i_block == i_last - 1) & (b_sum > 0), 1 / tl.where(b_sum > 0, b_sum, 1.0), 1.0)
        tl.debug_barrier()  # what the block before has written is read
        _add_values(
            p_mean, m_m, b_weights, b_fade, b_share, p_values, p_value_latents, i_block, i_b, i_h, L, VS,
        )  # fmt: skip
    store_level(b_top, b_total, part, L)


@triton.jit
def _codes_of(p_table, p_latents, i_block, i_b, i_h, L: tl.constexpr, S: tl.constexpr):
    """Return the address of a head's codes of a block, and their bytes."""
    size = 0
    for number in tl.static_range(len(S.WIDTHS)):
        size += tl.load(p_latents.counts + 1 + number) * S.WIDTHS[number].BYTES
    address = place_of(p_table, i_block, i_b, CODES, S.FIELDS, L.H * size, L)
    return address.to(tl.pointer_type(tl.uint8)) + i_h * size, size


@triton.jit
def _prefetch(p_table, p_latents, i_block, i_b, i_h, L: tl.constexpr, S: tl.constexpr):
    """Fetch a head's codes of a block into the second cache; wait for nothing."""
    if COMPILED:
        p_codes, size = _codes_of(p_table, p_latents, i_block, i_b, i_h, L, S)
        for i in range(0, size, 32 * LINE):
            o_line = tl.minimum(i + tl.arange(0, 32) * LINE, size - 1)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [(p_codes + o_line).to(tl.int64)], dtype=tl.int32,
                is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def _scores(part, p_keys, p_latents, i_block, i_b, i_h, L: tl.constexpr, S: tl.constexpr):
    """Return the block's scores over its gains and without the mean: float32 [16, M] of each tile."""
    M: tl.constexpr = L.M
    SEGMENTS: tl.constexpr = L.T // S.SEGMENT
    p_codes = _codes_of(p_keys, p_latents, i_block, i_b, i_h, L, S)[0]
    slabs = tl.load(p_latents.counts)
    o_m = part.first + tl.arange(0, M)
    p_segment = p_latents.projected + (part.line * p_latents.segments + i_block * SEGMENTS) * slabs * 16 * part.rows
    p_u = p_segment + o_m[:, None] * (slabs * 16) + tl.arange(0, 16)[None, :]
    m_m = (o_m < part.rows)[:, None]
    b_s = (tl.zeros((16, M), tl.float32),) * TILES
    i_slab = 0
    for number in tl.static_range(len(S.WIDTHS)):
        count = tl.load(p_latents.counts + 1 + number)
        for i in range(count):
            b_words = fragment.load_words(tl.multiple_of(p_codes + i * S.WIDTHS[number].BYTES, 16), S.WIDTHS[number])
            b_u = ()
            for segment in tl.static_range(SEGMENTS):
                p = p_u + (segment * part.rows * slabs + i_slab + i) * 16
                b_one = tl.reshape(tl.load(p, mask=m_m, other=0.0), (M, 4, 2, 2))
                b_u = b_u + (tl.reshape(tl.permute(b_one, (2, 1, 3, 0)), (16, M)),)
            b_more = ()
            for tile in tl.static_range(TILES):
                b_x = fragment.rows_of_tokens(fragment.point(b_words, tile, S.WIDTHS[number]), S.WIDTHS[number], 0)
                b_more = b_more + (tl.dot(b_x, b_u[tile * SEGMENTS // TILES], b_s[tile]),)
            b_s = b_more
        i_slab += count
        p_codes += count * S.WIDTHS[number].BYTES
    return b_s


@triton.jit
def _add_values(
    p_mean, m_m, b_weights, b_fade, b_share, p_values, p_latents, i_block, i_b, i_h, L: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Fade the means in memory, add the block's latents times weights, float16 [16, M] of each tile, and scale them."""
    M: tl.constexpr = L.M
    p_codes = _codes_of(p_values, p_latents, i_block, i_b, i_h, L, S)[0]
    p_place = p_mean + tl.arange(0, 16)[:, None]
    for number in tl.static_range(len(S.WIDTHS)):
        count = tl.load(p_latents.counts + 1 + number)
        for i in range(count):
            b_words = fragment.load_words(tl.multiple_of(p_codes + i * S.WIDTHS[number].BYTES, 16), S.WIDTHS[number])
            b_before = tl.load(p_place + i * 16, mask=m_m, other=0.0)
            b_sum = tl.zeros((16, M), tl.float32)
            for tile in tl.static_range(TILES):
                b_x = fragment.rows_of_channels(fragment.point(b_words, tile, S.WIDTHS[number]), S.WIDTHS[number], 0)
                b_sum = tl.dot(b_x, b_weights[tile], b_sum)
            tl.store(p_place + i * 16, (b_before * b_fade[None, :] + b_sum) * b_share[None, :], mask=m_m)
        p_place += count * 16
        p_codes += count * S.WIDTHS[number].BYTES


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
    p_q, scale, p_rope, p_latents, p_lengths, rows, L: tl.constexpr, SEGMENT: tl.constexpr, K: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write u = σ ∘ Dᵀ R_-τ q, times `scale`, of all segments of the blocks: a program several tiles of COLUMNS.

    p_q        queries [B, Hq, tokens, D]
    p_rope     RopePointers of segments: `RopeTables.segments`
    p_latents  Latents of keys
    p_lengths  as in `attend` of kernel.py
    rows       of queries, of each KV head; a column is one of a segment's
    K          half of the head, padded to a power of two

    Latents of a slab lie in the order of the tensor core's operand B, 4 t, 2 w, 2 h: latent 2 t + h + 8 w.
    """
    i_bh = tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // L.H, i_bh % L.H
    if L.PAGED == 1:
        p_lengths += i_b * PAGED_LENGTHS
    columns = tl.load(p_lengths) * (L.T // SEGMENT) * rows
    latents = tl.load(p_latents.counts) * 16
    HALF: tl.constexpr = L.D // 2
    o_k = tl.arange(0, K)
    m_k = o_k < HALF
    for first in range(tl.program_id(0) * COLUMNS, columns, tl.num_programs(0) * COLUMNS):
        o_n = first + tl.arange(0, COLUMNS)
        o_segment, o_row, m_n = o_n // rows, o_n % rows, o_n < columns
        m = m_k[:, None] & m_n[None, :]
        p = p_q + (i_bh * rows + o_row)[None, :] * L.D + o_k[:, None]
        b_left = tl.load(p, mask=m, other=0.0).to(tl.float32) * scale
        b_right = tl.load(p + HALF, mask=m, other=0.0).to(tl.float32) * scale
        b_left, b_right = rope.to_row(b_left, b_right, o_k, p_rope, i_b, HALF)
        p_angles = p_rope.bases + o_segment[None, :] * (2 * HALF) + o_k[:, None]
        b_cos, b_sin = tl.load(p_angles, mask=m, other=1.0), tl.load(p_angles + HALF, mask=m, other=0.0)
        b_back = (b_left * b_cos + b_right * b_sin).to(tl.float16)
        b_next = (b_right * b_cos - b_left * b_sin).to(tl.float16)
        for i in range(0, latents, 16):
            o_r = i + tl.arange(0, 16)
            o_place = i + o_r % 8 // 2 * 4 + o_r % 16 // 8 * 2 + o_r % 2  # a lane's four of the operand, side by side
            p_basis = p_latents.basis + (i_h * latents + o_r)[:, None] * L.D + o_k[None, :]
            b_u = tl.dot(tl.load(p_basis, mask=m_k[None, :], other=0.0), b_back)
            b_u = tl.dot(tl.load(p_basis + HALF, mask=m_k[None, :], other=0.0), b_next, b_u)
            o_u = ((i_bh * p_latents.segments + o_segment) * rows + o_row)[None, :] * latents + o_place[:, None]
            tl.store(p_latents.projected + o_u, b_u.to(tl.float16), mask=m_n[None, :])
