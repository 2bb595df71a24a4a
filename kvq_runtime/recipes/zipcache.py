"""ZipCache: keys per channel, values per token after every channel was divided by a scale of its own.

    zipcache-2bit          as published, but for the bits of salient tokens: keys channelwise, values channel-separable
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

from functools import partial

from kvq_runtime.policies.prompt_fit import PromptFit
from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.recipes import aqua, kivi
from kvq_runtime.stages.separable import Separable


def scheme(bits: int) -> Scheme:
    """Per token, channels divided by their scales."""
    return Scheme(Separable(bits))


def zipcache(name: str, policies=()) -> Recipe:
    """Keys per channel, values per token, 2 bits."""
    how = "calibrated channel scales" if not policies else "channel scales of each prompt"
    summary = f"ZipCache, 2 bits: keys per channel, values per token over {how}"
    return Recipe(name, kivi.keys(2, "all"), scheme(2), summary=summary, policies=policies)


def predicted(name: str) -> Recipe:
    """AQUA-KV with 4 bits for its first layer."""
    return aqua.aqua(name, scheme(2), scheme(4), "AQUA-KV over channel-separable rounding, 2 bits")


FAMILY = Family(
    presets={
        "zipcache-2bit": zipcache,
        "zipcache-online-2bit": partial(zipcache, policies=(PromptFit(),)),
        "aqua-zipcache-2bit": predicted,
    },
    compared=("zipcache-2bit",),
)
