"""How measurements were made, as evaluation records state it: a model, windows of texts, the settings of a protocol."""

from collections.abc import Mapping
from dataclasses import dataclass, field

TEXT = "perplexity"  # name of the protocols under which text is predicted


@dataclass(frozen=True)
class Model:
    """The model that was measured."""

    id: str | None = None
    revision: str | None = None
    parameters: int | None = None


@dataclass(frozen=True)
class Overlap:
    """What windows share with the text of the fit: the share of their runs of bytes, and what was dropped for it."""

    left: float
    run_bytes: int
    against: tuple[str, ...]
    dropped_documents: int
    dropped_tokens: int


@dataclass(frozen=True)
class Source:
    """Where windows are from."""

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
    """What all protocols have."""

    name: str = TEXT
    version: int | None = None
    model: Model = Model()


@dataclass(frozen=True, kw_only=True)
class TextProtocol(Windows, Protocol):
    """How text was predicted; None where a recipe's own setting counts."""

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
    """How tasks were asked: kvq's by length and depth, lm-eval's by its settings."""

    tasks: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    depths: tuple[float, ...] = ()
    samples: int | None = None
    chat: bool = False
    lm_eval: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None
