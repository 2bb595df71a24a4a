"""The page records/compare.md, out of records: tables of what recipes cost, at equal bits, and held to the papers.

Where the best of several is told, it was chosen by every other window and is reported on the rest, so that no figure is
low for having been chosen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvq_calib.evaluate.perplexity import Score
from kvq_calib.report.looks import short
from kvq_calib.report.tables import comparison, notes, relative, size_of
from kvq_runtime.recipe import facts, family
from kvq_runtime.registry.measured import FULL, SPOKEN, Figures, Scores, TextRecord, texts
from scripts.real_page import table

BUDGETS = (1.25, 2.1, 3.1)
ABOUT_BITS = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4)  # of the table that the page opens with
ROUND = 0.15  # bits more that still are about as many: scales
EVEN, ODD = slice(0, None, 2), slice(1, None, 2)  # windows that recipes are chosen by, and that are reported
OPENING, PICTURE = "frontier.png", "compare.png"  # of the first model; of all models and texts
NEAR = 0.5  # bits more than the best combination that a paper's recipe may have
ABOUT = """
`make compare` measures and writes this page, under two protocols. Full: one forward pass in which every token but the
first 4 is encoded and decoded before anything attends to it, whatever a recipe's window and block. In use: the first 4
tokens stay exact and there is no recent window (`--sinks 4 --recent 0`), tokens arrive in steps of 32, and a block is
encoded when it is full, so that the newest 1 to 128 tokens stay exact, or 1 to 32 where blocks have 32 tokens (column
block; SubKV's window may keep more): recipes of different blocks are not compared at equal exact tokens there. Decoded:
the share of attention's weight that lay on decoded tokens. Recipes that choose among tokens have no full encode. Those
that are fitted to their prompt are fitted to the first half of the window in a full encode, and in use to the tokens
that have come when the first block is full. Bits are those of keys and values together, scales and all metadata
included: asymptotic, of a cache that holds a window, and of one of 4096 tokens; where a recipe holds a part of the
tokens, per token seen. Predictors and bases, which an artifact holds once for all sequences, are not included.
Attention: squared error of its output over its energy, mean over layers, everything but the sinks encoded or as in use,
with exact queries, and fitted to the prompt as in use; empty where tokens are evicted or selected. H2O's fifth of such
short windows fills one block or none, so that its recipes cost what the evicted tokens cost. Models of 0.26 to 4.1
million parameters have no massive outliers and short contexts: rankings on them do not hold for larger ones, nor need
those of a model of 135 million hold for one of 7 billion.
"""
SUMMARY = """
The least divergence within about {bits} bits per element by full encode, {model} ({size} parameters), and beside it the
least that a paper's own recipe has there. Of each: perplexity against 16 bit, KL divergence in nats. Chosen by half of
the {windows} held-out windows and reported on the other half; on other texts, all windows. ± is a standard error over
windows. All other figures are folded away below.
"""
EQUAL = """
By full encode. Chosen on every other held-out window, the first among them, and reported on the rest, so that no figure
is lower for having been chosen. Of the recipes that combine papers, or choose bits by layer (`auto`), the one with the
lowest perplexity on the choosing windows within the budget, and at most a tenth below it; beside it, of each paper,
likewise the best of those with at least as many bits and at most half a bit more, or, where it has none, the next.
Recipes without a full encode (SubKV's window) are not in it. Perplexity is relative to 16 bit, then KL
divergence; in bold where the paper's is better. Perplexities within the standard error of 16 bit's differ by chance,
and may be lower than it; divergences do not. Our variants of a paper's method (PolarQuant to the last level,
water-filled SVDq) count as the paper's.
"""
COMBINED = ("auto", *(start for one in facts().values() for start in one.combined))
OURS = (*COMBINED, *(start for one in facts().values() for start in one.varied))  # recipes that no paper has


@dataclass(frozen=True)
class Model:
    """A model, the text that it was made for, and how much of that is used."""

    name: str
    folder: str
    text: str | None
    samples: int
    length: int
    windows: int

    def path(self, data: Path) -> str:
        """As `--model` takes it."""
        return str(data / self.folder) if self.text else self.folder


@dataclass(frozen=True)
class Cost:
    """The loss of a recipe at its bits, under one protocol."""

    recipe: str
    bits: float
    figures: Figures


Found = dict[Model, Sequence[TextRecord]]  # the records of each model


def page(
    found: Mapping[Model, Sequence[TextRecord]],
    absent: Mapping[Model, Sequence[str]],
    beside: Sequence[str] = (),
) -> str:
    """The text of compare.md.

    absent   of each model, why recipes are not among the measured ones
    beside   what else was found of the first: it follows the first table
    """
    drawn = {model: records for model, records in found.items() if any(one.figures(FULL) for one in records)}
    parts = ["# Recipes compared", *_pictured(dict(list(drawn.items())[:1]), OPENING), *summary(found), *beside]
    if len(drawn) > 1 or any(texts(records) for records in drawn.values()):
        parts += [_folded("The same picture of every model, in and out of the domain", *_pictured(drawn, PICTURE))]
    parts += [_section(model, records, absent[model]) for model, records in found.items()]
    equal = _at_equal_bits(found)
    parts += [_folded("At equal bits and exact tokens", " ".join(EQUAL.split()), table(equal))] if equal else []
    parts += [_folded("Where the papers' rankings hold", _verdicts(found))]
    parts += [_folded("How this was measured, and what it does not say", " ".join(ABOUT.split()))]
    return "\n\n".join(parts) + "\n"


def _pictured(found: Mapping[Model, Sequence[TextRecord]], file: str) -> list[str]:
    """The picture of these models, if there are any."""
    names = ", ".join(f"{model.name} ({_size(records)} parameters)" for model, records in found.items())
    return [f"![KL divergence by bits, by full encode: {names}]({file})"] if found else []


def _folded(title: str, *parts: str) -> str:
    """Text that a reader unfolds."""
    return "\n\n".join([f"<details>\n<summary>{title}</summary>", *parts, "</details>"])


def _size(records: Sequence[TextRecord]) -> str:
    return size_of(records[0].protocol.model.parameters)


def summary(found: Mapping[Model, Sequence[TextRecord]]) -> list[str]:
    """Write the page's summary: the best at some budgets of the first model that was measured by full encode."""
    *some, last = (f"{one:g}" for one in ABOUT_BITS)
    for model, records in found.items():
        rows, held = best_at(records), records[0].protocol.windows
        if rows:
            bits = f"{', '.join(some)} and {last}"
            said = SUMMARY.format(model=model.name, size=_size(records), windows=held, bits=bits)
            return [" ".join(said.split()), table(rows)]
    return []


def _section(model: Model, records: Sequence[TextRecord], absent: Sequence[str]) -> str:
    about = records[0].protocol
    title = f"{model.name} ({_size(records)} parameters): all {len(records)} recipes"
    return _folded(
        title,
        f"Fitted on {model.samples} sequences of {model.length} tokens of {about.text.source}, measured on "
        f"{about.windows} held-out windows of {about.length}; ± is a standard error over windows.",
        f"![{model.name}, {_size(records)} parameters](compare-{model.name}.png)",
        table(comparison(records)),
        *notes(records),
        *absent,
    )


def best_at(records: Sequence[TextRecord], budgets: Sequence[float] = ABOUT_BITS) -> list[dict[str, Any]]:
    """A row a budget: the recipe of least divergence within it, and the papers' recipe of least divergence beside it.

    By full encode. Chosen by the even windows of the first text, from 0, and reported on its odd ones and on all of
    other texts, so that no figure is low for having been chosen. `ROUND` more bits than the budget count as within it.
    """
    results = [one for one in results_of(records, FULL) if one.figures.windows and len(one.figures.windows.kl) > 1]
    chosen = {one.recipe: on_windows(one.figures, EVEN).kl for one in results}
    rows = []
    for budget in budgets:
        within = [one for one in results if one.bits <= budget + ROUND and chosen[one.recipe] > 0]
        papers = [one for one in within if not one.recipe.startswith(OURS)]
        if within:
            row: dict[str, Any] = {"bits, about": f"{budget:g}"}
            for head, some in (("best here", within), ("best of a paper's", papers)):
                row |= _cells(head, min(some, key=lambda one: chosen[one.recipe], default=None), records)
            rows.append(row)
    return rows


def _cells(head: str, one: Cost | None, records: Sequence[TextRecord]) -> dict[str, Any]:
    """The cells of one recipe: its name and bits, and on each text perplexity against 16 bit, and divergence."""
    heads = {text: f"{head}: {text or 'in domain'}" for text in ("", *texts(records))}
    if one is None:
        return {head: "none"} | dict.fromkeys(heads.values(), "")
    own = next(record for record in records if record.result.recipe == one.recipe)
    reported: dict[str, Figures | None] = {"": on_windows(one.figures, ODD)}
    reported |= {name: other.figures(FULL) for name, other in own.elsewhere().items()}
    said = {text: f"{relative(part)}, {short(part.kl)}" for text, part in reported.items() if part}
    return {head: f"`{one.recipe}` ({one.bits:.2f})"} | {name: said.get(text, "none") for text, name in heads.items()}


def results_of(records: Sequence[TextRecord], protocol: str) -> list[Cost]:
    """The costs of those that have figures under a protocol."""
    pairs = [(one.result, one.figures(protocol)) for one in records]
    return [Cost(result.recipe, result.bits["asymptotic"], found) for result, found in pairs if found is not None]


def _at_equal_bits(found: Mapping[Model, Sequence[TextRecord]]) -> list[dict[str, str]]:
    """A row a model and budget: the best combination within it, and what each paper offers for as many bits or more."""
    rows = []
    for model, records in found.items():
        results = results_of(records, FULL)
        for budget in BUDGETS:
            row = rivals(results, budget)
            if row:
                rows.append({"model": model.name, "budget": f"{budget:g}"} | row)
    return rows


def rivals(results: Sequence[Cost], budget: float) -> dict[str, str]:
    """The cells of one row, {} where no combination is within the budget."""
    combined = [one for one in results if one.recipe.startswith(COMBINED)]
    within = [one for one in combined if 0.9 * budget <= one.bits <= budget]
    if not within:
        return {}
    best = min(within, key=_chosen_by)
    row = {"best combination": _offer(best, best)}
    for file, (paper, *_) in ((file, one.papers) for file, one in facts().items() if one.opposed):
        own = [one for one in results if one not in combined and family(one.recipe) == file and one.bits >= best.bits]
        near = [one for one in own if one.bits <= best.bits + NEAR]
        fewest = min((one.bits for one in own), default=0.0)
        if own:
            row[paper] = _offer(min(near or [one for one in own if one.bits == fewest], key=_chosen_by), best)
    return row


def _chosen_by(one: Cost) -> float:
    """The perplexity on the windows that recipes are chosen by: the even ones, from 0."""
    return on_windows(one.figures, EVEN).perplexity


def on_windows(one: Figures, some: slice) -> Figures:
    """The figures of some of the windows alone; needs one at least."""
    loss, reference_loss, kl = (list(getattr(one.windows, name)[some]) for name in ("loss", "reference_loss", "kl"))
    own = Score(losses=loss, kls=kl)
    relative, spread = own.against(Score(losses=reference_loss))
    found = replace(one, perplexity=own.perplexity, relative=relative, relative_se=spread, kl=own.kl)
    return replace(found, windows=Scores(loss, reference_loss, kl))


def _offer(one: Cost, best: Cost) -> str:
    """Write a recipe's cost on the odd windows, by which it was not chosen."""
    own, other = (on_windows(given.figures, ODD) for given in (one, best))
    cost, kl = relative(own), f"{own.kl:.2g}"
    cost = f"**{cost}**" if own.perplexity < other.perplexity else cost
    kl = f"**{kl}**" if own.kl < other.kl else kl
    return f"{one.recipe}, {one.bits:.3g} bits: {cost}, {kl}"


def _verdicts(found: Mapping[Model, Sequence[TextRecord]]) -> str:
    """A row a claim, a column a model: whether it holds there, and what both sides cost at which bits."""
    rows = []
    for claim in (claim for one in facts().values() for claim in one.claims):
        row = {"claim": claim.text, "recipes": f"{claim.better} / {claim.worse}", "protocol": SPOKEN[claim.protocol]}
        for model, records in found.items():
            results = {one.recipe: one for one in results_of(records, claim.protocol)}
            if claim.better in results and claim.worse in results:
                pair = [results[name] for name in (claim.better, claim.worse)]
                costs = " / ".join(f"{one.figures.kl:.2g} at {one.bits:.3g} bits" for one in pair)
                row[model.name] = f"{verdict(*pair)}: {costs}"
        if len(row) > 3:
            rows.append(row)
    return (
        "KL divergence from the 16-bit model, nats per token, of both recipes. No difference: within 5%, at the same "
        "bits. With more bits: over a quarter of a bit more. Undecided: the one that should be better diverges more, "
        "but has over a quarter of a bit fewer.\n\n" + table(rows)
    )


def verdict(better: Cost, worse: Cost) -> str:
    """Judge a claim by two costs; bits within a quarter count as the same."""
    fewer, one, other = worse.bits - better.bits, better.figures.kl, worse.figures.kl
    if abs(fewer) <= 0.25 and abs(one - other) <= 0.05 * other:
        return "no difference"
    if one < other:
        return "holds, with more bits" if fewer < -0.25 else "holds"
    return "undecided" if fewer > 0.25 else "**does not hold**"
