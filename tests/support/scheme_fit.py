"""Fit a scheme to blocks of tokens whose variances fall, and decode others with it."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvq_calib.fit.chunks import Blocks, Chunk
from kvq_calib.fit.scheme import Asked, LayerSource, SchemeFit, Sums, summed
from kvq_calib.fit.statistics import LayerQueries, Moments
from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.fit.statistics import Statistics
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe, Scheme

GEOMETRY = Geometry(2, 2, 32)
WIDTH = GEOMETRY.width
NOWHERE = Context()
NOTHING = torch.empty(0)


def low_rank(blocks: int = 24, seed: int = 0, decay: float = 0.15) -> Tensor:
    """Tokens [blocks, 128, C] whose variances fall exponentially along a hidden basis, about a mean far from zero."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(99))).Q
    latents = torch.randn(blocks, 128, WIDTH, generator=generator) * torch.exp(-decay * torch.arange(WIDTH))
    return latents @ hidden.mT + 5


def fitted(scheme: Scheme, x_NTC: Tensor, role="key", gradients_HDD: Tensor = NOTHING) -> SchemeFit:
    """A side of layer 0 fitted on these blocks, in two chunks, with this second moment of gradients."""
    moments = Moments(WIDTH)
    moments.update(x_NTC)
    statistics = Statistics(moments.value().mean_C.float())
    fit = SchemeFit(Recipe("test", scheme, scheme, "pre"), 0, role, GEOMETRY, statistics)
    cut = len(x_NTC) // 2
    halves = [(blocks(x_NTC[:cut], 0), NOWHERE), (blocks(x_NTC[cut:], cut), NOWHERE)]
    fit.fit(chunks(halves, gradients_HDD=gradients_HDD))
    return fit


def chunks(
    given: list[tuple[Blocks, Context]], queries: LayerQueries | None = None, gradients_HDD: Tensor = NOTHING
) -> LayerSource:
    """A source of statistics: of these chunks, these queries and this second moment of gradients."""

    def partials(fit: SchemeFit, asked: Asked) -> Iterator[list[Sums]]:
        return (summed(asked, Chunk(fit.codec, *one, keys=lambda: NOTHING)) for one in given)

    return LayerSource(
        partials,
        queries,
        gradients=lambda: gradients_HDD,
        log_importance=lambda: NOTHING,
    )


def blocks(x_NTC: Tensor, first: int) -> Blocks:
    """Blocks numbered from `first` on, of which every token counts."""
    mask, numbers = torch.ones(x_NTC.shape[:2], dtype=torch.bool), torch.arange(first, first + len(x_NTC))
    return Blocks(x_NTC, mask, (mask, mask), numbers)


def decoded(made: Codec, x: Tensor) -> Tensor:
    """What is decoded and restored of encoded blocks."""
    return made.restore(made.decode(made.encode(x, NOWHERE), NOWHERE).float(), NOWHERE)
