"""Write what a version comes to: sizes, losses on each text, and whether it keeps its bounds."""

from typing import Any

from kvq_calib.report.page.html import Html, folded, table, tag, tiles
from kvq_calib.report.page.losses import deciding
from kvq_calib.report.page.words import Known, figure, fixed, missing, model_of, reference, share, spread
from kvq_runtime.cli.table import percent
from kvq_runtime.registry.measured import SPOKEN
from kvq_runtime.store.memory import human

_CAUTION = "Every figure is of a small model: it says little about larger models, long contexts or tasks."
_HOW = (
    " ± is a standard error over windows. Full encode: every token but the sinks is encoded before it is read. "
    "Decoded: the share of attention's weight that came out of encoded blocks."
)
_HEADS = ("text", "against 16 bit", "KL, nats", "protocol", "domain", "16 bit", "perplexity", "top-1", "decoded")
SMALL = 1_000_000_000  # parameters below which figures say little about the models people serve


def summary(known: Known) -> list[Any]:
    """Tiles, losses and bounds."""
    recipe, decisive = known["recipe"] or {}, deciding(known["losses"])
    figures = [(recipe.get("name", "unknown"), "recipe")]
    if recipe:
        figures.append((f"{recipe['bits']:.3g}", "bits per element, of one more token"))
    for one in known.get("sizes", []):
        said = f"{human(one['bytes'])} of {human(one['of_16_bit'])}"
        figures.append((f"{one['bits']:.3g}", f"bits at {one['tokens']:,} tokens, all bytes: {said}"))
    if decisive:
        figures.append((percent(decisive["relative"]), f"perplexity against 16 bit, {SPOKEN[decisive['protocol']]}"))
        figures.append((f"{decisive['kl']:.3g}", f"KL divergence, nats per token, {SPOKEN[decisive['protocol']]}"))
    least = known.get("smaller_from")
    begins = (
        "is never smaller than in 16 bit" if least is None else f"is smaller than in 16 bit from {least:,} tokens on"
    )
    about = f"Bytes are computed from shapes, for one sequence, with what all share. Such a cache {begins}."
    computed = about if recipe else None
    return [tiles(figures), tag("p", computed, class_="soft"), *losses(known), *bounds(known)]


def losses(known: Known) -> list[Any]:
    """Losses by text and protocol, and all that the registry has of them."""
    if not known["losses"]:
        return [tag("h3", "Loss"), missing(f"kvq eval {reference(known)} --model {model_of(known)}")]
    rows = []
    for one in known["losses"]:
        domain = {True: "in", False: "out", None: "not known"}[one["in_domain"]]
        row = {"text": one["text"], "domain": domain, "protocol": SPOKEN[one["protocol"]]}
        if "reason" in one:
            rows.append(row | {"decoded": one["reason"]})
            continue
        row |= {"16 bit": fixed(one["reference_perplexity"]), "perplexity": fixed(one["perplexity"])}
        row |= {"against 16 bit": spread(percent(one["relative"]), one["relative_se"], ".2%")}
        row |= {"KL, nats": spread(figure(one["kl"]), one["kl_se"], ".2g")}
        rows.append(row | {"top-1": share(one["top1"], ".2%"), "decoded": share(one["decoded"])})
    about = known["evaluation"]
    size = about["parameters"]
    small = size is not None and size < SMALL
    return [
        tag("h3", "Loss, in and out of the domain of the fit"),
        table(rows, heads=_HEADS),
        tag("p", " ".join(about["texts"]), _HOW, class_="soft"),
        tag("p", _CAUTION, class_="soft") if small else None,
        folded(f"All {len(known['records'])} figures that the registry has of this version", table(known["records"])),
    ]


def bounds(known: Known) -> list[Html]:
    """The verdicts on bounds, and what weekly checks found."""
    said = []
    for one in known["gate"]:
        given = ", ".join(f"{name} {bound}" for name, bound in one["bounds"].items())
        when = f"Week {one['week']}" if one["week"] else "At publication"
        kept = "; ".join(one["failed"]) or "kept"
        said.append(tag("p", f"{when}, bounds {given}: ", tag("span", kept, class_="bad" if one["failed"] else "good")))
    if not said:
        said = [tag("p", "No bounds were given: kvq-calibrate --max-perplexity-ratio, --max-kl.", class_="soft")]
    return [tag("h3", "Bounds"), *said]
