"""Evaluate what a run fitted on held-out text, before it is published.

The text of a run is chosen, and kept, before the first layer, so that too little of it stops a run at its beginning.
Finished units of the evaluation are kept in the run folder: a run that was stopped repeats none of them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvq_calib.evaluate import record
from kvq_calib.evaluate.ledger import Ledger
from kvq_calib.evaluate.record import Protocol
from kvq_calib.evaluate.subject import Subject
from kvq_calib.run.plan import Plan
from kvq_calib.run.run import Run
from kvq_calib.text import corpus
from kvq_calib.text.corpus import Batch
from kvq_runtime.artifact import artifact
from kvq_runtime.artifact.artifact import Artifact

SHARE = 32  # of the tokens of the fit one in so many is measured on,
TOKENS = 32768  # and no more than these
PROTOCOL = Protocol(error_windows=2)


def windows(plan: Plan, length: int) -> int:
    """Return the default number of windows: a small part of the run, and two for a standard error."""
    return max(2, min(plan.tokens // SHARE, TOKENS) // length)


def choose(run: Run, also: Sequence[str] = (), asked: int | None = None) -> tuple[Batch, dict[str, Batch]]:
    """The text to measure on, and those of other kinds by name; from the run folder if they were chosen before.

    also    texts of other kinds, as `corpus.others` takes them
    asked   how many windows, as long as the fit's sequences, or ValueError; None: `windows(...)`, or as many as there
            are
    """
    plan, files, ledger = run.plan, run.files, Ledger(run.folder / "evaluated")
    length = min(plan.seq_len, files.context)
    count = asked or windows(plan, length)

    def beside() -> dict[str, Any]:
        chosen = corpus.select_others(also, plan.corpus, files.path, count, length, plan.seed)
        return {name: batch.to_json() for name, batch in chosen.items()}

    def chosen() -> dict[str, Any]:
        try:
            return corpus.select_fewer(plan.corpus, files.path, count, length, plan.seed, asked or 1).to_json()
        except corpus.TooLittle as error:
            raise ValueError(f"{error}; --no-eval leaves the evaluation out") from None

    own = ledger.kept(chosen, text=[plan.corpus, files.id, asked, count, length, plan.seed])
    given = corpus.others(also)
    digests = {name: digest for source in given.values() for name, digest in corpus.in_files(source).items()}
    texts = [list(also), plan.corpus, files.id, count, length, plan.seed, *([digests] if digests else [])]
    others = ledger.kept(beside, texts=texts) if given else {}
    return Batch.of_json(own), {name: Batch.of_json(one) for name, one in others.items()}


def subjects(fitted: Mapping[str, Artifact]) -> list[Subject]:
    """The artifacts as fitted, before anything is published, by the recipe's name."""
    return [
        Subject.of(made, hashlib.sha256(artifact.to_bytes(made)).hexdigest(), name, published=False)
        for name, made in fitted.items()
    ]


def evaluate(
    run: Run,
    fitted: Mapping[str, Artifact],
    beside: Sequence[Subject] = (),
    asked: int | None = None,
    protocol: Protocol = PROTOCOL,
    also: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """One record per artifact, in their order, then one per subject `beside` them.

    The whole model is on the device for this, in the precision of `kvq eval`: float32 on a CPU, else as stored.
    """
    batch, texts = choose(run, also, asked)
    asked_of = [*subjects(fitted), *beside]
    total, done = record.work(run.files, batch, len(asked_of), protocol, texts), 0

    def progressed(tokens: int) -> None:
        nonlocal done
        done += tokens
        run.report(-1, "evaluation", done, total, tokens)

    torch.use_deterministic_algorithms(False)  # of a fit; what a cache does has no such version for every operation
    ledger = Ledger(run.folder / "evaluated")
    told = {"progress": progressed, "ledger": ledger, "others": texts}
    return record.evaluate(run.files, batch, asked_of, protocol, run.plan.device, **told)
