"""Attend to the page in which a query stands, whose tokens are read exact.

R requests of a group · Y = R · H · M = G · queries of a request, G query heads per KV head · N tokens of a page.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from kvq_runtime.geometry import Role
from kvq_runtime.vllm.block_layer import BlockLayer
from kvq_runtime.vllm.tails import Step


class OwnPages:
    """The own pages of the queries of a group of requests, which have equally many.

    requests   which of the step's they are
    """

    def __init__(self, layer: BlockLayer, step: Step, requests: Sequence[int], count: int):
        self._layer, self._count = layer, count
        self._shape = len(requests), layer.geometry.kv_heads
        self._pieces: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for row, request in enumerate(requests):
            for start, stop, own in step.pieces[request]:
                self._pieces[start, stop].append((row, own))

    def scores(self, q_YMD: Tensor) -> Tensor:
        """q · k of every token of each query's page: [Y, M, N]."""
        s_YMN = q_YMD.new_empty(*q_YMD.shape[:2], self._layer.page.tokens)
        self._fill(s_YMN, q_YMD, "key")
        return s_YMN

    def mix(self, p_YMN: Tensor) -> Tensor:
        """Σ p v over the tokens of each query's page: [Y, M, D]."""
        x_YMD = p_YMN.new_empty(*p_YMN.shape[:2], self._layer.geometry.head_size)
        self._fill(x_YMD, p_YMN, "value")
        return x_YMD

    def _fill(self, out: Tensor, given: Tensor, role: Role) -> None:
        by_query = (*self._shape, -1, self._count)
        out_RHGQX, given_RHGQX = (x.view(*by_query, x.shape[-1]) for x in (out, given.contiguous()))
        for (start, stop), pieces in self._pieces.items():
            rows, owns = (list(x) for x in zip(*pieces, strict=True))
            x_YND = self._layer.own(role, owns)
            part = given_RHGQX[rows, :, :, start:stop]
            found = torch.bmm(part.flatten(0, 1).flatten(1, 2), x_YND.mT if role == "key" else x_YND)
            out_RHGQX[rows, :, :, start:stop] = found.view(*part.shape[:4], -1)
