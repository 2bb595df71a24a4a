"""Read and write evaluation records: what an artifact loses against the 16-bit model, as measured after its fit.

    {"artifact": sha256, "corpus": digest, "protocol": {...}, "environment": {...}, "result": {...}}

A record is stored beside its artifact and never changed; its file is named by its own digest. Anybody who may write to
a registry may add one, so one of predicted text is parsed strictly into the classes below, which have the names of the
JSON: a field with a default may be missing or null, and unknown fields are ignored. Records of tasks are only stored.

    full     every token but the sinks was encoded and decoded before anything attended to it
    in-use   tokens arrived in steps, and a block was encoded when the cache would encode it

Needs no torch.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry import reference

FULL, IN_USE = "full", "in-use"
PROTOCOLS = (FULL, IN_USE)
SPOKEN = {FULL: "full encode", IN_USE: "in use"}
TEXT = "perplexity"  # the name of the protocol of predicted text; tasks have others
FIELDS = {"artifact", "corpus", "protocol", "environment", "result"}
LARGEST = 1e15  # magnitude of a number; larger ones overflow in plots

T = TypeVar("T")


@dataclass(frozen=True)
class Model:
    """The measured model."""

    id: str | None = None
    parameters: int | None = None


@dataclass(frozen=True)
class Overlap:
    """Share of the windows' runs of `run_bytes` bytes that also occur in the fit's text, and what was dropped."""

    left: float
    run_bytes: int
    against: tuple[str, ...]
    dropped_documents: int
    dropped_tokens: int


@dataclass(frozen=True)
class Source:
    """The text of the windows."""

    source: str
    split: str | None = None
    seed: int | None = None
    token_digest: str | None = None
    overlap: Overlap | None = None


@dataclass(frozen=True, kw_only=True)
class TextProtocol:
    """Windows of one text, `length` tokens each, and the settings of predicting it; None: the recipe's own setting."""

    model: Model = Model()
    text: Source
    windows: int
    length: int
    step: int | None = None
    recent: int | None = None
    sinks: int | None = None

    def __post_init__(self):
        if min(self.windows, self.length) <= 0:
            raise ValueError(f"{self.windows} windows of {self.length} tokens")


@dataclass(frozen=True)
class Scores:
    """Figures of each window."""

    kl: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Part:
    """Perplexity of the 16-bit model, and `decoded` shares of reads; None: the queries choose what they read."""

    reference_perplexity: float | None = None
    decoded: Mapping[str, float | None] | None = None

    @property
    def decoded_reads(self) -> float | None:
        """Share of all reads that were of decoded tokens."""
        return self.decoded.get("reads") if self.decoded else None


@dataclass(frozen=True, kw_only=True)
class Unmeasured(Part):
    """The reason for missing figures."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Figures(Part):
    """Losses against the 16-bit model.

    relative   perplexity / that of 16 bit - 1
    kl         nats per token
    beyond     share of blocks, 0 to 1, whose error exceeds the calibration's 99.9% quantile; None: not counted
    """

    perplexity: float
    relative: float
    relative_se: float | None = None
    kl: float | None = None
    top1: float | None = None
    beyond: float | None = None
    windows: Scores | None = None


@dataclass(frozen=True)
class Gate:
    """Publication bounds, those that failed, and the protocol that was compared with them."""

    bounds: Mapping[str, float] = field(default_factory=dict)
    failed: tuple[str, ...] = ()
    protocol: str | None = None


@dataclass(frozen=True, kw_only=True)
class TextResult:
    """Figures by protocol, and bits per element: asymptotic, at_length, at_4096."""

    recipe: str
    bits: Mapping[str, float] = field(default_factory=dict)
    protocols: Mapping[str, Unmeasured | Figures]
    gate: Gate | None = None


@dataclass(frozen=True, kw_only=True)
class TextRecord:
    """A record of predicted text.

    artifact   sha256 of the measured artifact, or the name of a recipe without one
    raw        the record's JSON
    name       label in tables and plots
    """

    artifact: str = ""
    protocol: TextProtocol
    result: TextResult
    raw: Any = field(default=None, compare=False, repr=False)
    name: str = ""

    def __post_init__(self):
        if not self.result.protocols:
            raise ValueError("neither figures nor a reason for their absence")

    def figures(self, protocol: str) -> Figures | None:
        """Return the figures of one protocol, or None."""
        part = self.result.protocols.get(protocol)
        return part if isinstance(part, Figures) else None

    @property
    def decisive(self) -> tuple[str, Figures] | None:
        """Protocol and figures that decide: of the full encode if it was measured, else in use."""
        return next(((name, part) for name in PROTOCOLS if (part := self.figures(name)) is not None), None)

    def reasons(self) -> list[str]:
        """Return a sentence for each protocol without figures."""
        parts = self.result.protocols.items()
        return [f"{SPOKEN[name]}: {part.reason}" for name, part in parts if isinstance(part, Unmeasured)]


# ---- files and JSON --------------------------------------------------------------------------------------------------


def to_bytes(record: Mapping[str, Any]) -> bytes:
    """Serialize a record's JSON; raises ArtifactError for other fields or no digest. `parse` reads the rest."""
    return strict_json.record(_check(dict(record), "evaluation"))


