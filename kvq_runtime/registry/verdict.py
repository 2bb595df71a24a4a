"""Judge measurements: in a word, whether a version can be used, and by bounds, whether an artifact is published.

The word comes first on pages and in commands. Without bounds of its own a version is too lossy where the record that
counts has a perplexity more than a tenth above that of 16 bit, or more than 0.1 nats of divergence. A record that was
judged by bounds is judged by these. Needs no torch.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvq_runtime.artifact import header
from kvq_runtime.errors import Conflict, counted
from kvq_runtime.registry.measured import FULL, SPOKEN, Record, TextRecord, of_text
from kvq_runtime.registry.sound import read, sound

RELATIVE, KL = 0.10, 0.1  # of perplexity, above that of 16 bit; nats per token
FEWEST = 8  # sequences to fit on
USABLE, LOSSY, NOT_MEASURED = "usable", "too lossy", "not measured"
COLOURS = {USABLE: "good", LOSSY: "bad", NOT_MEASURED: "warn"}  # classes of the pages' style sheet
WEEKS = range(200_001, 1_000_000)  # seeds of the records of drift checks: year and week, 202614


@dataclass(frozen=True)
class Verdict:
    """A word, and the figures that it is about, in a sentence without a full stop."""

    word: str
    why: str

    def __str__(self) -> str:
        return f"{self.word}: {self.why}"


def of_record(record: TextRecord | None) -> Verdict:
    """Judge one record of text; None: there is none."""
    decisive = None if record is None else record.decisive
    if record is None or decisive is None:
        return Verdict(NOT_MEASURED, "nothing says what it loses; kvq eval measures it")
    protocol, found = decisive
    relative, kl, gate = found.relative, found.kl, record.result.gate
    said = f"perplexity {relative:+.1%}" + ("" if kl is None else f", KL {kl:.2g} nats") + f", {SPOKEN[protocol]}"
    if gate is not None and gate.bounds:
        failed = "; ".join(gate.failed)
        return Verdict(LOSSY, failed) if failed else Verdict(USABLE, f"{said}, in bounds")
    over = [f"more than +{RELATIVE:.0%}"] * (not relative <= RELATIVE)
    over += [f"more than {KL:g} nats"] * (kl is not None and not kl <= KL)
    return Verdict(LOSSY, f"{said}; {' and '.join(over)}") if over else Verdict(USABLE, said)


def of_records(records: Iterable[Record], fitted: str | None = None, digest: str | None = None) -> Verdict:
    """Judge by the record that counts, `main`."""
    return of_record(main(records, fitted, digest))


def of_version(registry: Any, name: str, version: Any) -> Verdict:
    """Judge a version by what its registry has of it."""
    about = registry.about(name, version)
    records = sound(registry.evaluations(version.sha256, name))
    return of_records(records, about.get("corpus"), about.get("corpus_digest"))


def require(registry: Any, name: str, version: Any) -> None:
    """Raise Conflict for a version that is too lossy."""
    found = of_version(registry, name, version)
    if found.word == LOSSY:
        raise Conflict(
            f"{name}@{version.version} is {found}; kvq compare measures other recipes, and --force (force=True) "
            "promotes this one all the same"
        )


def thin(samples: int, held_out: int) -> str | None:
    """Warn of a fit on few sequences, or without held-out ones; None for any other."""
    fitted, said = samples - held_out, []
    if fitted < FEWEST:
        less = f" ({samples} less {held_out} held out)" if held_out else ""
        said.append(f"fitted on {counted(fitted, 'sequence')}{less}, fewer than {FEWEST}")
    if not held_out:
        said.append("none was held out, so that its errors by layer are those of the text it was fitted to")
    return "; ".join(said) or None


def thinness(provenance: Mapping[str, Any]) -> str | None:
    """`thin` of an artifact's provenance; None where that has no numbers."""
    samples, held = provenance.get("samples"), provenance.get("held_out", 0)
    return thin(samples, held) if type(samples) is int and type(held) is int else None


