"""Evaluate what a run fitted, on held-out text, before anything is published: the stage between fit and publication.

The text is chosen, and kept, before the first layer, so that too little of it stops a run at its beginning. Finished
units of the evaluation are kept in the run folder: a run that was stopped repeats none of them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
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


def choose(run: Run, asked: int | None = None) -> Batch:
    """The text to measure on, from the run folder if it was chosen before; windows as long as the fit's sequences.

    asked   how many windows, or ValueError; None: `windows(...)`, or as many as there are
    """
    plan, ledger = run.plan, Ledger(run.folder / "evaluated")
    length = min(plan.seq_len, run.files.context)
    count = asked or windows(plan, length)
    unit = {"text": [plan.corpus, run.files.id, asked, count, length, plan.seed]}
    kept = ledger.read(**unit)
    if kept is None:
        kept = _kept(_select(plan, run.files.path, count, length, at_least=asked or 1))
        ledger.write(kept, **unit)
    return _batch(kept)


def choose_others(run: Run, also: Sequence[str], asked: int | None = None) -> dict[str, Batch]:
    """The texts of other kinds to measure on, by name, kept likewise; `also` as `corpus.others` takes it."""
    if not corpus.others(also):
        return {}
    plan, ledger = run.plan, Ledger(run.folder / "evaluated")
    length = min(plan.seq_len, run.files.context)
    count = asked or windows(plan, length)
    unit = {"texts": [list(also), plan.corpus, run.files.id, count, length, plan.seed]}
    kept = ledger.read(**unit)
    if kept is None:
        found = corpus.select_others(also, plan.corpus, run.files.path, count, length, plan.seed)
        kept = {name: _kept(batch) for name, batch in found.items()}
        ledger.write(kept, **unit)
    return {name: _batch(one) for name, one in kept.items()}


def _kept(batch: Batch) -> dict[str, Any]:
    return {"tokens": batch.tokens_BT.tolist(), "digest": batch.digest, "description": batch.description}


def _batch(kept: Mapping[str, Any]) -> Batch:
    return Batch(torch.tensor(kept["tokens"], dtype=torch.int32), kept["digest"], kept["description"])


def _select(plan: Plan, tokenizer: Path, count: int, length: int, at_least: int) -> Batch:
    while True:
        try:
            return corpus.select(plan.corpus, tokenizer, count, length, plan.seed, "held-out")
        except corpus.TooLittle as error:
            if error.found < at_least:
                raise ValueError(f"{error}; --no-eval leaves the evaluation out") from None
            count = error.found


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
    batch, texts = choose(run, asked), choose_others(run, also, asked)
    own = [
        Subject.of(made, hashlib.sha256(artifact.to_bytes(made)).hexdigest(), name, published=False)
        for name, made in fitted.items()
    ]
    subjects = [*own, *beside]
    total, done = record.work(run.files, batch, len(subjects), protocol, texts), 0

    def progressed(tokens: int) -> None:
        nonlocal done
        done += tokens
        run.report(-1, "evaluation", done, total, tokens)

    torch.use_deterministic_algorithms(False)  # of a fit; what a cache does has no such version for every operation
    ledger = Ledger(run.folder / "evaluated")
    told = {"progress": progressed, "ledger": ledger, "others": texts}
    return record.evaluate(run.files, batch, subjects, protocol, run.plan.device, **told)
