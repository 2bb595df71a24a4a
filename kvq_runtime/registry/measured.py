"""Parse evaluation records as everybody reads them: `sound.read` makes these of a record's JSON.

    full     every token but the sinks was encoded and decoded before anything attended to it
    in-use   tokens arrived in steps, and a block was encoded when the cache would encode it

A class has the names of the JSON, and states its form: fields with a default may be left out, others are needed. A part
of a result has figures, or the reason why there are none. Records of tasks have answers in place of figures.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

FULL, IN_USE = "full", "in-use"
PROTOCOLS = (FULL, IN_USE)
SPOKEN = {FULL: "full encode", IN_USE: "in use"}
TEXT = "perplexity"  # name of the protocols under which text is predicted
TASKS = ("tasks", "lm-eval")  # names of the protocols under which questions are answered, and no text is predicted


# ---- how it was measured ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """The model that was measured."""

    id: str | None = None
    revision: str | None = None
    parameters: int | None = None


@dataclass(frozen=True)
class Overlap:
    """Overlap of windows with the text of the fit: the share of their runs of bytes, and what was dropped for it."""

    left: float
    run_bytes: int
    against: tuple[str, ...]
    dropped_documents: int
    dropped_tokens: int


@dataclass(frozen=True)
class Source:
    """The text that windows are from."""

    source: str
    split: str | None = None
    seed: int | None = None
    corpus_digest: str | None = None
    token_digest: str | None = None
    overlap: Overlap | None = None


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Windows of one text."""

    text: Source
    windows: int
    length: int

    def __post_init__(self):
        if min(self.windows, self.length) <= 0:
            raise ValueError(f"{self.windows} windows of {self.length} tokens")


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The part that all protocols have."""

    name: str = TEXT
    version: int | None = None
    model: Model = Model()


@dataclass(frozen=True, kw_only=True)
class TextProtocol(Windows, Protocol):
    """The protocol of predicting text; None where a recipe's own setting counts."""

    protocols: tuple[str, ...] = ()
    step: int | None = None
    recent: int | None = None
    sinks: int | None = None
    block: int | None = None
    prompt: int | None = None
    error_windows: int | None = None
    texts: Mapping[str, Windows] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TasksProtocol(Protocol):
    """The protocol of tasks: kvq's by length and depth, lm-eval's by its settings."""

    tasks: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    depths: tuple[float, ...] = ()
    samples: int | None = None
    chat: bool = False
    lm_eval: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None


# ---- what was found --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shares:
    """The shares of attention's weight, and of what queries read, that was decoded; unread: that is not held."""

    attention: float | None = None
    reads: float | None = None
    unread: float | None = None


NOT_COUNTED = Shares()  # records of version 1 do not say


@dataclass(frozen=True)
class Scores:
    """Figures of each window."""

    loss: tuple[Any, ...] | None = None
    reference_loss: tuple[Any, ...] = ()
    kl: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Part:
    """The figures of one text under one protocol; decoded None: queries choose what they read."""

    reference_perplexity: float | None = None
    decoded: Shares | None = NOT_COUNTED
    fitted_on: int | None = None


