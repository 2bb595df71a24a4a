"""Hold what is captured of a layer, and compute its causal attention, where a part of what a query reads is decoded and
the rest exact; and have a function of ours answer a model's own attention.

A tile is a run of queries that read the same: (start, stop, decoded), the last counted from the first token. Tokens
that are not decoded are read as they are. Attention's scale is 1/√D.

transformers takes no function in the place of attention that a model computes by code of its own (Falcon). What that
asks of PyTorch, scaled_dot_product_attention, is seen, and answered. Other models hide their queries: by code that asks
for nothing (BLOOM), or as attention does more than softmax(q Kᵀ) V. Of these keys and values are known, as a cache gets
them, and what a layer puts out.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from kvq_calib.model.standard import ENTRIES, LATENTS
from kvq_calib.model.standard import joined as cached_as_one
from kvq_runtime.geometry import Geometry
from kvq_runtime.hf.model import LISTED, attention_modules, settings_of
from kvq_runtime.ops import dense, rope
from kvq_runtime.recipe import Window

Pair = tuple[Tensor, Tensor]
Tile = tuple[int, int, int]
Answer = Callable[..., tuple[Tensor, Any]]  # as transformers' AttentionInterface has them
LEARNED = {"sinks"}  # parameters of attention itself that it hands to the function that attends
ASKING = "sdpa"  # the attention under which models ask PyTorch's
TILE = 512  # queries: what a tile's scores take grows with tile × tokens


@dataclass(frozen=True)
class Projected:
    """One layer's keys, values and queries of a chunk, before RoPE, all heads side by side.

    softmax   what the layer's attention has beside scores
    expand    of rows (`geometry.joined`), what makes keys after RoPE and values by head of them, [N, S, C] each; the
              queries are after RoPE then
    mask      bool [N, 1 or query heads, T, T] of what a model has chosen for a query to read; None: all up to it
    """

    k_NTC: Tensor
    v_NTC: Tensor
    q_NTC: Tensor | None
    softmax: dense.Softmax = dense.PLAIN
    expand: Callable[[Tensor, Tensor], Pair] | None = None
    mask: Tensor | None = None


@dataclass(frozen=True)
class Captured(Projected):
    """The same, and what the layer puts out."""

    h_BTE: Tensor = field(kw_only=True)


def joined(parts: Sequence[Projected]) -> Projected:
    """The tensors of all parts' sequences, one part after the other, without what their queries read."""
    if len(parts) == 1:
        return parts[0]
    k, v, q = (
        [getattr(part, name) for part in parts if getattr(part, name) is not None]
        for name in ("k_NTC", "v_NTC", "q_NTC")
    )
    return Projected(torch.cat(k), torch.cat(v), torch.cat(q) if q else None, parts[0].softmax)


@dataclass(frozen=True)
class AttentionInputs:
    """Attention's inputs in one layer of one chunk, float32 [N, T, C], all heads side by side.

    k_pre   keys before RoPE; `k`, `q`: keys and queries after RoPE, the latter None of a model that hides them
    rope    cos and sin of the positions, [1, T, K] each
    softmax   what the layer's attention has beside scores
    expand, mask   as of `Projected`
    """

    k_pre: Tensor
    k: Tensor
    v: Tensor
    q: Tensor | None
    rope: Pair
    softmax: dense.Softmax = dense.PLAIN
    expand: Callable[[Tensor, Tensor], Pair] | None = None
    mask: Tensor | None = None


class Rows:
    """Stand in a cache's place, and in its layers', and note what it would store of a row (`geometry.joined`) as keys
    and as values: [B, H, T, D] each."""

    def __init__(self, what: str, seen: dict[str, Any]):
        self._what, self._seen = what, seen

    @property
    def layers(self) -> Mapping[int, "Rows"]:
        """Itself, whichever is asked for."""
        return defaultdict(lambda: self)

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_given: Any) -> tuple[Tensor, Tensor]:
        """Take in what a layer caches; return it, as read from what was noted."""
        self._seen["k"], self._seen["v"] = key_states, value_states
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, *_args: Any) -> Tensor:
        """Return an indexer's keys: all there are."""
        self.keys = indexer_key_states[:, None]
        return indexer_key_states

    def get_seq_length(self) -> int:
        """Tokens of which an indexer has put in keys."""
        return self.keys.shape[-2]


def expanded(attention: Any, what: str, heads: int, k_NSC: Tensor, v_NSC: Tensor) -> tuple[Tensor, Tensor]:
    """Keys after RoPE and values by head, float32 [N, H, S, D], that attention makes of rows as they are cached."""
    k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (k_NSC, v_NSC))
    made: Any = (k, v)
    if what == LATENTS:
        made = attention.expand_kv(*(x.to(attention.kv_b_proj.weight.dtype) for x in made))
    return made[0].float(), made[1].float()


