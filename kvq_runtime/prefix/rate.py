"""State what files of an entropy-coded recipe hold beside codes, in bits per element of a prefix's keys and values.

Exact sinks count in 16 bits, whatever the model's dtype; the frame of a block is its header: token ids, names, digests.
The longer a prefix, the less sinks take: bits in a recipe's name are those of LENGTH tokens. What a fit gives, the
probabilities of codes among it, lies in the artifact, once for all prefixes, and is not counted: no recipe's is.
"""

from kvq_runtime.geometry import Geometry
from kvq_runtime.prefix import block_file
from kvq_runtime.recipe import Recipe

LENGTH = 1024  # tokens


def beside(recipe: Recipe, geometry: Geometry, tokens: int = LENGTH) -> float:
    """Bits per element of a prefix of so many tokens, rounded up to whole blocks, that are not codes."""
    block = recipe.window.block
    kept, elements = -(-tokens // block) * block, 2 * geometry.layers * geometry.width
    return 16 * recipe.window.sinks / kept + 8 * block_file.frame(block) / (block * elements)
