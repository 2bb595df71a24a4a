"""ZipCache: keys per channel, values per token after every channel was divided by a scale of its own.

    zipcache-*bit          as published, but for the bits of salient tokens: keys channelwise, values channel-separable
    zipcache-tokens-2bit   keys channel-separable too, before RoPE, where channels keep their sizes; single tokens can
                           be decoded
    zipcache-online-2bit   with the scales of each row's own prompt, as in the paper
    aqua-zipcache-2bit     what AQUA-KV's prediction leaves, keys and values channel-separable

Values store a step and a low end per token, so that "2 bits" are 2 and 32 bits per token: 2.25 of 128 channels, 2.03 of
1024. Keys store them per channel of a block of 128 tokens: 2.25.

Source: He et al., 2024 (ZipCache, arXiv 2405.14256); the settings called theirs below are those of published summaries
and of the authors' demonstration, not checked against the paper's text.
Differs: the bits of a token do not depend on its salience (theirs has 4 bits for salient tokens and 2 for
the others), so that this is the paper's baseline and not all of its method; scales are calibrated (theirs are of each
prompt); keys have a range per block of 128 tokens (theirs: of the prompt, then of every 100 generated tokens); 4 first
and the 128 newest tokens stay exact (theirs: none of the prompt, and up to 100 generated ones).
"""

from dataclasses import replace

from kvq_runtime.policies.prompt_fit import PromptFit
from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.recipes import aqua, kivi
from kvq_runtime.stages.separable import Separable

FAMILY = Family(
    papers={"ZipCache": "He et al., 2024, arXiv 2405.14256"},
    golden=("zipcache-2bit", "aqua-zipcache-2bit"),
)

BITS = (2, 4)


def scheme(bits: int) -> Scheme:
    """Per token, channels divided by their scales."""
    return Scheme(Separable(bits))


def recipes() -> list[Recipe]:
    """2 and 4 bits; at 2 also keys as the values, the scales of each prompt, and AQUA-KV with 4 for its first layer."""
    found = []
    for bits in BITS:
        keys, values = kivi.keys(bits, "all"), scheme(bits)
        summary = f"ZipCache, {bits} bits: keys per channel, values per token over calibrated channel scales"
        found.append(Recipe(f"zipcache-{bits}bit", keys, values, summary=summary))
    two, summary = scheme(2), "the same, 2 bits, keys before RoPE as the values"
    tokens = Recipe("zipcache-tokens-2bit", two, two, "pre", summary=summary)
    summary = "ZipCache, 2 bits, channel scales of each prompt"
    online = replace(found[0], name="zipcache-online-2bit", summary=summary, policies=(PromptFit(),))
    summary = "AQUA-KV over channel-separable rounding, 2 bits"
    return [*found, tokens, online, aqua.aqua("zipcache-2bit", two, scheme(4), summary)]
