"""Split-K decode attention to keys and values in the order of the operand: a sub-block of up to 128 tokens at a time,
as many of keys as make one of values, or the other way round.

All that multiplies single codes are the tensor cores: codes come as x = 1 + code / weight (fragment.py), steps scale
the query or the scores, and the weights of the softmax; the ones are taken off sums, low ends are added to them.

    keys, a scale a channel   s_t = Σ_c q_c (step_c code_tc + low_c) = weight (Σ k_c x_tc - Σ k_c) + Σ q_c low_c,
                              k = q step
    keys, a scale a token     s_t = step_t weight (Σ q_c x_tc - Σ q_c) + low_t Σ q_c
    values, a scale a token   Σ_t w_t (step_t code_tc + low_t) = Σ u_t x_tc + Σ (w_t low_t - u_t),  u = w step weight

Channels or tokens that share a scale are a group; sums are by group. What the tensor cores take, k and u, is rounded to
float16 before the ones are counted, so that they leave exactly. Codes that have tables (fragment.py) are what they
stand for: x without ones, weight or low end, per token.

The state of M query rows, w = 2^(s - top):

    b_top    [M]        largest s so far, plus log2 of the largest step beside it, rounded up: w · step is at most 1
    b_total  [16, M]    Σ w, by tokens of a tile
    b_rest   [16, M]    Σ w low - u, in parts, a tuple: one of each group of channels and weight of their codes; none
                        where codes have tables
    b_sums   [16 I, M]  Σ u x, a tuple: one of each run
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.attend import fragment, rope
from kvq_runtime.kernels.attend.arguments import CODES, LOW, SCALE, field_of
from kvq_runtime.kernels.attend.queries import capped, exponent, load_query, store_level


@triton.jit
def scan(
    q, q_exact, scale, p_rope, p_keys, p_values, p_key_lookup, p_value_lookup, i_first, i_last, i_b, i_h, start,
    part, L: tl.constexpr, SCORES: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr,
):  # fmt: skip
    """The loop over the blocks of a split, see kernel.py. SCORES is a function of this file, which scores keys."""
    M: tl.constexpr = L.M
    TILES: tl.constexpr = max(KS.TILES, VS.TILES)  # of a turn: whole sub-blocks of both
    SUBS: tl.constexpr = L.T // (16 * TILES)
    KEYS: tl.constexpr = TILES // KS.TILES
    VALUES: tl.constexpr = TILES // VS.TILES
    b_q = ()
    for run in tl.static_range(len(KS.RUNS)):
        o_d = fragment.channels(KS, run)
        b_q = b_q + (load_query(q, scale, i_b * L.H + i_h, o_d, o_d < L.D, L).to(tl.float16),)
    b_top = tl.full((M,), float("-inf"), tl.float32)
    b_total = tl.zeros((16, M), tl.float32)
    b_rest = ()
    b_sums = ()
    for run in tl.static_range(len(VS.RUNS)):
        b_sums = b_sums + (fragment.no_sums(VS, run, M),)
        if len(VS.TABLES) == 0 and _rest(VS.RUNS, run) == len(b_rest):
            b_rest = b_rest + (b_total,)
    i_first = tl.maximum(i_first, start // L.T)
    for i in tl.range(i_first * SUBS, i_last * SUBS, disable_licm=True):
        i_block, i_sub = i // SUBS, i & (SUBS - 1)
        p_k = field_of(p_keys, i_block, i_b, CODES, KS.FIELDS, L.H * KS.SUBS * KS.BYTES, tl.uint8, L)
        p_v = field_of(p_values, i_block, i_b, CODES, VS.FIELDS, L.H * VS.SUBS * VS.BYTES, tl.uint8, L)
        b_k = ()
        for sub in tl.static_range(KEYS):
            b_k = b_k + (fragment.load_words(p_k + (i_h * KS.SUBS + i_sub * KEYS + sub) * KS.BYTES, KS),)
        b_mean = rope.mean_of_block(q_exact, scale, p_rope, i_b, i_h, i_block, L)
        b_s = ()
        for sub in tl.static_range(KEYS):
            b_s = b_s + SCORES(b_q, b_k[sub], p_keys, i_block, i_sub * KEYS + sub, i_b, i_h, L, KS)
        b_v = ()
        for sub in tl.static_range(VALUES):
            b_v = b_v + (fragment.load_words(p_v + (i_h * VS.SUBS + i_sub * VALUES + sub) * VS.BYTES, VS),)
        b_steps, b_lows = _numbers(p_values, i_block, i_sub, i_b, i_h, L, VS, TILES)
        b_seen = ()
        b_highest = tl.full((16, M), float("-inf"), tl.float32)
        b_widest = b_steps[0]
        for tile in tl.static_range(TILES):
            o_t = (i_sub * TILES + tile) * 16 + tl.arange(0, 16)
            b_one = capped(rope.add_mean(b_s[tile], b_mean, p_rope, i_sub * TILES + tile, i_block, L), L)
            b_one = tl.where((i_block * L.T + o_t >= start)[:, None], b_one, float("-inf"))
            b_highest = tl.maximum(b_highest, b_one)
            b_seen = b_seen + (b_one,)
        for number in tl.static_range(tl.constexpr(VS.GROUPS) * TILES):
            b_widest = tl.maximum(b_widest, b_steps[number])
        b_level = tl.maximum(b_top, tl.max(b_highest, 0) + exponent(tl.max(b_widest.to(tl.float32), 0)))
        b_base = tl.where(b_level == float("-inf"), 0.0, b_level)
        b_fade = tl.exp2(b_top - b_base)
        b_top = b_level
        b_total = b_total * b_fade[None, :]
        b_rest = _faded(b_rest, b_fade)
        b_sums = _faded(b_sums, b_fade)
        for tile in tl.static_range(TILES):
            b_w = tl.exp2(b_seen[tile] - b_base[None, :])
            b_total += b_w
            b_left = ()
            b_more = ()
            for run in tl.static_range(len(VS.RUNS)):
                b_step = b_steps[VS.RUNS[run].GROUP * TILES + tile].to(tl.float32)
                if len(VS.TABLES) > 0:
                    b_u = (b_w * b_step[:, None]).to(tl.float16)
                else:
                    weight = fragment.weight(VS.RUNS[run].PLANES, tile % VS.TILES)
                    b_low = b_lows[VS.RUNS[run].GROUP * TILES + tile].to(tl.float32)
                    b_u = (b_w * (b_step * weight)[:, None]).to(tl.float16)
                    if _rest(VS.RUNS, run) == len(b_left):
                        b_one = tl.dot(tl.full((16, 16), -1 / 16, tl.float16), b_u, b_rest[len(b_left)])
                        b_left = b_left + (b_one + b_w * b_low[:, None],)  # b_one: in each of 16 rows
                b_x = fragment.rows_of_channels(
                    fragment.operand(b_v[tile // VS.TILES], tile % VS.TILES, VS, run), VS, run
                )
                b_more = b_more + (tl.dot(b_x, b_u, b_sums[run]),)
            b_rest = b_left
            b_sums = b_more
    _store((b_top, b_total, b_rest, b_sums), part, L, VS)


@triton.constexpr_function
def _rest(runs, number):
    """Return the index in b_rest that a run shares with earlier ones of the same scales and weight."""
    kinds = []
    for _, _, _, group, planes in runs[: number + 1]:
        width, up, _, slot = planes[0]
        if (group, width, up, slot) not in kinds:
            kinds.append((group, width, up, slot))
        last = kinds.index((group, width, up, slot))
    return last


@triton.jit
def per_channel(b_q, b_k, p_keys, i_block, i_sub, i_b, i_h, L: tl.constexpr, S: tl.constexpr):
    """Return scores of a sub-block's tiles, float32 [16, M] each: keys with a scale a channel and group of tokens."""
    M: tl.constexpr = L.M
    NUMBERS: tl.constexpr = L.H * L.D * (L.T // S.GROUP) * 2
    TOGETHER: tl.constexpr = min(S.GROUP // 16, S.TILES)
    p_step = field_of(p_keys, i_block, i_b, SCALE, S.FIELDS, NUMBERS, tl.float16, L)
    p_low = field_of(p_keys, i_block, i_b, LOW, S.FIELDS, NUMBERS, tl.float16, L)
    b_steps = ()
    b_lows = ()
    for first in tl.static_range(0, tl.constexpr(S.TILES), TOGETHER):  # at once: none waits for another
        o_group = (i_h * (L.T // S.GROUP) + (i_sub * S.TILES + first) * 16 // S.GROUP) * L.D
        for run in tl.static_range(len(S.RUNS)):
            o_d = fragment.channels(S, run)
            b_steps = b_steps + (tl.load(p_step + o_group + o_d),)
            b_lows = b_lows + (tl.load(p_low + o_group + o_d),)
    b_s = ()
    for first in tl.static_range(0, tl.constexpr(S.TILES), TOGETHER):
        b_scaled = ()
        b_ones = ()
        b_base = tl.zeros((16, M), tl.float32)
        for run in tl.static_range(len(S.RUNS)):
            b_low = b_lows[first // TOGETHER * len(S.RUNS) + run]
            b_times = b_q[run] * b_steps[first // TOGETHER * len(S.RUNS) + run][:, None]
            b_scaled = b_scaled + (b_times,)
            b_ones = b_ones + (tl.dot(fragment.ones(S, run), b_times),)
            b_base = tl.dot(fragment.ones(S, run), b_q[run] * b_low[:, None], b_base)
        for tile in tl.static_range(TOGETHER):
            b_one = b_base
            for run in tl.static_range(len(S.RUNS)):
                weight = fragment.weight(S.RUNS[run].PLANES, first + tile)
                b_one -= b_ones[run] * weight
            for run in tl.static_range(len(S.RUNS)):
                weight = fragment.weight(S.RUNS[run].PLANES, first + tile)
                b_x = fragment.operand(b_k, first + tile, S, run)
                b_one += tl.dot(fragment.rows_of_tokens(b_x, S, run), b_scaled[run]) * weight
            b_s = b_s + (b_one,)
    return b_s


@triton.jit
def per_token(b_q, b_k, p_keys, i_block, i_sub, i_b, i_h, L: tl.constexpr, S: tl.constexpr):
    """Return scores of a sub-block's tiles, float32 [16, M] each: keys with a scale a token and group of channels."""
    M: tl.constexpr = L.M
    b_steps, b_lows = _numbers(p_keys, i_block, i_sub, i_b, i_h, L, S, S.TILES)
    b_ones = ()
    b_whole = (tl.zeros((M,), tl.float32),) * tl.constexpr(S.GROUPS)
    for run in tl.static_range(len(S.RUNS)):
        b_ones = b_ones + (tl.sum(b_q[run].to(tl.float32), 0),)
        b_whole = _added(b_whole, S.RUNS[run].GROUP, b_ones[run])
    b_s = ()
    for tile in tl.static_range(tl.constexpr(S.TILES)):
        b_parts = (tl.zeros((16, M), tl.float32),) * tl.constexpr(S.GROUPS)
        for run in tl.static_range(len(S.RUNS)):
            b_x = fragment.operand(b_k, tile, S, run)
            b_one = tl.dot(fragment.rows_of_tokens(b_x, S, run), b_q[run])
            if len(S.TABLES) == 0:
                b_one = (b_one - b_ones[run][None, :]) * fragment.weight(S.RUNS[run].PLANES, tile)
            b_parts = _added(b_parts, S.RUNS[run].GROUP, b_one)
        b_sum = tl.zeros((16, M), tl.float32)
        for group in tl.static_range(tl.constexpr(S.GROUPS)):
            b_step = b_steps[group * S.TILES + tile].to(tl.float32)
            b_sum += b_parts[group] * b_step[:, None]
            if len(S.TABLES) == 0:
                b_sum += b_lows[group * S.TILES + tile].to(tl.float32)[:, None] * b_whole[group][None, :]
        b_s = b_s + (b_sum,)
    return b_s


@triton.jit
def _numbers(p_table, i_block, i_sub, i_b, i_h, L: tl.constexpr, S: tl.constexpr, TILES: tl.constexpr):
    """Return steps and lows of the tokens of TILES tiles, the i_sub-th group of them: float16 [16], by group and tile.

    No lows where codes have tables.
    """
    NUMBERS: tl.constexpr = L.H * S.GROUPS * L.T * 2
    o_t = i_h * S.GROUPS * L.T + i_sub * (16 * TILES) + tl.arange(0, 16)
    p_step = field_of(p_table, i_block, i_b, SCALE, S.FIELDS, NUMBERS, tl.float16, L) + o_t
    b_steps = ()
    b_lows = ()
    for number in tl.static_range(tl.constexpr(S.GROUPS) * TILES):
        b_steps = b_steps + (tl.load(p_step + number // TILES * L.T + number % TILES * 16),)
    if len(S.TABLES) == 0:
        p_low = field_of(p_table, i_block, i_b, LOW, S.FIELDS, NUMBERS, tl.float16, L) + o_t
        for number in tl.static_range(tl.constexpr(S.GROUPS) * TILES):
            b_lows = b_lows + (tl.load(p_low + number // TILES * L.T + number % TILES * 16),)
    return b_steps, b_lows


@triton.jit
def _faded(b_tiles, b_fade):
    """Return each [N, M] of a tuple times [M]."""
    b_faded = ()
    for i in tl.static_range(len(b_tiles)):
        b_faded = b_faded + (b_tiles[i] * b_fade[None, :],)
    return b_faded


@triton.jit
def _added(b_tiles, PLACE: tl.constexpr, b_more):
    """Return the tuple with something added to the entry at PLACE."""
    b_found = ()
    for i in tl.static_range(len(b_tiles)):
        b_found = b_found + ((b_tiles[i] + b_more) if i == PLACE else b_tiles[i],)
    return b_found


@triton.jit
def _store(b_state, part, L: tl.constexpr, S: tl.constexpr):
    """Write a split's mean of the values, and log2 Σ 2^s, of no token 0 and -inf."""
    b_share, p_mean, m_m = store_level(b_state[0], b_state[1], part, L)
    for run in tl.static_range(len(S.RUNS)):
        b_mean = b_state[3][run]
        if len(S.TABLES) == 0:
            b_mean += tl.sum(b_state[2][_rest(S.RUNS, run)], 0)[None, :]
        tl.store(p_mean + fragment.channels(S, run)[:, None], b_mean * b_share, mask=m_m)
