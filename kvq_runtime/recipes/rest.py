"""The prediction and the bases of `aqua-fisher`, with one step for all: recipes for files.

    r = x - f(keys and values of two layers below, own keys) → z = r B → codes of z / step, in files entropy-coded

f and B are those of `aqua_fisher.py`. There each latent channel has whole bits and a codebook of its own; here all of
all layers are rounded by one step in the unit of the model's loss, and a file of a `PrefixStore` has as many bits of
each code as it says something (`ops/entropy.py`). What a token's codes are like the artifact knows by channel,
and the token by its loudness.

Bits in a name are those of files: all bytes of a kept prefix of 1,024 tokens, sinks (in 16 bits) and frames of blocks
among them, per element, on text of the kind that was fitted to but not that text. Calibration steers by what codes take
of the sequences that it holds out (`kvq_calib/run/share.py`); other text takes more or less, longer prefixes less of
sinks. What the artifact holds, probabilities of codes among it, is not counted. In memory a cache holds a byte
for each channel that is stored at all, at any target: 3 to 8 bits. So these are recipes for prefixes that are kept, not
for a long context in memory.

Source: as `aqua_fisher.py`; Staniszewski and Łańcucki, 2025 (KVTC: entropy-coded principal components of the cache).
Differs: KVTC's bits are by dynamic programming and its coder is DEFLATE; it predicts nothing and weighs errors alike.
"""

from dataclasses import replace

from kvq_runtime.recipe import Family, Recipe, with_each
from kvq_runtime.recipes import aqua_fisher
from kvq_runtime.stages.latent import DeadZone

FAMILY = Family(look=("pink", "o"), golden=("rest-1bit",), compared=("rest-1bit",), combined=("rest",))

WIDTHS = (0.5, 1.0, 1.5, 2.0, 3.0)


def recipe(bits: float) -> Recipe:
    """The recipe whose files take so many bits per element, in the mean over all layers, keys and values."""
    rounding = DeadZone(target=bits, shared=True)
    made = with_each(aqua_fisher.recipe(bits), lambda scheme: replace(scheme, quantize=rounding))
    summary = f"AQUA-KV, bases in the metric of gradients, one step, entropy-coded in files: {bits:g} bits there"
    return replace(made, name=f"rest-{bits:g}bit", summary=summary)


def recipes() -> list[Recipe]:
    """Half a bit to 3 bits."""
    return [*map(recipe, WIDTHS)]