def from_bytes(data: bytes, path: PurePath) -> dict[str, Any]:
    """Read a record's JSON, stored at .../artifact's digest/record's digest.json; errors are those of `to_bytes`."""
    record = _check(strict_json.loads(data, f"{path}: evaluation"), f"{path}: evaluation")
    if record["artifact"] != path.parent.name:
        raise ArtifactError(f"{path}: evaluation: is about {record['artifact']}, but stored with another artifact")
    return record


def _check(record: Any, label: str) -> dict[str, Any]:
    return strict_json.keys(record, FIELDS, label, checks={"artifact": reference.check_sha256})


def parse(record: Any) -> TextRecord:
    """Parse a record's JSON; raises ArtifactError for another form or protocol."""
    try:
        name, parts = record["protocol"].get("name", TEXT), record["result"]["protocols"]
        if name != TEXT:
            raise ValueError(f"protocol {name!r:.80}; expected {TEXT}")
        ordered = {protocol: parts[protocol] for protocol in PROTOCOLS if protocol in parts}
        parsed = _object(TextRecord, record | {"result": record["result"] | {"protocols": ordered}}, "record")
        return replace(parsed, raw=record, name=parsed.result.recipe)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"evaluation: {error}") from None


def readable(records: Iterable[Mapping[str, Any]]) -> list[TextRecord]:
    """Parse records of text; leave out others, and those that are malformed or have numbers beyond LARGEST."""
    parsed = []
    for record in records:
        try:
            parsed += [parse(record)] if _is_plottable(record) else []
        except ArtifactError:
            continue
    return parsed


def _is_plottable(value: Any) -> bool:
    if isinstance(value, (int, float)):
        return isinstance(value, bool) or -LARGEST <= value <= LARGEST
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return all(map(_is_plottable, items))


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Return {name: (type, whether it is required)}."""
    hints, missing = get_type_hints(kind), dataclasses.MISSING
    fields = dataclasses.fields(kind)
    return {f.name: (hints[f.name], f.default is missing and f.default_factory is missing) for f in fields}


def _object(kind: type[T], value: Any, where: str) -> T:
    """Convert a JSON object to a dataclass; `where` begins messages."""
    _require(isinstance(value, dict), value, where, "an object")
    fields = {}
    for name, (form, required) in _fields(kind).items():
        if value.get(name) is not None:
            fields[name] = _value(form, value[name], f"{where}.{name}")
        elif name in value and NoneType in get_args(form):
            fields[name] = None
        elif required:
            raise ValueError(f"{where} has no {name}")
    return kind(**fields)


def _value(form: Any, value: Any, where: str) -> Any:
    """Convert a JSON value to a type: a dataclass, number, text, tuple, mapping, or a union of these."""
    origin, args = get_origin(form), get_args(form)
    if origin is UnionType:
        kinds = [kind for kind in args if kind is not NoneType]
        if kinds == [Unmeasured, Figures]:
            return _object(Unmeasured if isinstance(value, dict) and "reason" in value else Figures, value, where)
        return _value(kinds[0], value, where)
    if origin is tuple:
        _require(isinstance(value, (list, tuple)), value, where, "a list")
        return tuple(_value(args[0], item, f"{where}.{index}") for index, item in enumerate(value))
    if origin is Mapping:
        _require(isinstance(value, dict), value, where, "an object")
        optional = NoneType in get_args(args[1])
        items = [(name, item) for name, item in value.items() if item is not None or optional]
        return {name: item if item is None else _value(args[1], item, f"{where}.{name}") for name, item in items}
    if isinstance(form, type) and dataclasses.is_dataclass(form):
        return _object(form, value, where)
    if form is not Any:
        kinds = (int, float) if form is float else form
        _require(isinstance(value, kinds) and isinstance(value, bool) == (form is bool), value, where, form.__name__)
    return value


def _require(holds: bool, value: Any, where: str, what: str) -> None:
    if not holds:
        raise ValueError(f"{where}: {value!r:.80} is not {what}")
