"""Say what a prediction of keys or values reads: decoded tensors of this layer and of those below."""

from typing import NamedTuple

from kvq_runtime.geometry import ROLES, Role

Place = tuple[int, Role]  # how many layers below, 0 for this one, and keys or values


class Inputs(NamedTuple):
    """The inputs of the prediction of a layer's keys, or of its values.

    keys    this layer's decoded keys; for values
    below   the depths of the layers below whose decoded keys, for keys, or values, for values, it reads
    both    whether it reads the other of the two there, too
    """

    keys: bool = False
    below: tuple[int, ...] = ()
    both: bool = False

    @property
    def tokens(self) -> int:
        """The number of tensors, each as wide as a token, side by side."""
        return self.keys + len(self.below) * (1 + self.both)

    def places(self, role: Role) -> list[Place]:
        """How many layers below each of them is, 0 for this one, and its role; in order."""
        other: Role = ROLES[1 - ROLES.index(role)]
        roles = (role, other) if self.both else (role,)
        own: list[Place] = [(0, "key")] if self.keys else []
        return own + [(depth, one) for one in roles for depth in self.below]
