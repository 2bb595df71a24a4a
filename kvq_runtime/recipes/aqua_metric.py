"""AQUA-KV's prediction from keys and values, bases in the metric of what errors cost, and bits shared out by it.

    r = x - f(keys and values below, this layer's keys) → z = r B → Lloyd–Max of z / g, bits by reverse water-filling

    f   keys are predicted from the values below too, and values from the keys below
    B   of keys in the metric of the queries before RoPE, averaged over distances; of values in that of the output
        projection: an error of z costs its square
    g   a token's gain of 3 bits: what the calibrated deviations lack where text is of another kind
    bits of all predicted layers, of keys and of values, are filled in one order by what errors cost

No paper has these together. Bits in a name are the mean over the predicted layers, with everything that is stored of a
token; the first layer, from which all are predicted, has 4. With `-all` its bits are shared out,
too, and the name's are the mean of all layers: for fewer bits than 4 in the first layer leave over. The bases are two
matrices each, which are counted as predictors are.

`-vocab` stores which token it is in place of the first layer's keys and values, which is all that they say: they are
exact but for bfloat16, and cost 11 to 18 bits a token. The table is 4 bytes times vocabulary times width.

Predictors and bases may be stored in 4 bits, which cost 4.5 with their scales, and the table of a vocabulary, 1.125
bytes times vocabulary times width: `+all.predict.storage=gptq4+all.rotate.storage=gptq4+all.quantize.storage=rtn4`.

What was measured is in benchmarks/records; models as small as that one flatter predictions and bases.

Source: Shutova et al., 2025 (AQUA-KV), algorithm 1; Hong et al., 2025 (SVDq), sections 4.1 and 4.2; Cover and Thomas,
2006, section 10.3.3 (reverse water-filling); Gersho and Gray, 1992, section 12.10 (shape and gain).
Differs: values have a basis too (SVDq leaves them); all channels of a schedule are filled by their eigenvalues.
"""

from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.stages.fitted_codebook import Vocabulary
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.predict import Linear, Mean
from kvq_runtime.stages.rotate import OutputBasis, QueryBasis

FAMILY = Family(
    golden=("aqua-metric-1bit", "aqua-metric-1bit-vocab",
            "aqua-metric-1bit+all.predict.storage=gptq4+all.rotate.storage=gptq4+name=aqua-metric-1bit-gptq",
            "aqua-metric-1bit-vocab+all.predict.storage=gptq4+all.rotate.storage=gptq4+all.quantize.storage=rtn4"
            "+name=aqua-metric-1bit-vocab-4bit"),
    compared=("aqua-metric-0.25bit-vocab", "aqua-metric-0.5bit-vocab", "aqua-metric-0.75bit-vocab",
              "aqua-metric-1bit-vocab", "aqua-metric-1.5bit-vocab", "aqua-metric-2bit-vocab",
              "aqua-metric-0.5bit-all", "aqua-metric-0.5bit", "aqua-metric-1bit", "aqua-metric-1.5bit",
              "aqua-metric-2bit"),
)  # fmt: skip

WIDTHS = (0.5, 1.0, 1.5, 2.0)
BY_TOKEN = (0.25, 0.75)  # widths that only `-vocab` has
GAIN = 3
FIRST = 4.0


def recipe(name: str, rounding: Mixed, first: Mixed | Vocabulary, summary: str) -> Recipe:
    """The recipe with these bits in the predicted layers, and this for the first."""
    bases = QueryBasis(queries="averaged"), OutputBasis()
    key, value = (Scheme(rounding, predict=Linear(both=True), rotate=basis) for basis in bases)
    own = bases if first.takes_latents else (None, None)
    first_key, first_value = (Scheme(first, predict=Mean(), rotate=basis) for basis in own)
    return Recipe(f"aqua-metric-{name}", key, value, "pre", {0: (first_key, first_value)}, summary)


def recipes() -> list[Recipe]:
    """0.5 to 2 bits above a first layer of 4 bits, 0.25 to 2 above token numbers, and half a bit in all layers."""
    found, how = [], "AQUA-KV from keys and values, bases in the metric of errors, bits shared out"
    for bits in sorted((*WIDTHS, *BY_TOKEN)):
        rounding, first = Mixed(target=bits, gain=GAIN, shared=True), Mixed(target=FIRST, gain=GAIN)
        if bits in WIDTHS:
            found.append(recipe(f"{bits:g}bit", rounding, first, f"{how}, {bits:g} bits"))
        found.append(
            recipe(f"{bits:g}bit-vocab", rounding, Vocabulary(), f"{how}, {bits:g} bits, first layer by token")
        )
    half = Mixed(target=0.5, gain=GAIN, shared=True)
    return [*found, recipe("0.5bit-all", half, half, f"{how} in all layers, 0.5 bits")]
