"""Attend to the chunks that queries ask for, and decode no others.

    score = max over query heads of Σ over queries of softmax(q · landmark)         by KV head

The chunks with the largest scores, as many as the budget holds, are decoded token by token from the packed codes of
their blocks. Read beside them, always: exact sinks, outlier chunks with their exact keys, the exact window. Work is
bounded by the budget, but for the landmarks, of which there is one for every chunk.

M tokens are read from blocks, by row and head: those of outlier chunks first, then those of chosen chunks.

Source: Sun et al., 2024 (ShadowKV), algorithms 1 and 2; Hong et al., 2025 (SVDq), section 5.
Differs: the recent window of the recipe is exact, theirs is 4 chunks; sinks are read as such, theirs only if their
chunk is an outlier or chosen; attention's own scale, theirs is 1/√128 whatever the head.
"""

import torch
from torch import Tensor

from kvq_runtime import rope
from kvq_runtime.attention.attend import SCORES, causal
from kvq_runtime.codec import Codec
from kvq_runtime.history import History
from kvq_runtime.outliers import Outliers
from kvq_runtime.stream import SLAB, Stream


def attend(history: History, layer: int, q_BHTD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """See BlockCache.attend; the queries of one call share their chunks."""
    keys, values = history.layers[layer]
    batch, heads, count, _ = q_BHTD.shape
    mask = causal(count, keys.length, q_BHTD.device) if mask is None else mask
    mask = mask.expand(batch, 1, count, -1)
    q_BHGTD = (q_BHTD.float() * scale).unflatten(1, (history.geometry.kv_heads, -1))
    assert keys.outliers is not None
    slots_BHM, open_BHM = _tokens(history, keys, keys.outliers, q_BHGTD)
    known = keys.outliers.k_BHOKD.flatten(2, 3)
    chosen = gather(history, layer, 0, slots_BHM[:, :, known.shape[2] :])
    sinks = [_heads(stream.sinks_BSC, history) for stream in (keys, values)]
    recent = [_heads(stream.window_BTC, history) for stream in (keys, values)]
    k_BHND = torch.cat([sinks[0], known.float(), chosen, recent[0]], 2)
    v_BHND = torch.cat([sinks[1], gather(history, layer, 1, slots_BHM), recent[1]], 2)
    history.count(k_BHND, v_BHND)
    out, step = [], max(1, SCORES // max(1, batch * heads * k_BHND.shape[2]))
    for start in range(0, count, step):
        part = slice(start, start + step)
        seen = _seen(history, keys, slots_BHM, open_BHM, mask[:, :, part])
        s = torch.einsum("bhgtd,bhnd->bhgtn", q_BHGTD[:, :, :, part], k_BHND)
        p = s.masked_fill_(~seen[:, :, None], torch.finfo(s.dtype).min).softmax(-1)
        out.append(torch.einsum("bhgtn,bhnd->bhgtd", p, v_BHND).flatten(1, 2).to(q_BHTD.dtype))
    return torch.cat(out, 2)


def choose(history: History, keys: Stream, outliers: Outliers, q_BHGTD: Tensor) -> tuple[Tensor, Tensor]:
    """The chunks that these queries ask for, [B, H, N], and which of them may be read: not empty, not an outlier."""
    marks = [slab["landmarks"] for slab in keys.slabs]
    mark_BNC = torch.cat([x.flatten(1, 2) for x in marks], 1)[:, : keys.encoded // outliers.select.chunk]
    mark_BHND = _heads(mark_BNC, history)
    valid_BT = history.timeline.valid(0, keys.encoded, keys.side.sinks).to(mark_BHND.device)
    open_BHN = valid_BT.unflatten(1, (-1, outliers.select.chunk)).any(-1)[:, None].expand(mark_BHND.shape[:3])
    place = outliers.chunk_BHO.long()
    taken = torch.zeros(open_BHN.shape, dtype=torch.int32, device=place.device).scatter_add_(
        2, place.clamp(min=0), (place >= 0).int()
    )
    open_BHN = open_BHN & (taken == 0)
    s = torch.einsum("bhgtd,bhnd->bhgtn", q_BHGTD, mark_BHND)
    p = s.masked_fill_(~open_BHN[:, :, None, None], torch.finfo(s.dtype).min).softmax(-1)
    real_BT = history.timeline.real_BT
    if real_BT is not None:
        p *= real_BT[:, None, None, -q_BHGTD.shape[3] :, None]
    score_BHN = p.sum(3).amax(2).masked_fill(~open_BHN, -1.0)
    best = score_BHN.argsort(dim=-1, descending=True, stable=True)[..., : outliers.select.count]
    return best, open_BHN.gather(2, best)


def gather(history: History, layer: int, half: int, slots_BHM: Tensor) -> Tensor:
    """Decode single tokens, each head its own: keys after RoPE (half 0) or values (1), [B, H, M, D] float32."""
    stream, size = history.layers[layer][half], history.geometry.head_size
    batch, heads, count = slots_BHM.shape
    out = torch.empty(batch, heads, count, size, device=slots_BHM.device)
    row = torch.arange(batch, device=slots_BHM.device)[:, None].expand(-1, count).flatten()
    for head in range(heads):
        channels = slice(head * size, (head + 1) * size)
        block, place = (
            slots_BHM[:, head].flatten() // stream.side.block,
            slots_BHM[:, head].flatten() % stream.side.block,
        )
        found = torch.empty(batch * count, size, device=out.device)
        for number, slab in enumerate(stream.slabs):
            at = (block // SLAB == number).nonzero()[:, 0]
            if len(at):
                fields = {name: field.flatten(0, 1) for name, field in slab.items() if name != "landmarks"}
                room = next(iter(slab.values())).shape[1]
                inside = row[at] * room + block[at] % SLAB
                assert isinstance(stream.codec, Codec), "what is read by chunks is not fitted online"
                found[at] = stream.codec.tokens(fields, inside, place[at], channels).float()
        out[:, head] = found.view(batch, count, size)
    if half == 0 and history.recipe.position == "pre":
        for head in range(heads):
            tables = history.timeline.rope_at(slots_BHM[:, head])
            out[:, head] = rope.rotate(out[:, head, :, None], *tables)[:, :, 0]
    return out


def _tokens(history: History, keys: Stream, outliers: Outliers, q_BHGTD: Tensor) -> tuple[Tensor, Tensor]:
    """The slots of all tokens read from blocks, and which of them may be: [B, H, M] each."""
    chosen, usable = choose(history, keys, outliers, q_BHGTD)
    known = outliers.chunk_BHO.long()
    chunk = torch.cat([known.clamp(min=0), chosen], 2)
    inside = torch.arange(outliers.select.chunk, device=chunk.device)
    slots_BHM = (chunk[..., None] * outliers.select.chunk + inside).flatten(2)
    return slots_BHM, torch.cat([known >= 0, usable], 2).repeat_interleave(outliers.select.chunk, 2)


def _seen(history: History, keys: Stream, slots_BHM: Tensor, open_BHM: Tensor, mask: Tensor) -> Tensor:
    """Which tokens each query sees, of sinks, read tokens and window, in that order: [B, H, T, N]."""
    heads, count = slots_BHM.shape[1], mask.shape[2]
    slots, arrived = history.timeline.sink_slots(keys.side.sinks, len(slots_BHM), slots_BHM.device)
    exact, slots = arrived & (slots < keys.encoded), slots.clamp(max=keys.length - 1)
    sinks = mask.gather(-1, slots[:, None, None].expand(-1, 1, count, -1)) & exact[:, None, None]
    again = ((slots_BHM[..., None] == slots[:, None, None]) & exact[:, None, None]).any(-1)
    wide = mask.expand(-1, heads, -1, -1)
    read = wide.gather(-1, slots_BHM[:, :, None].expand(-1, -1, count, -1)) & (open_BHM & ~again)[:, :, None]
    return torch.cat([sinks.expand(-1, heads, -1, -1), read, wide[..., keys.encoded :]], -1)


def _heads(x_BTC: Tensor, history: History) -> Tensor:
    return x_BTC.float().unflatten(-1, (history.geometry.kv_heads, -1)).transpose(1, 2)
