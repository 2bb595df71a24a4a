"""Say what shape of cache a model has: the numbers every codec is built from.

Shape letters, as suffixes of tensor names in memory order, everywhere in kvq:
B batch · L layers · H KV heads · G query heads per KV head · T tokens · D head size · C = H·D, all KV heads
of one token · N blocks or rows · R rank · K positions inside a group.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    """The shape of one model's cache: `layers` × `kv_heads` × `head_size` keys per token, and as many values."""

    layers: int
    kv_heads: int
    head_size: int

    def __post_init__(self):
        for field in ("layers", "kv_heads", "head_size"):
            given = getattr(self, field)
            if not isinstance(given, int) or isinstance(given, bool) or given < 1:
                raise ValueError(f"{field}={given!r}; a geometry needs whole numbers of at least 1")

    @property
    def width(self) -> int:
        """C: all KV heads of one token side by side."""
        return self.kv_heads * self.head_size