def inputs(captured: Captured, tables: Pair, geometry: Geometry) -> AttentionInputs:
    """Apply RoPE to what a layer captured, queries included."""
    k, v, q = captured.k_NTC.float(), captured.v_NTC.float(), captured.q_NTC
    tables = tables[0][:, : k.shape[1]], tables[1][:, : k.shape[1]]  # of as many entries, where these are cached
    turned_k = apply_rope(k, tables, geometry.kv_heads)
    turned_q = None if q is None else q.float()
    if turned_q is not None and not captured.expand:
        turned_q = apply_rope(turned_q, tables, turned_q.shape[-1] // geometry.head_size)
    return AttentionInputs(k, turned_k, v, turned_q, tables, captured.softmax, captured.expand, captured.mask)


def apply_rope(x_NTC: Tensor, tables: Pair, heads: int) -> Tensor:
    """Rotate every head by its token's position."""
    return rope.rotate(x_NTC.unflatten(-1, (heads, -1)), *tables).flatten(-2)


def tiles(tokens: int, decoded: int = 0) -> list[Tile]:
    """All queries, reading the first `decoded` tokens decoded."""
    return [(start, min(start + TILE, tokens), decoded) for start in range(0, tokens, TILE)]


def passes(tokens: int, step: int, prompt: int = 0) -> list[range]:
    """The forward passes in which tokens arrive: a prompt if there is one, then steps; the last may be shorter."""
    starts = [*([0] if prompt else []), *range(prompt, tokens, step), tokens]
    return [range(start, stop) for start, stop in pairwise(starts)]


def tiles_in_use(window: Window, tokens: int, step: int, prompt: int = 0) -> list[Tile]:
    """Return what queries read from a cache in which tokens arrive in steps, after a prompt if there is one.

    A step reads the state before its own flush: whole blocks of what had arrived before it, less `recent`.
    """
    runs: list[Tile] = []
    for one in passes(tokens, step, prompt):
        start, stop = one.start, one.stop
        decoded = max(0, start - window.recent) // window.block * window.block
        if runs and runs[-1][2] == decoded and stop - runs[-1][0] <= TILE:
            start = runs.pop()[0]
        runs.append((start, stop, decoded))
    return runs


def attend(chunk: AttentionInputs, exact: Pair, decoded: Pair, runs: list[Tile], head_size: int) -> Tensor:
    """Attend by the chunk's queries to keys and values after RoPE, before the projection: [N, T, C of the queries]."""

    def by_head(x_NTC: Tensor, size: int) -> Tensor:
        return x_NTC.unflatten(-1, (-1, size)).transpose(1, 2)

    assert chunk.q is not None, "attention of a model that hides its queries"
    out = []
    for start, stop, count in runs:
        k, v = (
            torch.cat([x_hat[:, : min(count, stop)], x[:, count:stop]], 1)
            for x, x_hat in zip(exact, decoded, strict=True)
        )
        keys_BHSD, values_BHSD = chunk.expand(k, v) if chunk.expand else (by_head(x, head_size) for x in (k, v))
        size = keys_BHSD.shape[-1]
        visible = torch.arange(stop, device=k.device) <= torch.arange(start, stop, device=k.device)[:, None]
        queries = by_head(chunk.q[:, start:stop], size)
        mask = visible[None, None] if chunk.mask is None else chunk.mask[:, :, start:stop, :stop]
        tile = dense.attention(queries, keys_BHSD, values_BHSD, mask, size**-0.5, chunk.softmax)
        out.append(tile.transpose(1, 2).flatten(2))
    return torch.cat(out, 1)


# ---- a model's own attention -----------------------------------------------------------------------------------------


def asks(model: Any) -> bool:
    """True if a model attends by code of its own that asks PyTorch's attention."""
    return False


def hidden_queries(model: Any) -> str | None:
    """The reason why no queries of a model are seen, or what they read is not softmax(q Kᵀ) V; None: they are."""
    config, modules = model.config.get_text_config(decoder=True), attention_modules(model)
    own = {name for module in modules.values() for name, _ in module.named_parameters(recurse=False)} - LEARNED
    if own:
        return f"its attention has parameters of its own ({', '.join(sorted(own))})"
    if getattr(config, "alibi", False):
        return "its attention adds to scores by distance"
    settings = settings_of(config)
    if cached_as_one(settings) == ENTRIES:
        return f"its attention reads {ENTRIES} beside tokens"
    if asks(model) or cached_as_one(settings) or settings.get("num_kv_shared_layers"):
        return None
    return None


@contextmanager
def answered(modules: Iterable[nn.Module], answer: Answer) -> Iterator[None]:
    """Have a function answer, for a while, what attention modules ask of PyTorch's."""
    asking = list(modules)
    before = [vars(module).get("forward") for module in asking]
    for module in asking:
        answer_by(module, answer)
    try:
        yield
    finally:
        for module, forward in zip(asking, before, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward


def answer_by(module: Any, answer: Answer) -> None:
    """The same for good."""
    # a module that held itself would keep its weights until the next garbage collection
    held, own, method = weakref.ref(module), vars(module).get("forward"), type(module).forward

    def seen(*args: Any, **given: Any) -> Any:
        asking: Any = held()
        with _Asked(asking, answer):
            return method(asking, *args, **given) if own is None else own(*args, **given)

    module.forward = seen


class _Asked(TorchFunctionMode):
    """Answer calls of scaled_dot_product_attention; all others are PyTorch's."""

    def __init__(self, module: nn.Module, answer: Answer):
        super().__init__()
        self._module, self._answer = module, answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._asked(*args, **(kwargs or {}))

    def _asked(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if enable_gqa:
            raise ValueError(
                f"{type(self._module).__name__} has PyTorch's attention share heads of keys (enable_gqa), which is not "
                f"known here; use a recipe that needs no fit; {LISTED}"
            )
        found = self._answer(
            self._module, query, key, value, attn_mask, scaling=scale, is_causal=is_causal, dropout=dropout_p
        )[0]
        return found.transpose(1, 2)
