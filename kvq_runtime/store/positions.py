"""Slots of the tokens that all layers share: how many there are, which are padding, at which positions they stand.

A slot is a place in the cache, the same for all rows; a padded slot holds no real token. Where tokens have been dropped
there are fewer slots than tokens seen, and it is stored which token each slot holds. Without that, without padding, and
with positions that count from 0, nothing is stored.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.ops import rope
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.store.storage import storage_bytes


class Positions:
    """The slots of one cache. `announce` describes the next tokens; `extend` adds them."""

    def __init__(self):
        self.length = 0
        self.dropped = 0  # tokens, of every row
        self.tokens_BT: Tensor | None = None
        self.real_BT: Tensor | None = None
        self.positions_BT: Tensor | None = None
        self.rotary: Rotary | None = None
        self._spread: dict[tuple, tuple[Tensor, Tensor]] = {}
        self._segments: dict[tuple[int, int, int], tuple[Tensor | None, Tensor]] = {}
        self._sources: dict[tuple[int, int, int], Tensor | None] = {}
        self._next: tuple[Tensor | None, Tensor | None] = (None, None)
        self._complete: dict[int, int] = {}
        # whether it was announced which of the newest tokens are padding, and their mask says nothing else
        self.told = self._next_told = False
        # whether a step is being recorded as a graph: the host counts its tokens, and does no more
        self.recorded = False

    @property
    def seen(self) -> int:
        """Tokens that have come, held or not."""
        return self.length + self.dropped

    def announce(
        self, real_BT: Tensor | None, positions_BT: Tensor | None, rotary: Rotary | None, alone: bool = True
    ) -> None:
        """Set which of the next tokens are real, and their positions; None: all, and counting on.

        alone   whether each sees what is real up to itself: of an image some may see later ones, a mask may hide more
        """
        self._next, self._next_told = (real_BT, positions_BT), real_BT is not None and alone
        self.rotary = rotary or self.rotary

    def agrees(self, mask_BT: Tensor, count: int) -> bool:
        """True if a mask of all tokens, `count` of them new, says of those that are held what was announced of them."""
        if not self.seen:
            return True
        held_BT = mask_BT[:, :-count].bool()
        if held_BT.shape[1] != self.seen:
            return False
        if self.tokens_BT is not None:
            held_BT = held_BT.gather(1, self.tokens_BT.long().expand(len(held_BT), -1))
        return bool(held_BT.all()) if self.real_BT is None else torch.equal(held_BT, self.real_BT)

    def extend(self, batch: int, count: int, device: torch.device) -> None:
        """Append `count` slots."""
        real, positions = self._next
        self.told, self._next, self._next_told = self._next_told and not self.recorded, (None, None), False
        if self.recorded:
            self.length += count
            return
        self.forget_factors()
        if positions is not None and positions.shape[-1] != count:
            raise RuntimeError(f"positions for {positions.shape[-1]} tokens were announced, but {count} arrived")
        if self.real_BT is None and real is not None and not bool(real.all()):
            self.real_BT = torch.ones(batch, self.length, dtype=torch.bool, device=device)
        if self.real_BT is not None:
            new = real if real is not None else torch.ones(batch, count, dtype=torch.bool, device=device)
            self.real_BT = torch.cat([self.real_BT, new.expand(batch, -1)], 1)
        if self.positions_BT is None and positions is not None and not _follow(positions, self.seen):
            held = self.tokens_BT
            held = torch.arange(self.length, dtype=torch.int32, device=device) if held is None else held.clone()
            self.positions_BT = held.expand(batch, -1)
        if self.positions_BT is not None:
            new = positions
            if new is None:
                new = self.positions_BT[:, -1:] + 1 + torch.arange(count, device=device)
            self.positions_BT = torch.cat([self.positions_BT, new.to(torch.int32).expand(batch, -1)], 1)
            if self.real_BT is not None and count > 1:
                self._count_back(self.positions_BT, self.real_BT)
        if self.tokens_BT is not None:
            new = torch.arange(self.seen, self.seen + count, dtype=torch.int32, device=device)
            self.tokens_BT = torch.cat([self.tokens_BT, new.expand(batch, -1)], 1)
        self.length += count

    def _count_back(self, positions_BT: Tensor, real_BT: Tensor) -> None:
        """Let padded slots count back from their row's first real one: the middle of its segment may be among them."""
        slots, first_B1 = torch.arange(real_BT.shape[1], device=real_BT.device), real_BT.int().argmax(1, keepdim=True)
        before_BT = positions_BT.gather(1, first_B1) + slots - first_B1
        self.positions_BT = torch.where(slots < first_B1, before_BT, positions_BT).to(torch.int32)

    def drop(self, kept_BT: Tensor) -> None:
        """Keep these slots of each row, in rising order, as many of all rows; the others are forgotten."""
        self.forget_factors()
        self._complete.clear()
        if self.tokens_BT is None:
            held_T = torch.arange(self.length, dtype=torch.int32, device=kept_BT.device)
            self.tokens_BT = held_T.expand(len(kept_BT), -1)
        self._change(lambda x_BT: x_BT.gather(1, kept_BT))
        self.dropped += self.length - kept_BT.shape[1]
        self.length = kept_BT.shape[1]

    @property
    def state(self) -> tuple[Any, ...]:
        """Return the state for `restore`. Its tensors are never written to."""
        return self.length, self.dropped, self.tokens_BT, self.real_BT, self.positions_BT

    def restore(self, *state: Any) -> None:
        """Go back to a state, of which what came since is forgotten."""
        self.forget_factors()
        same = self.dropped == state[1]  # slots are those that they were
        self.length, self.dropped, self.tokens_BT, self.real_BT, self.positions_BT = state
        self._complete = {sinks: at for sinks, at in self._complete.items() if same and at <= self.length}

    def crop(self, length: int) -> None:
        """Forget every slot from `length` on."""
        self.forget_factors()
        self._complete.clear()
        self.length = length
        self.dropped = self.dropped if length else 0
        self._change(lambda x_BT: x_BT[:, :length].clone() if length else None)

    def reorder(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        self.forget_factors()
        self._complete.clear()
        self._change(lambda x_BT: x_BT[rows])

    def _change(self, change: Callable[[Tensor], Tensor | None]) -> None:
        self.tokens_BT, self.real_BT, self.positions_BT = (
            None if x_BT is None else change(x_BT) for x_BT in (self.tokens_BT, self.real_BT, self.positions_BT)
        )

    def rope(self, start: int, stop: int, segment: int = 0) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the slots from `start` to `stop`, [B or 1, T, K] each; with `segment`, a divisor of
        `start`, those of the angles from the middle of each slot's segment."""
        rotary = self.rotary or self.require()
        positions_BT = self.tokens_BT if self.positions_BT is None else self.positions_BT
        if positions_BT is None:
            tables = rotary.tables(torch.arange(start, stop, device=rotary.frequencies_K.device)[None])
        else:
            tables = rotary.tables(positions_BT[:, start:stop])
        return rope.between(tables, rope.of_middles(tables, segment)) if segment else tables

    def rope_at(self, slots_BM: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of single slots of each row, [B, M, K] each."""
        held = self.tokens_BT if self.positions_BT is None else self.positions_BT
        return self.require().tables(slots_BM if held is None else held.expand(len(slots_BM), -1).gather(1, slots_BM))

    def valid(self, start: int, stop: int, sinks: int) -> Tensor:
        """Return True for slots from `start` to `stop` that hold a real token other than a sink, [B or 1, T]."""
        if self.real_BT is None:
            return (torch.arange(start, stop) >= sinks)[None]
        real_BT = self.real_BT[:, :stop]
        return (real_BT & (real_BT.cumsum(1) > sinks))[:, start:]

    def of_row(self, row: int, device: torch.device) -> Tensor:
        """Return the positions of a row's tokens, [T]."""
        if self.positions_BT is None:
            return torch.arange(self.length, device=device)
        return self.positions_BT[row if len(self.positions_BT) > 1 else 0]

    def require(self) -> Rotary:
        """Return the model's rotation; a RuntimeError if it has not been announced."""
        if self.rotary is None:
            raise RuntimeError(
                "the recipe needs the positions of its tokens, which only the model knows: "
                "make the cache with model=model, and call that model"
            )
        return self.rotary

    @property
    def rotary_pairs(self) -> int:
        """Return the pairs of channels that RoPE rotates in a head: half of its channels, or fewer."""
        return len(self.require().frequencies_K)

    def spread(
        self, start: int, stop: int, heads: int, size: int, dtype: torch.dtype, segment: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return `rope` of the slots, or with `segment` of the middles of their segments, as factors of every channel:
        [B or 1, T, C] each; kept for the layers above."""
        key = (start, stop, dtype, segment)
        if key not in self._spread:
            tables = self.rope(start, stop)
            cos, sin = rope.spread(*(rope.of_middles(tables, segment) if segment else tables), heads, size)
            self._spread[key] = (cos.to(dtype), sin.to(dtype))
        return self._spread[key]

    def by_segment(self, start: int, stop: int, segment: int) -> tuple[Tensor | None, Tensor]:
        """Return `rope.by_segment` of the slots; kept for the layers above."""
        key = start, stop, segment
        if key not in self._segments:
            self._segments[key] = rope.by_segment(self.rope(start, stop), segment)
        return self._segments[key]

    def forget_factors(self) -> None:
        """Drop what `spread` and `source` kept."""
        self._spread.clear()
        self._segments.clear()
        self._sources.clear()

    def sink_slots(self, sinks: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the slots of each row's first `sinks` real tokens, [B, sinks], and which of them have arrived."""
        if self.real_BT is None:
            slots = torch.arange(sinks, device=device).expand(batch, -1)
            return slots, slots < self.length
        ranks_BS = torch.arange(1, sinks + 1, device=device).repeat(batch, 1)
        slots_BS = torch.searchsorted(self.real_BT.cumsum(1), ranks_BS)  # of one that has not come: all slots
        return slots_BS, slots_BS < self.real_BT.shape[1]

    def complete(self, sinks: int, before: int) -> int:
        """A length at which every row's sinks had arrived, if they had in the first `before` slots; or one to come."""
        if self.real_BT is None:
            return sinks
        if sinks not in self._complete and bool((self.real_BT[:, :before].sum(1) >= sinks).all()):
            self._complete[sinks] = before
        return self._complete.get(sinks, self.length + 1)

    def starts(self, batch: int, device: torch.device) -> tuple[Tensor, bool, bool]:
        """Each row's first real slot, int32 [B]; whether all after it are real; whether positions count from it."""
        starts_B = torch.zeros(batch, dtype=torch.int32, device=device)
        if self.real_BT is not None:
            starts_B = (~self.real_BT).sum(1, dtype=torch.int32)
        since_BT = torch.arange(self.length, device=device) - starts_B[:, None]
        held_BT = torch.arange(self.length, device=device)[None] if self.positions_BT is None else self.positions_BT
        counted = ((held_BT == since_BT) | (since_BT < 0)).all()
        if self.real_BT is None:
            return starts_B, True, bool(counted)
        answers = int(counted + 2 * (self.real_BT == (since_BT >= 0)).all())  # the device is asked once
        return starts_B, answers > 1, answers % 2 == 1

    def source(self, start: int, stop: int, sinks: int) -> Tensor | None:
        """Return the slot that each slot of a block is encoded as: itself, or of a sink or padding the nearest token.

        [B or 1, T], counted from `start`; None where every slot stands for itself; -1 where the block holds no token.
        Kept for the layers above: with padding, the device is asked.
        """
        key = (start, stop, sinks)
        if key not in self._sources:
            self._sources[key] = self._source(*key)
        return self._sources[key]

    def _source(self, start: int, stop: int, sinks: int) -> Tensor | None:
        if self.real_BT is None:
            if start >= sinks:
                return None
            slots = torch.arange(stop - start)[None]
            return slots.clamp(min=sinks - start) if sinks < stop else torch.full_like(slots, -1)
        valid_BT = self.valid(start, stop, sinks)
        if bool(valid_BT.all()):
            return None
        slots = torch.arange(stop - start, device=valid_BT.device)
        before = torch.where(valid_BT, slots, -1).cummax(1).values
        first = torch.where(valid_BT.any(1), valid_BT.int().argmax(1), -1)
        return torch.where(before >= 0, before, first[:, None])

    def bytes(self) -> int:
        """Return the bytes stored per sequence."""
        return storage_bytes([t for t in (self.tokens_BT, self.real_BT, self.positions_BT) if t is not None])


def _follow(positions_BT: Tensor, start: int) -> bool:
    """True if the positions of every row count on from `start`."""
    slots = torch.arange(start, start + positions_BT.shape[-1], device=positions_BT.device)
    return torch.equal(positions_BT, slots.expand_as(positions_BT))
