"""Make the table of a vocabulary: the first layer's projection of every token, without the mean.

In 4 bits each row is rounded for itself: every token counts alike, however often a text has it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from kvq_calib.fit.scheme import Given, SchemeFit, Source
from kvq_calib.model.streamed import Stream
from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.statistics import Statistics
from kvq_runtime.ops import rtn
from kvq_runtime.recipe import Role
from kvq_runtime.stages.fitted_codebook import Vocabulary
from kvq_runtime.stages.four_bits import BITS, GROUP

TILE = 4096  # tokens


@dataclass(frozen=True)
class EveryToken(Given[Tensor]):
    """The first layer's keys before RoPE, or values, of every token of the vocabulary, float32 [V, C]."""

    passes = ()

    def of(self, fit: SchemeFit, source: Source) -> Tensor:
        return source.vocabulary()


def requests(stage: Vocabulary) -> tuple[EveryToken]:
    """Return the statistics that a fit needs."""
    return (EveryToken(),)


def solve(stage: Vocabulary, statistics: Statistics, codec: Codec) -> tuple[Vocabulary, dict[str, Tensor]]:
    """The stage with the vocabulary's size, and the table: bfloat16 [V, C], or of `four_bits.specs`."""
    table_VC = statistics[EveryToken()]
    if codec.predictor is not None:
        table_VC = table_VC - statistics.mean_C
    found = _rounded(table_VC) if stage.storage == "rtn4" else {"table": table_VC.to(torch.bfloat16)}
    return replace(stage, size=len(table_VC)), found


def _rounded(table_VC: Tensor) -> dict[str, Tensor]:
    """The table in 4-bit codes; what a last, shorter group lacks is filled up with its last number."""
    group, found = min(GROUP, table_VC.shape[1]), []
    for rows_RC in table_VC.split(TILE):
        whole = functional.pad(rows_RC[:, None], (0, -rows_RC.shape[1] % group), mode="replicate")[:, 0]
        found.append(rtn.encode(whole.float().unflatten(1, (-1, group)), BITS))
    codes, step, low = (torch.cat(parts) for parts in zip(*found, strict=True))
    return {"table_codes": codes, "table_step": step, "table_low": low}


def vocabulary(stream: Stream, role: Role) -> Tensor:
    """The first layer's keys before RoPE, or values, of every token there is: float32 [V, C]."""
    layer, size = stream.layer(0), stream.files.tensor(f"{stream.files.stem}embed_tokens.weight").shape[0]
    found = []
    for ids in torch.arange(size).split(TILE):
        projected = layer.project(stream.embed(ids[None]))
        found.append((projected.k_NTC if role == "key" else projected.v_NTC)[0].float())
    return torch.cat(found)
