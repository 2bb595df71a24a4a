"""Mark each chunk of encoded keys by its mean, attend to the chunks that queries ask for, and decode no others.

    landmark = mean of the chunk's keys after RoPE, by head         outlier: smallest min_t cos(key_t, landmark)
    score = max over query heads of Σ over queries of softmax(q · landmark)         by KV head

The recipe's number of outlier chunks is kept, by row and head, of all that have been encoded so far; a chunk that
others push out is still there, encoded like all.

The chunks with the largest scores, as many as the budget holds, are decoded token by token from the packed codes of
their blocks. Read beside them, always: exact sinks, outlier chunks with their exact keys, the exact window. Work is
bounded by the budget, but for the landmarks, of which there is one for every chunk.

M tokens are read from blocks, by row and head: those of outlier chunks first, then those of chosen chunks.

Source: Sun et al., 2024 (ShadowKV), algorithms 1 and 2; Hong et al., 2025 (SVDq), section 5.
Differs: outliers are found as blocks are encoded, in the prompt and after it, theirs once, in the prompt; sinks and
padding count neither for a landmark nor for its cosines; only keys are kept exact, values are read from their blocks.
The recent window of the recipe is exact, theirs is 4 chunks; sinks are read as such, theirs only if their chunk is an
outlier or chosen; attention's own scale, theirs is 1/√128 whatever the head.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvq_runtime.attention.path import SCORES, Attended, Path, Query, by_head, causal, visible
from kvq_runtime.geometry import SLAB, Geometry, Role, Window
from kvq_runtime.ops import rope
from kvq_runtime.ops.dense import capped
from kvq_runtime.policies.policy import CacheParts, Policy
from kvq_runtime.policy_setting import PolicySetting
from kvq_runtime.store.decode import Decoder
from kvq_runtime.store.layer import LayerStore
from kvq_runtime.store.step import Step
from kvq_runtime.store.storage import storage_bytes


@dataclass(frozen=True)
class ShadowChunks(PolicySetting):
    """Hold all tokens, and read the chunks that queries ask for, ShadowKV's.

    chunk      tokens that are chosen together
    budget     tokens of chosen chunks, by row and KV head; sinks, outliers and the window are read beside them
    outliers   chunks, by row and KV head, whose keys are kept exact and always read
    """

    kind: ClassVar[str] = "chunks"
    slot: ClassVar[str] = "select"
    chooses_by_query: ClassVar[bool] = True
    waits_for_fit: ClassVar[bool] = True
    unpacked: ClassVar[str | None] = "it reads the chunks that each query asks for"
    chunk: int = 8
    budget: int = 2048
    outliers: int = 48

    def __post_init__(self):
        if self.chunk < 1 or self.outliers < 0 or self.budget < self.chunk:
            raise ValueError(f"{self}; use a chunk of at least 1, a budget of at least a chunk, and outliers from 0")

    def check(self, recipe: Any, geometry: Geometry | None) -> None:
        """Raise a ValueError if the recipe cannot have it: single tokens are decoded."""
        super().check(recipe, geometry)
        if recipe.window.block % self.chunk:
            raise ValueError(f"chunks of {self.chunk} do not divide the blocks of {recipe.window.block}; use a divisor")
        if recipe.cross_layer or any(scheme.correct or scheme.axis != "token" for scheme in recipe.schemes):
            raise ValueError("single tokens are decoded; use schemes per token, with no prediction or correction")
        if recipe.position == "post" and any(key.predict for key, _ in recipe.pairs):
            raise ValueError("a mean after RoPE turns with each token; encode keys before RoPE")
        for quantize in (scheme.quantize for scheme in recipe.schemes):
            if not (quantize.by_token or quantize.reads_tokens):
                raise ValueError(
                    f"{quantize.kind} encodes the tokens of a block together, so single tokens cannot be decoded; use "
                    "a quantizer that encodes by token, or read all tokens"
                )

    @property
    def count(self) -> int:
        """Chunks that the budget holds."""
        return self.budget // self.chunk

    def extra_bits(self, role: Role, dtype: torch.dtype) -> float:
        """Return the bits of one landmark per chunk of keys."""
        return 8 * dtype.itemsize / self.chunk if role == "key" else 0.0

    def held_bytes(self, geometry: Geometry, tokens: int, window: Window, dtype: torch.dtype) -> dict[str, int]:
        """Count the bytes of all landmarks, and of each head's outliers: their numbers, cosines and exact keys."""
        chunks = max(0, tokens - window.recent) // window.block * (window.block // self.chunk)
        each = 4 + 4 + self.chunk * geometry.head_size * dtype.itemsize
        outliers = geometry.layers * geometry.kv_heads * min(self.outliers, chunks) * each
        return {"landmarks": geometry.layers * geometry.width * chunks * dtype.itemsize, "chunks": outliers}

    def policy(self, cache: CacheParts) -> Policy:
        return ShadowChunksPolicy(self, cache)


