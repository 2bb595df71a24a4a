"""The outcome of a calibration's artifacts: what was measured, where they were published, where files are."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvq_runtime.cli.table import percent
from kvq_runtime.registry.measured import SPOKEN, TextRecord

REFERENCE = "16 bit"


@dataclass(frozen=True)
class Place:
    """A registry that has an artifact now.

    reference   what loads it there: name@1.2.0, or hf://org/name@1.2.0
    path        of its file; None on a Hub
    new         whether this run published it; False: the very same bytes were there, and nothing changed
    """

    registry: str
    reference: str
    path: str | None
    new: bool


@dataclass(frozen=True)
class Published:
    """One artifact as fitted and measured, and published if it keeps the bounds.

    version      in the first of `places`, or "" if it was not published
    perplexity   and relative, what it is over that of 16 bit, less 1, under `protocol`: a full encode where that was
                 measured; or `unmeasured`, the reason why there is no figure. kl: nats per token
    failed       the bounds that it does not keep
    layers       of a recipe with a budget: what was chosen
    places       the registries that have it
    folder       of card, plots and record, and of the artifact if it was not published
    """

    recipe: str
    name: str
    version: str
    sha256: str
    bits: float
    key_error: float
    value_error: float
    perplexity: float | None = None
    relative: float | None = None
    kl: float | None = None
    protocol: str = ""
    unmeasured: str = ""
    failed: Sequence[str] = ()
    layers: list[dict] = field(default_factory=list)
    places: tuple[Place, ...] = ()
    folder: str = ""

    @property
    def reference(self) -> str:
        """The reference that loads it from the first of its registries; its name if none has it."""
        return self.places[0].reference if self.places else self.name

    def row(self) -> dict[str, Any]:
        """A line of the result table."""
        row: dict[str, Any] = {
            "recipe": self.recipe,
            "artifact": self.reference,
            "sha256": self.sha256[:12],
            "bits": round(self.bits, 4),
            "key error": round(self.key_error, 5),
            "value error": round(self.value_error, 5),
        }
        return row | _cells(vars(self))

    def record(self) -> dict[str, Any]:
        """All of it as JSON: plain numbers, whose units are in their names.

        key_error, value_error   mean over layers of ‖x - x̂‖² / ‖x - mean‖², on held-out sequences
        """
        found = {
            "recipe": self.recipe,
            "artifact": self.reference,
            "sha256": self.sha256,
            "bits_per_element": self.bits,
            "key_error": self.key_error,
            "value_error": self.value_error,
            **_numbers(vars(self)),
            "published": [asdict(place) for place in self.places],
            "folder": self.folder,
            "exceeds": list(self.failed),
        }
        return found | ({"layers": self.layers} if self.layers else {})


def figures(record: TextRecord) -> dict[str, Any]:
    """Return a record's figures as fields of `Published`."""
    if record.decisive is None:
        return {"unmeasured": "; ".join(record.reasons())}
    protocol, found = record.decisive
    return {"perplexity": found.perplexity, "relative": found.relative, "kl": found.kl, "protocol": SPOKEN[protocol]}


def reference_row(records: Sequence[TextRecord]) -> dict[str, Any]:
    """The line of the 16-bit model, by the protocol of the first record that has figures."""
    parts = (record.decisive[1] for record in records if record.decisive is not None)
    known = next((part.reference_perplexity for part in parts if part.reference_perplexity is not None), None)
    row = {"recipe": REFERENCE, "artifact": None, "sha256": None, "bits": 16.0}
    return {} if known is None else row | {"perplexity": f"{known:.3f}"}


def baseline_row(record: TextRecord) -> dict[str, Any]:
    """The line of a baseline in the result table."""
    result = record.result
    row = {"recipe": result.recipe, "artifact": "(baseline)", "bits": result.bits["asymptotic"]}
    return row | _cells(figures(record))


def baseline_record(record: TextRecord) -> dict[str, Any]:
    """The same as JSON, with the names of `Published.record`."""
    row = {"recipe": record.result.recipe, "artifact": record.artifact}
    return row | {"bits_per_element": record.result.bits["asymptotic"]} | _numbers(figures(record))


def _cells(found: Mapping[str, Any]) -> dict[str, Any]:
    """Figures for people, or the reason why there are none."""
    if found.get("relative") is None:
        return {"vs 16 bit": found["unmeasured"]} if found["unmeasured"] else {}
    perplexity = None if found["perplexity"] is None else f"{found['perplexity']:.3f}"
    return {
        "protocol": found["protocol"],
        "perplexity": perplexity,
        "vs 16 bit": percent(found["relative"]),
        "KL": found["kl"],
    }


def _numbers(found: Mapping[str, Any]) -> dict[str, Any]:
    """Figures by names with their units, or the reason why there are none."""
    if found.get("relative") is None:
        return {"unmeasured": found["unmeasured"]} if found["unmeasured"] else {}
    ratio = {"perplexity_over_16_bit": 1 + found["relative"], "kl_nats_per_token": found["kl"]}
    return {"protocol": found["protocol"], "perplexity": found["perplexity"], **ratio}
