"""Make the table of a vocabulary: what the first layer's projection makes of every token, without the mean."""

from dataclasses import replace

import torch
from torch import Tensor

from kvq_calib.model.streamed import Stream
from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.statistics import Statistics
from kvq_runtime.recipe import Role
from kvq_runtime.stages.vocabulary import Vocabulary

TILE = 4096  # tokens


def statistics(stage: Vocabulary) -> tuple[str, ...]:
    """What a fit needs."""
    return ("vocabulary",)


def solve(stage: Vocabulary, statistics: Statistics, codec: Codec) -> tuple[Vocabulary, dict[str, Tensor]]:
    """The stage with the vocabulary's size, and the table, bfloat16 [V, C]."""
    table_VC = statistics.vocabulary
    assert table_VC is not None, "a table is made of a vocabulary"
    if codec.predictor is not None:
        table_VC = table_VC - statistics.mean_C
    return replace(stage, size=len(table_VC)), {"table": table_VC.to(torch.bfloat16)}


def vocabulary(stream: Stream, role: Role) -> Tensor:
    """The first layer's keys before RoPE, or values, of every token there is: float32 [V, C]."""
    layer, size = stream.layer(0), stream.files.tensor("model.embed_tokens.weight").shape[0]
    found = []
    for ids in torch.arange(size).split(TILE):
        projected = layer.project(stream.embed(ids[None]))
        found.append((projected.k_NTC if role == "key" else projected.v_NTC)[0].float())
    return torch.cat(found)