class Chunks(NamedTuple):
    """The chunks of one layer: all landmarks, and O outliers in each row (B) and head (H), each of K tokens.

    mark_BNC    landmarks, in the model's dtype; zero where no token of a chunk counts
    chunk_BHO   which chunk; -1: none yet       cosine_BHO   its smallest cosine       k_BHOKD   its keys after RoPE
    """

    mark_BNC: Tensor
    chunk_BHO: Tensor
    cosine_BHO: Tensor
    k_BHOKD: Tensor


class Selected(Path):
    """Reads chunks of `chunk` tokens, `count` of them for each query.

    chunks   by layer; a layer that is not there has none yet
    """

    def __init__(self, decoder: Decoder, chunks: dict[int, Chunks], chunk: int, count: int):
        self.decoder, self.positions = decoder, decoder.positions
        self.chunks, self.chunk, self.count = chunks, chunk, count
        self._heads = decoder.geometry.kv_heads

    def attend(self, query: Query) -> Attended | None:
        """As `Path.attend`; the queries of one call share their chunks."""
        store, q_BHTD, mask, scale, cap = query
        if store.layer not in self.chunks:
            return None
        chunks = self.chunks[store.layer]
        batch, heads, count, _ = q_BHTD.shape
        mask = causal(count, store.length, q_BHTD.device) if mask is None else mask
        mask = mask.expand(batch, 1, count, -1)
        q_BHGTD = (q_BHTD.float() * scale).unflatten(1, (self._heads, -1))
        slots_BHM, open_BHM = self._tokens(store, chunks, q_BHGTD, cap)
        known = chunks.k_BHOKD.flatten(2, 3)
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
            s = capped(torch.einsum("bhgtd,bhnd->bhgtn", q_BHGTD[:, :, :, part], k_BHND), cap)
            p = s.masked_fill_(~seen[:, :, None], torch.finfo(s.dtype).min).softmax(-1)
            out.append(torch.einsum("bhgtn,bhnd->bhgtd", p, v_BHND).flatten(1, 2).to(q_BHTD.dtype))
        return Attended(torch.cat(out, 2), None)

    def choose(
        self, store: LayerStore, chunks: Chunks, q_BHGTD: Tensor, cap: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """The chunks that queries ask for, [B, H, N], and which of them may be read: not empty, and no outlier."""
        mark_BHND = by_head(chunks.mark_BNC, self._heads)
        valid_BT = self.positions.valid(0, store.encoded, store.window.sinks).to(mark_BHND.device)
        open_BHN = valid_BT.unflatten(1, (-1, self.chunk)).any(-1)[:, None].expand(mark_BHND.shape[:3])
        place = chunks.chunk_BHO.long()
        taken = torch.zeros(open_BHN.shape, dtype=torch.int32, device=place.device).scatter_add_(
            2, place.clamp(min=0), (place >= 0).int()
        )
        open_BHN = open_BHN & (taken == 0)
        s = capped(torch.einsum("bhgtd,bhnd->bhgtn", q_BHGTD, mark_BHND), cap)
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
        out = torch.empty(batch, heads, count, size, dtype=torch.float32, device=slots_BHM.device)
        row = torch.arange(batch, device=slots_BHM.device)[:, None].expand(-1, count).flatten()
        codec = store.codecs[role]
        for head in range(heads):
            channels = slice(head * size, (head + 1) * size)
            slots = slots_BHM[:, head].flatten()
            decoded = torch.empty(batch * count, size, dtype=torch.float32, device=out.device)
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

    def _tokens(self, store: LayerStore, chunks: Chunks, q_BHGTD: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
        """Return the slots of all tokens read from blocks, and which of them may be: [B, H, M] each."""
        chosen, usable = self.choose(store, chunks, q_BHGTD, cap)
        known = chunks.chunk_BHO.long()
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


class ShadowChunksPolicy(Policy):
    """The chunks of one cache's layers.

    chunks   by layer, once it has blocks
    """

    def __init__(self, setting: ShadowChunks, cache: CacheParts):
        self.setting, self.cache = setting, cache
        self.chunks: dict[int, Chunks] = {}
        self.path = Selected(cache.decoder, self.chunks, setting.chunk, setting.count)

    def begin(self, step: Step) -> None:
        step.on_undo(self._restore, dict(self.chunks))

    def encoding(self, store: LayerStore, count: int) -> None:
        """Mark the chunks of the blocks, and keep those with the smallest cosines of all so far."""
        size, start, chunk = count * store.window.block, store.encoded, self.setting.chunk
        x_BTC, heads = store.window_2BTC[0, :, :size], self.cache.geometry.kv_heads
        valid_BT = self.cache.positions.valid(start, start + size, store.window.sinks).to(x_BTC.device)
        k_BHNKD = x_BTC.unflatten(-1, (heads, -1)).transpose(1, 2).unflatten(2, (-1, chunk))
        valid = valid_BT.expand(len(x_BTC), -1).unflatten(1, (-1, chunk))[:, None, :, :, None]
        keys = k_BHNKD.float()
        mark_BHND = (keys * valid).sum(3) / valid.sum(3).clamp(min=1)
        cosine = torch.cosine_similarity(keys, mark_BHND[:, :, :, None], dim=-1)
        cosine_BHN = cosine.masked_fill(~valid[..., 0], torch.inf).amin(-1)
        number = torch.arange(start // chunk, (start + size) // chunk, dtype=torch.int32, device=x_BTC.device)
        number_BHN = number.expand_as(cosine_BHN).masked_fill(cosine_BHN == torch.inf, -1)
        every = Chunks(mark_BHND.transpose(1, 2).flatten(2).to(x_BTC.dtype), number_BHN, cosine_BHN, k_BHNKD)
        if (held := self.chunks.get(store.layer)) is not None:
            mark_BNC = torch.cat([held.mark_BNC, every.mark_BNC], 1)
            every = Chunks(mark_BNC, *(torch.cat(pair, 2) for pair in zip(held[1:], every[1:], strict=True)))
        best = every.cosine_BHO.argsort(dim=-1, stable=True)[..., : self.setting.outliers]
        keys = every.k_BHOKD.gather(2, best[..., None, None].expand(-1, -1, -1, *every.k_BHOKD.shape[3:]))
        kept = every.chunk_BHO.gather(2, best), every.cosine_BHO.gather(2, best)
        self.chunks[store.layer] = Chunks(every.mark_BNC, *kept, keys)

    def crop(self, length: int) -> None:
        """Forget the chunks of blocks that are gone; the outliers that they had pushed out do not come back."""
        for layer, held in list(self.chunks.items()):
            store = self.cache.stores.get(layer)
            if length == 0 or store is None or not store.blocks:
                del self.chunks[layer]
                continue
            count = store.encoded // self.setting.chunk
            gone = held.chunk_BHO >= count
            self.chunks[layer] = Chunks(
                held.mark_BNC[:, :count].clone(), held.chunk_BHO.masked_fill(gone, -1),
                held.cosine_BHO.masked_fill(gone, torch.inf), held.k_BHOKD,
            )  # fmt: skip

    def reorder(self, rows: Tensor) -> None:
        for layer, held in self.chunks.items():
            here = rows.to(held.mark_BNC.device)
            self.chunks[layer] = Chunks(*(x.index_select(0, here) for x in held))

    def bytes(self) -> dict[str, int]:
        marks = storage_bytes(held.mark_BNC for held in self.chunks.values())
        return {"landmarks": marks, "chunks": storage_bytes(x for held in self.chunks.values() for x in held[1:])}

    def _restore(self, chunks: dict[int, Chunks]) -> None:
        self.chunks.clear()
        self.chunks.update(chunks)
