"""Report the artifacts of a calibration: what was measured, where they were published, where their files are."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvq_runtime.registry.evaluation_records import SPOKEN, TextRecord


@dataclass(frozen=True)
class PublishedAt:
    """A registry that has an artifact now.

    reference   what loads it there: name@1.2.0, or hf://org/name@1.2.0
    path        of its file; None on a Hub
    new         whether this run published it; False: the same bytes were there, and nothing changed
    yanked      the reason if that version is withdrawn
    """

    registry: str
    reference: str
    path: str | None
    new: bool
    yanked: str | None = None


@dataclass(frozen=True)
class Published:
    """One artifact as fitted and measured, and published if it keeps the bounds.

    key_error, value_error   mean over layers of ‖x - x̂‖² / ‖x - mean‖², on held-out sequences
    measured     the evaluation record; None: not asked for
    failed       the bounds that it does not keep
    layers       the settings chosen by layer, for a recipe with a budget
    places       the registries that have it
    folder       of card, plots and record, and of the artifact if it was not published
    """

    recipe: str
    name: str
    sha256: str
    bits: float
    key_error: float
    value_error: float
    measured: TextRecord | None = None
    failed: Sequence[str] = ()
    layers: list[dict] = field(default_factory=list)
    places: tuple[PublishedAt, ...] = ()
    folder: str = ""

    @property
    def reference(self) -> str:
        """The reference that loads it from the first of its registries; its name if none has it."""
        return self.places[0].reference if self.places else self.name

    def row(self) -> dict[str, Any]:
        """Return its line of the result table."""
        row: dict[str, Any] = {"recipe": self.recipe, "artifact": self.reference, "sha256": self.sha256[:12]}
        row |= {"bits": round(self.bits, 4), "key error": round(self.key_error, 5)}
        return row | {"value error": round(self.value_error, 5)}

    def record(self) -> dict[str, Any]:
        """Return all of it as JSON: plain numbers, whose units are in their names."""
        made = {
            "recipe": self.recipe,
            "artifact": self.reference,
            "sha256": self.sha256,
            "bits_per_element": self.bits,
            "key_error": self.key_error,
            "value_error": self.value_error,
            **_numbers(self.measured),
            "published": [asdict(place) for place in self.places],
            "folder": self.folder,
            "exceeds": list(self.failed),
        }
        return made | ({"layers": self.layers} if self.layers else {})


def baseline_record(record: TextRecord) -> dict[str, Any]:
    """Return a baseline as JSON, with the names of `Published.record`."""
    row = {"recipe": record.result.recipe, "artifact": record.artifact}
    return row | {"bits_per_element": record.result.bits["asymptotic"]} | _numbers(record)


def _numbers(record: TextRecord | None) -> dict[str, Any]:
    """Return figures by names with their units, or the reason for missing figures."""
    if record is None:
        return {}
    if record.decisive is None:
        return {"unmeasured": "; ".join(record.reasons())}
    protocol, figures = record.decisive
    numbers = {"protocol": SPOKEN[protocol], "perplexity": figures.perplexity}
    numbers |= {"perplexity_over_16_bit": 1 + figures.relative, "kl_nats_per_token": figures.kl}
    return numbers | ({} if figures.beyond is None else {"blocks_beyond": figures.beyond})