@dataclass(frozen=True, kw_only=True)
class Unmeasured(Part):
    """The reason why there are no figures."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Figures(Part):
    """Loss against the 16-bit model; windows None: records of version 1 do not keep them.

    beyond   share of blocks, 0 to 1, whose error is beyond 99.9% of those in calibration; None: these are not known
    """

    perplexity: float
    relative: float
    relative_se: float | None = None
    kl: float | None = None
    top1: float | None = None
    beyond: float | None = None
    windows: Scores | None = None

    def kl_bound(self, level: float) -> tuple[float, float] | None:
        """(x, share): another window of this text has a divergence of at most x with a probability of at least share.

        That is `level`, or what so few windows support: split conformal prediction, free of distributions, of n windows
        that are exchangeable with the next. x is the ⌈(n + 1) level⌉-th smallest; with the largest, n / (n + 1) is all
        that can be said. None: the windows' divergences are not known.
        """
        found = sorted(self.windows.kl) if self.windows is not None else []
        if not found:
            return None
        rank = math.ceil((len(found) + 1) * level - 1e-9)
        return (found[rank - 1], level) if rank <= len(found) else (found[-1], len(found) / (len(found) + 1))


Parts = Mapping[str, Unmeasured | Figures]


@dataclass(frozen=True)
class Elsewhere:
    """The figures of a text of another kind."""

    protocols: Parts


@dataclass(frozen=True)
class Gate:
    """Bounds, and those that were not kept, by the protocol that was judged."""

    bounds: Mapping[str, float] = field(default_factory=dict)
    failed: tuple[str, ...] = ()
    protocol: str | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """The part that all results have; bits per element by what they are of: asymptotic, at_length, at_4096."""

    recipe: str
    bits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TextResult(Result):
    """Figures by protocol, the full encode first, and errors, a row a layer."""

    protocols: Parts
    layers: tuple[Mapping[str, float | None], ...] = ()
    window: Mapping[str, int] = field(default_factory=dict)
    gate: Gate | None = None
    texts: Mapping[str, Elsewhere] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """Right answers to a task in texts of a length, asked for at a depth of 0 to 1."""

    task: str
    length: float
    depth: float
    accuracy: float


@dataclass(frozen=True)
class Metric:
    """A figure and its standard error."""

    value: float | None
    se: float | None = None


@dataclass(frozen=True)
class Task:
    """The figures of one task: lm-eval's metrics by their names, the one of kvq's own tasks as accuracy."""

    reason: str | None = None
    accuracy: float | None = None
    se: float | None = None
    texts: int | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    @property
    def figures(self) -> Mapping[str, Metric]:
        """All of them by name."""
        return self.metrics if self.accuracy is None else {"accuracy": Metric(self.accuracy, self.se)}


@dataclass(frozen=True)
class Asked:
    """The answers under one protocol, and of the 16-bit model; decoded: the share of reads, by length.

    through_the_cache   lm-eval's tasks: how many requests there were, how many of them read encoded tokens
    """

    reason: str | None = None
    tasks: Mapping[str, Task] = field(default_factory=dict)
    reference: Mapping[str, Task] = field(default_factory=dict)
    cells: tuple[Cell, ...] = ()
    decoded: Mapping[str, float] = field(default_factory=dict)
    through_the_cache: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TasksResult(Result):
    """Answers by protocol."""

    protocols: Mapping[str, Asked]

    def __post_init__(self):
        if not self.protocols.keys() <= SPOKEN.keys():
            raise ValueError(f"answers under {sorted(self.protocols)!r:.80}; there are {', '.join(SPOKEN)}")


@dataclass(frozen=True, kw_only=True)
class Record:
    """A record of any protocol.

    artifact      what was measured: sha256, or the name of a recipe without one
    environment   as it is: only whether two are equal matters
    raw           its JSON, which is what is stored, printed as JSON and copied
    name          in tables and pictures
    """

    artifact: str = ""
    corpus: str
    protocol: Protocol
    result: Result
    environment: Any = None
    raw: Any = field(default=None, compare=False, repr=False)
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class TasksRecord(Record):
    """Questions that were answered."""

    protocol: TasksProtocol
    result: TasksResult

    def answers(self) -> list["Answer"]:
        """The results for each protocol, task and metric, and the reasons where there are none."""
        found = []
        for protocol, part in self.result.protocols.items():
            if part.reason is not None:
                found.append(Answer(protocol, reason=part.reason))
            for name, task in part.tasks.items():
                if task.reason is not None:
                    found.append(Answer(protocol, name, reason=task.reason))
                exact = part.reference[name].figures if name in part.reference else {}
                for metric, one in task.figures.items():
                    known = exact[metric].value if metric in exact else None
                    found.append(Answer(protocol, name, metric, one.value, one.se, task.texts, known))
        return found


@dataclass(frozen=True)
class Answer:
    """A metric of a task beside the 16-bit model's, or why there is none; task "": the reason is that of all."""

    protocol: str
    task: str = ""
    metric: str = ""
    value: float | None = None
    se: float | None = None
    texts: int | None = None
    reference: float | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class TextRecord(Record):
    """Text that was predicted."""

    protocol: TextProtocol
    result: TextResult

    def __post_init__(self):
        for parts in (self.result.protocols, *(one.protocols for one in self.result.texts.values())):
            if not parts:
                raise ValueError("neither figures nor a reason why there are none")
        if not self.result.texts.keys() <= self.protocol.texts.keys():
            raise ValueError(f"figures on {sorted(self.result.texts)!r:.80}, and nothing about these texts")

    def figures(self, protocol: str) -> Figures | None:
        """The figures of one protocol; None where it was not asked for, or cannot be measured."""
        part = self.result.protocols.get(protocol)
        return part if isinstance(part, Figures) else None

    @property
    def decisive(self) -> tuple[str, Figures] | None:
        """Protocol and figures that count where one must: the full encode where it was measured. None: there are
        none."""
        return next(((name, found) for name in PROTOCOLS if (found := self.figures(name)) is not None), None)

    def reasons(self) -> list[str]:
        """The reasons for missing figures, a sentence for each protocol that has none."""
        parts = self.result.protocols.items()
        return [f"{SPOKEN[name]}: {part.reason}" for name, part in parts if isinstance(part, Unmeasured)]

    def elsewhere(self) -> dict[str, "TextRecord"]:
        """The measurements on texts of other kinds, by name: the record as one of that text alone."""
        found = {}
        for name, measured in self.result.texts.items():
            own = self.protocol.texts[name]
            about = replace(self.protocol, text=own.text, windows=own.windows, length=own.length, texts={})
            result = replace(self.result, protocols=measured.protocols, layers=(), texts={})
            corpus = own.text.corpus_digest or self.corpus
            found[name] = replace(self, corpus=corpus, protocol=about, result=result)
        return found


def of_text(records: Iterable[Record]) -> list[TextRecord]:
    """The records of predicted text."""
    return [one for one in records if isinstance(one, TextRecord)]


def of_tasks(records: Iterable[Record]) -> list[TasksRecord]:
    """The records of tasks."""
    return [one for one in records if isinstance(one, TasksRecord)]


def texts(records: Iterable[TextRecord]) -> list[str]:
    """The names of the texts of other kinds that any of the records has."""
    return list(dict.fromkeys(name for record in records for name in record.result.texts))
