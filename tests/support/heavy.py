"""A recipe of heavy hitters with a small window, and what a cache of it holds."""

from kvq_runtime.cache import BlockCache
from kvq_runtime.recipe import Recipe, Scheme, Window
from kvq_runtime.recipes.h2o import HeavyHitters
from kvq_runtime.stages.exact import Exact

SINKS, RECENT, BLOCK, SHARE = 2, 6, 8, 0.4
SCHEME, WINDOW = Scheme(Exact()), Window(SINKS, RECENT, BLOCK)
EXACT = Recipe("h2o-small", SCHEME, SCHEME, window=WINDOW, policies=(HeavyHitters(SHARE),))


def held(cache: BlockCache) -> list[list[int]]:
    """The tokens that each row holds."""
    tokens, rows = cache.positions.tokens_BT, cache.rows
    return [list(range(cache.positions.length))] * rows if tokens is None else tokens.tolist()
