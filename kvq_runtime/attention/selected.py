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

from typing import NamedTuple

import torch
from torch import Tensor

from kvq_runtime.attention.path import SCORES, Attended, Path, by_head, causal, visible
from kvq_runtime.geometry import SLAB, Geometry
from kvq_runtime.ops import rope
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.decode import Decoder
from kvq_runtime.store.layer import EXTRA, LayerStore
from kvq_runtime.store.positions import Positions

LANDMARKS = "landmarks"  # the field beside a block that holds its chunks' landmarks, [B, chunks, C]


class OutlierChunks(NamedTuple):
    """The outlier chunks of one layer: O of them in each row (B) and head (H), each of K tokens.

    chunk_BHO   which chunk; -1: none yet       cosine_BHO   its smallest cosine       k_BHOKD   its keys after RoPE
    """

    chunk_BHO: Tensor
    cosine_BHO: Tensor
    k_BHOKD: Tensor


class Selected(Path):
    """Reads chunks of `chunk` tokens, `count` of them for each query.

    outliers   by layer, those that are always read; a layer that is not there has no chunks yet
    """

    def __init__(
        self, decoder: Decoder, positions: Positions, outliers: dict[int, OutlierChunks], chunk: int, count: int
    ):
        self.decoder, self.positions, self.outliers, self.chunk, self.count = decoder, positions, outliers, chunk, count
        self._heads = decoder.geometry.kv_heads

    @staticmethod
    def refusal(recipe: Recipe, geometry: Geometry, layer: int = 0) -> str | None:
        if any(policy.chooses_by_query for policy in recipe.policies):
            return None
        return f"{recipe.name}: no policy of it chooses chunks by the queries"

    def attend(
        self, store: LayerStore, layer: int, q_BHTD: Tensor, mask: Tensor | None, scale: float
    ) -> Attended | None:
        """As `Path.attend`; the queries of one call share their chunks."""
        if layer not in self.outliers:
            return None
        outliers = self.outliers[layer]
        batch, heads, count, _ = q_BHTD.shape
        mask = causal(count, store.length, q_BHTD.device) if mask is None else mask
        mask = mask.expand(batch, 1, count, -1)
        q_BHGTD = (q_BHTD.float() * scale).unflatten(1, (self._heads, -1))
        slots_BHM, open_BHM = self._tokens(store, outliers, q_BHGTD)
        known = outliers.k_BHOKD.flatten(2, 3)
        chosen = self.gather(store, 0, slots_BHM[:, :, known.shape[2] :])
        sinks, recent = ([by_head(x, self._heads) for x in exact] for exact in (store.sinks_2BSC, store.window_2BTC))
        k_BHND = torch.cat([sinks[0], known.float(), chosen, recent[0]], 2)
        v_BHND = torch.cat([sinks[1], self.gather(store, 1, slots_BHM), recent[1]], 2)
        self.decoder.count(k_BHND, v_BHND)
        columns_BHN, seen_BHN = self._columns(store, slots_BHM, open_BHM)
        out, step = [], max(1, SCORES // max(1, batch * heads * k_BHND.shape[2]))
        for start in range(0, count, step):
            part = slice(start, start + step)
            seen = visible(mask[:, :, part], columns_BHN, seen_BHN)
            s = torch.einsum("bhgtd,bhnd->bhgtn", q_BHGTD[:, :, :, part], k_BHND)
            p = s.masked_fill_(~seen[:, :, None], torch.finfo(s.dtype).min).softmax(-1)
            out.append(torch.einsum("bhgtn,bhnd->bhgtd", p, v_BHND).flatten(1, 2).to(q_BHTD.dtype))
        return Attended(torch.cat(out, 2), None)

    def choose(self, store: LayerStore, outliers: OutlierChunks, q_BHGTD: Tensor) -> tuple[Tensor, Tensor]:
        """The chunks that queries ask for, [B, H, N], and which of them may be read: not empty, and no outlier."""
        marks = [slab[LANDMARKS] for slab in store.slabs[EXTRA]]
        mark_BNC = torch.cat([x.flatten(1, 2) for x in marks], 1)[:, : store.encoded // self.chunk]
        mark_BHND = by_head(mark_BNC, self._heads)
        valid_BT = self.positions.valid(0, store.encoded, store.window.sinks).to(mark_BHND.device)
        open_BHN = valid_BT.unflatten(1, (-1, self.chunk)).any(-1)[:, None].expand(mark_BHND.shape[:3])
        place = outliers.chunk_BHO.long()
        taken = torch.zeros(open_BHN.shape, dtype=torch.int32, device=place.device).scatter_add_(
            2, place.clamp(min=0), (place >= 0).int()
        )
        open_BHN = open_BHN & (taken == 0)
        s = torch.einsum("bhgtd,bhnd->bhgtn", q_BHGTD, mark_BHND)
        p = s.masked_fill_(~open_BHN[:, :, None, None], torch.finfo(s.dtype).min).softmax(-1)
        real_BT = self.positions.real_BT
        if real_BT is not None:
            p *= real_BT[:, None, None, -q_BHGTD.shape[3] :, None]
        score_BHN = p.sum(3).amax(2).masked_fill(~open_BHN, -1.0)
        best = score_BHN.argsort(dim=-1, descending=True, stable=True)[..., : self.count]
        return best, open_BHN.gather(2, best)

    def gather(self, store: LayerStore, role: int, slots_BHM: Tensor) -> Tensor:
        """Decode single tokens, each head its own: keys after RoPE (0) or values (1), [B, H, M, D] float32."""
        size, block = self.decoder.geometry.head_size, store.window.block
        batch, heads, count = slots_BHM.shape
        out = torch.empty(batch, heads, count, size, device=slots_BHM.device)
        row = torch.arange(batch, device=slots_BHM.device)[:, None].expand(-1, count).flatten()
        codec = store.codecs[role]
        for head in range(heads):
            channels = slice(head * size, (head + 1) * size)
            slots = slots_BHM[:, head].flatten()
            decoded = torch.empty(batch * count, size, device=out.device)
            for number, fields in enumerate(store.slabs[role]):
                at = (slots // block // SLAB == number).nonzero()[:, 0]
                if len(at):
                    room = next(iter(fields.values())).shape[1]
                    inside = row[at] * room + slots[at] // block % SLAB
                    flat = {name: field.flatten(0, 1) for name, field in fields.items()}
                    decoded[at] = codec.tokens(flat, inside, slots[at] % block, channels).float()
            out[:, head] = decoded.view(batch, count, size)
        if role == 0 and self.decoder.recipe.position == "pre":
            for head in range(heads):
                tables = self.positions.rope_at(slots_BHM[:, head])
                out[:, head] = rope.rotate(out[:, head, :, None], *tables)[:, :, 0]
        return out

    def _tokens(self, store: LayerStore, outliers: OutlierChunks, q_BHGTD: Tensor) -> tuple[Tensor, Tensor]:
        """The slots of all tokens read from blocks, and which of them may be: [B, H, M] each."""
        chosen, usable = self.choose(store, outliers, q_BHGTD)
        known = outliers.chunk_BHO.long()
        chunk = torch.cat([known.clamp(min=0), chosen], 2)
        inside = torch.arange(self.chunk, device=chunk.device)
        slots_BHM = (chunk[..., None] * self.chunk + inside).flatten(2)
        return slots_BHM, torch.cat([known >= 0, usable], 2).repeat_interleave(self.chunk, 2)

    def _columns(self, store: LayerStore, slots_BHM: Tensor, open_BHM: Tensor) -> tuple[Tensor, Tensor]:
        """Return each column's token (sinks, read tokens, window), and whether it may be read, [B, H, N] each.

        A sink may be read once, in its own column.
        """
        slots, arrived = self.positions.sink_slots(store.window.sinks, len(slots_BHM), slots_BHM.device)
        exact, slots = arrived & (slots < store.encoded), slots.clamp(max=store.length - 1)
        again = ((slots_BHM[..., None] == slots[:, None, None]) & exact[:, None, None]).any(-1)
        recent = torch.arange(store.encoded, store.length, device=slots_BHM.device).expand(*slots_BHM.shape[:2], -1)
        shape = (*slots_BHM.shape[:2], -1)
        sinks, sinks_seen = slots[:, None].expand(shape), exact[:, None].expand(shape)
        columns = torch.cat([sinks, slots_BHM, recent], 2)
        return columns, torch.cat([sinks_seen, open_BHM & ~again, torch.ones_like(recent, dtype=torch.bool)], 2)