def main(records: Iterable[Record], fitted: str | None = None, digest: str | None = None) -> TextRecord | None:
    """The record that counts for a version: with figures, of no drift check, on the text of the fit, by full encode, on
    the most tokens, in this order. None: it was not measured.

    fitted   the text of the fit; None: not known
    digest   of its corpus, which decides of a name that is cut where the record has one too; None: not known
    """

    def rank(record: TextRecord) -> tuple[bool, bool, bool, bool, int]:
        given, decisive = record.protocol, record.decisive
        own = fitted is not None and given.text.source[: header.TOLD] == fitted[: header.TOLD]
        if own and len(fitted or "") >= header.TOLD and None not in (digest, given.text.corpus_digest):
            own = digest == given.text.corpus_digest  # of a name that is cut
        usual, full = week(record) is None, record.figures(FULL) is not None
        return decisive is not None, usual, own, full, given.windows * given.length

    return max(of_text(records), key=rank, default=None)


def week(record: TextRecord) -> int | None:
    """The week of a drift check, as in 202614; None for another record."""
    seed = record.protocol.text.seed
    return seed if seed is not None and seed in WEEKS and 1 <= seed % 100 <= 53 else None


# ---- bounds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bounds:
    """Bounds on what an artifact costs; None: no bound.

    perplexity_ratio   held-out perplexity over that of the 16-bit model; above 1 it has got worse
    kl                 divergence from the 16-bit model, nats per token
    beyond             share of blocks whose error is beyond 99.9% of those in calibration, 0 to 1
    """

    perplexity_ratio: float | None = None
    kl: float | None = None
    beyond: float | None = None

    def __post_init__(self):
        for name, bound in self.given.items():
            if name != "beyond" and not (math.isfinite(bound) and bound > 0):
                raise ValueError(f"--max-{name.replace('_', '-')} {bound}; use a number above 0")
        if self.perplexity_ratio is not None and self.perplexity_ratio < 1:
            raise ValueError(
                f"--max-perplexity-ratio {self.perplexity_ratio}: perplexity over that of 16 bit, which is the least "
                "that can be asked for; use a number of at least 1: 1.02 allows +2%"
            )
        if self.beyond is not None and not 0 <= self.beyond <= 1:
            raise ValueError(f"--max-beyond {self.beyond}: a share of blocks; use a number from 0 to 1: 0.02 allows 2%")

    @property
    def given(self) -> dict[str, float]:
        """The bounds that there are."""
        return {name: bound for name, bound in asdict(self).items() if bound is not None}


class Refused(RuntimeError):
    """Artifacts do not keep their bounds, and were not published; `done`: all that was made."""

    def __init__(self, done: Sequence[Any]):
        reasons = [f"{one.name} was not published. {reason}" for one in done for reason in one.failed]
        super().__init__("; ".join(reasons))
        self.done = list(done)


def passes(record: TextRecord, bounds: Bounds) -> list[str]:
    """Compare an evaluation record with bounds; return the reasons why it does not pass, none if it does.

    The full encode is judged where it was measured, else what was measured in use. A figure that is no number passes no
    bound, and neither does an evaluation in which nothing was decoded: it shows nothing about what is bounded.
    """
    if not bounds.given:
        return []
    if record.decisive is None:
        return [f"a bound cannot be judged; {'; '.join(record.reasons())}"]
    protocol, result = record.decisive
    if result.decoded is not None and result.decoded.reads == 0:
        return [f"a bound cannot be judged; {SPOKEN[protocol]}: nothing that was read had been encoded"]
    found = {"perplexity_ratio": 1 + result.relative, "kl": result.kl, "beyond": result.beyond}
    found = {name: math.nan if value is None else value for name, value in found.items()}
    named = {"perplexity_ratio": "perplexity over that of 16 bit", "kl": "KL divergence, nats"}
    unknown = "" if result.beyond is not None else ", which the artifact does not state"
    named["beyond"] = f"share of blocks beyond the errors in calibration{unknown}"
    return [
        f"{named[name]}, {SPOKEN[protocol]}: {found[name]:.6g}, allowed {bound:.6g}"
        for name, bound in bounds.given.items()
        if not found[name] <= bound
    ]


def judged(record: Mapping[str, Any], bounds: Bounds) -> dict[str, Any]:
    """The record's JSON with bounds and verdict in its result; without bounds, itself."""
    if not bounds.given:
        return dict(record)
    found = read(record, TextRecord)
    decisive = None if found.decisive is None else found.decisive[0]
    verdict = {"bounds": bounds.given, "protocol": decisive, "failed": passes(found, bounds)}
    return {**record, "result": {**record["result"], "gate": verdict}}
