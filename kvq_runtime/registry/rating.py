"""Rate a version by its evaluation records, and compare an artifact with publication bounds. Needs no torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvq_runtime.artifact import header
from kvq_runtime.errors import counted
from kvq_runtime.registry.evaluation_records import FULL, SPOKEN, TextRecord, parse, readable

USABLE, LOSSY, NOT_MEASURED = "usable", "too lossy", "not measured"
MAX_RELATIVE, MAX_KL = 0.10, 0.1  # of a usable version: perplexity relative to 16 bit; nats per token
FEWEST = 8  # sequences of a fit without a warning
GUESSED = "guessed"  # `text_split` in the provenance of a model whose file does not say how its tokenizer splits text
UNKNOWN_SPLIT = (
    "the GGUF file's tokenizer.ggml.pre is missing or unknown, so that text was split as GPT-2's: all losses may be "
    "those of tokens that the model never saw; use the model in Hugging Face format"
)
WEEKS = range(200_001, 1_000_000)  # seeds of drift checks: year and week, as in 202614


@dataclass(frozen=True)
class Rating:
    """A word, and its figures as a sentence without a full stop."""

    word: str
    why: str

    def __str__(self) -> str:
        return f"{self.word}: {self.why}"


def rate(record: TextRecord | None) -> Rating:
    """Rate a record by its bounds, or without bounds by MAX_RELATIVE and MAX_KL; None: there is no record."""
    decisive = None if record is None else record.decisive
    if record is None or decisive is None:
        return Rating(NOT_MEASURED, "no evaluation; kvq eval measures it")
    protocol, figures = decisive
    relative, kl, gate = figures.relative, figures.kl, record.result.gate
    text = f"perplexity {relative:+.1%}" + ("" if kl is None else f", KL {kl:.2g} nats") + f", {SPOKEN[protocol]}"
    if gate is not None and gate.bounds:
        return Rating(LOSSY, "; ".join(gate.failed)) if gate.failed else Rating(USABLE, f"{text}, in bounds")
    over = [f"more than +{MAX_RELATIVE:.0%}"] * (not relative <= MAX_RELATIVE)
    over += [f"more than {MAX_KL:g} nats"] * (kl is not None and not kl <= MAX_KL)
    return Rating(LOSSY, f"{text}; {' and '.join(over)}") if over else Rating(USABLE, text)


def rate_records(records: Iterable[TextRecord], fitted: str | None = None) -> Rating:
    """Rate a version by its `main_record`."""
    return rate(main_record(records, fitted))


def rate_version(registry: Any, name: str, version: Any) -> Rating:
    """Rate a version by the evaluation records of its registry."""
    records = readable(registry.evaluations(version.sha256, name))
    return rate_records(records, version.about.get("corpus"))


def main_record(records: Iterable[TextRecord], fitted: str | None = None) -> TextRecord | None:
    """Choose the record that represents a version; None: there is none.

    Records with figures come first, then those of no drift check, of the fit's own text (`fitted`, None: unknown), by
    full encode, and of the most tokens.
    """

    def rank(record: TextRecord) -> tuple[bool, bool, bool, bool, int]:
        about = record.protocol
        same_text = fitted is not None and about.text.source[: header.TOLD] == fitted[: header.TOLD]
        full = record.figures(FULL) is not None
        return record.decisive is not None, drift_week(record) is None, same_text, full, about.windows * about.length

    return max(records, key=rank, default=None)


def drift_week(record: TextRecord) -> int | None:
    """Return the week of a drift check, as in 202614; None for another record."""
    seed = record.protocol.text.seed
    return seed if seed is not None and seed in WEEKS and 1 <= seed % 100 <= 53 else None


def fit_warning(provenance: Mapping[str, Any]) -> str | None:
    """Warn of guessed tokens, and of a fit on few sequences or without held-out ones; None: no fact calls for it."""
    samples, held_out = provenance.get("samples"), provenance.get("held_out", 0)
    warnings = [UNKNOWN_SPLIT] if provenance.get("text_split") == GUESSED else []
    if type(samples) is not int or type(held_out) is not int:
        return "; ".join(warnings) or None
    fitted = samples - held_out
    if fitted < FEWEST:
        less = f" ({samples} less {held_out} held out)" if held_out else ""
        warnings.append(f"fitted on {counted(fitted, 'sequence')}{less}, fewer than {FEWEST}; use more --samples")
    if not held_out:
        warnings.append("none was held out, so that its errors by layer are those of the text it was fitted to")
    return "; ".join(warnings) or None


# ---- bounds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bounds:
    """Publication bounds; None: no bound.

    perplexity_ratio   held-out perplexity over that of the 16-bit model, at least 1
    kl                 divergence from the 16-bit model, nats per token
    beyond             share of blocks, 0 to 1, whose error exceeds the calibration's 99.9% quantile
    """

    perplexity_ratio: float | None = None
    kl: float | None = None
    beyond: float | None = None

    def __post_init__(self):
        for name, bound in self.given.items():
            if name != "beyond" and not (math.isfinite(bound) and bound > 0):
                raise ValueError(f"--max-{name.replace('_', '-')} {bound}; use a number above 0")
        if self.perplexity_ratio is not None and self.perplexity_ratio < 1:
            raise ValueError(f"--max-perplexity-ratio {self.perplexity_ratio}; use at least 1: 1.02 allows +2%")
        if self.beyond is not None and not 0 <= self.beyond <= 1:
            raise ValueError(f"--max-beyond {self.beyond}: a share of blocks; use a number from 0 to 1: 0.02 allows 2%")

    @property
    def given(self) -> dict[str, float]:
        """The bounds that are set."""
        return {name: bound for name, bound in asdict(self).items() if bound is not None}


class Refused(RuntimeError):
    """Artifacts failed their bounds and were not published; `done`: all artifacts of the run."""

    def __init__(self, done: Sequence[Any]):
        reasons = [f"{made.name} was not published. {reason}" for made in done for reason in made.failed]
        super().__init__("; ".join(reasons))
        self.done = list(done)


def failed_bounds(record: TextRecord, bounds: Bounds) -> list[str]:
    """Compare a record's decisive figures with bounds; return a sentence for each bound that fails.

    NaN fails every bound, and so does an evaluation in which nothing was decoded.
    """
    if not bounds.given:
        return []
    if record.decisive is None:
        return [f"a bound cannot be judged; {'; '.join(record.reasons())}"]
    protocol, figures = record.decisive
    if figures.decoded_reads == 0:
        return [f"a bound cannot be judged; {SPOKEN[protocol]}: nothing that was read had been encoded"]
    values = {"perplexity_ratio": 1 + figures.relative, "kl": figures.kl, "beyond": figures.beyond}
    values = {name: math.nan if value is None else value for name, value in values.items()}
    names = {"perplexity_ratio": "perplexity over that of 16 bit", "kl": "KL divergence, nats"}
    unknown = "" if figures.beyond is not None else ", which the artifact does not state"
    names["beyond"] = f"share of blocks beyond the errors in calibration{unknown}"
    return [
        f"{names[name]}, {SPOKEN[protocol]}: {values[name]:.6g}, allowed {bound:.6g}"
        for name, bound in bounds.given.items()
        if not values[name] <= bound
    ]


def with_gate(record: Mapping[str, Any], bounds: Bounds) -> dict[str, Any]:
    """Return the record's JSON with bounds and failures in its result; without bounds, unchanged."""
    if not bounds.given:
        return dict(record)
    parsed = parse(record)
    protocol = None if parsed.decisive is None else parsed.decisive[0]
    gate = {"bounds": bounds.given, "protocol": protocol, "failed": failed_bounds(parsed, bounds)}
    return {**record, "result": {**record["result"], "gate": gate}}
