"""Stand in the places of a decoder's layers: note what it calls them with (rotations, masks), put out their input, or
what one is told to, and find of which outputs it makes what.
"""

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kvq_calib.model.carried import INPUT
from kvq_calib.model.standard import plain_of
from kvq_runtime.hf.model import layers_of

Call = dict[str, Any]  # a layer's arguments beside hidden states, by name


class Seen(Exception):
    """Ends a layer's forward pass where attention begins, or a decoder's where a layer is called."""


@dataclass
class Pass:
    """A pass through the places of a decoder.

    outs     what layers put out, by their number in the pass; others their input
    last     the layer at which it ends; None: it goes on above
    called   what each has been called with: hidden states, and the rest
    """

    outs: Mapping[int, Tensor] = field(default_factory=dict)
    last: int | None = None
    called: list[tuple[Tensor, Call]] = field(default_factory=list)

    def through(self, hidden: Tensor, call: Call) -> Tensor:
        """Note what a layer is called with; what it puts out."""
        out = self.outs.get(len(self.called), hidden)
        self.called.append((hidden, call))
        if len(self.called) - 1 == self.last:
            raise Seen
        return out


class Walk(Pass):
    """A pass that notes of which outputs of layers what follows is made, by way of its gradients."""

    def __init__(self):
        super().__init__()
        self.put: dict[int, Tensor] = {}

    def put_out(self, number: int, out: Tensor) -> Tensor:
        """Begin a graph with an output; -1: with the embeddings."""
        self.put[number] = out.detach().requires_grad_().clone()  # a decoder may write into it
        return self.put[number]

    def through(self, hidden: Tensor, call: Call) -> Tensor:
        """The same of each layer."""
        return self.put_out(len(self.called), super().through(hidden, call))

    @property
    def written(self) -> bool:
        """True if the decoder has written into what was put out."""
        return any(one._version for one in self.put.values())

    def held(self, last: Tensor) -> Sequence[Sequence[int]]:
        """That of `Carried`; empty where each layer is called with the very output of the last, and nothing else of
        what is below; `last`: what is put out above all."""
        read: list[set[int]] = []
        for under, call in [*self.called, (last, {})]:
            given = tree_leaves([under, *(one for name, one in call.items() if name != INPUT)])
            made = [one.sum() for one in given if isinstance(one, Tensor) and one.requires_grad]
            slopes = torch.autograd.grad(made, [*self.put.values()], retain_graph=True, allow_unused=True)
            read.append({number for number, slope in zip(self.put, slopes, strict=True) if slope is not None})
        same = all(_is_same(hidden, self.put[n]) for n, (hidden, _) in enumerate(self.called[1:]))
        if same and all(own <= {n - 1} for n, own in enumerate(read)):
            return ()
        return [sorted(set().union(*read[n:]) & {*range(-1, n)}, reverse=True) for n in range(len(read))]


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """True if a tensor is another one, or a view of all of it, and nothing was written into it."""
    views = [(one.data_ptr(), one.shape, one.stride()) for one in (tensor, other)]
    return views[0] == views[1] and not tensor._version


class Place(nn.Module):
    """Stand in a layer's place: hand on what it is called with; put out what the pass under way says, or the input.

    paired   whether it is put out with weights of attention beside it, as some decoders expect, of which there are none
    """

    paired = False
    under_way: Pass | None = None

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.__dict__ = plain_of(layer) | self.__dict__
        parameters = list(inspect.signature(type(layer).forward).parameters.values())[2:]
        self._named = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]

    def forward(self, hidden_states: Tensor, *args: Any, **given: Any) -> Any:
        call, one = dict(zip(self._named, args, strict=False)) | given, self.under_way
        out = hidden_states if one is None else one.through(hidden_states, call)
        return (out, None) if self.paired else out


@contextlib.contextmanager
def passing(core: Any, one: Pass) -> Iterator[Pass]:
    """Have the places of a decoder take part in a pass, which may end at a layer."""
    for place in layers_of(core):
        place.under_way = one
    try:
        with contextlib.suppress(Seen):
            yield one
    finally:
        for place in layers_of(core):
            place.under_way = None
