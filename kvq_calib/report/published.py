"""The outcome of a calibration's artifacts: what was measured, where they were published, where files are."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvq_runtime.cli.table import percent
from kvq_runtime.registry.evaluation_records import SPOKEN, TextRecord

REFERENCE = "16 bit"


@dataclass(frozen=True)
class Place:
    """A registry that has an artifact now.

    reference   what loads it there: name@1.2.0, or hf://org/name@1.2.0
    path        of its file; None on a Hub
    new         whether this run published it; False: the very same bytes were there, and nothing changed
    yanked      the reason if these were withdrawn, and still are
    """

    registry: str
    reference: str
    path: str | None
    new: bool
    yanked: str | None = None


@dataclass(frozen=True)
class Published:
    """One artifact as fitted and measured, and published if it keeps the bounds.

    measured     the record of what it costs, of which full encode counts where it was measured; None: not asked for
    failed       the bounds that it does not keep
    layers       of a recipe with a budget: what was chosen
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
    places: tuple[Place, ...] = ()
    folder: str = ""

    @property
    def reference(self) -> str:
        """The reference that loads it from the first of its registries; its name if none has it."""
        return self.places[0].reference if self.places else self.name

    def rows(self) -> list[dict[str, Any]]:
        """Its lines of the result table."""
        row: dict[str, Any] = {
            "recipe": self.recipe,
            "artifact": self.reference,
            "sha256": self.sha256[:12],
            "bits": round(self.bits, 4),
            "key error": round(self.key_error, 5),
            "value error": round(self.value_error, 5),
        }
        return _by_text(row, self.measured)

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
            **_numbers(self.measured),
            **_texts(self.measured),
            "published": [asdict(place) for place in self.places],
            "folder": self.folder,
            "exceeds": list(self.failed),
        }
        return found | ({"layers": self.layers} if self.layers else {})


def reference_row(records: Sequence[TextRecord]) -> dict[str, Any]:
    """The line of the 16-bit model, by the protocol of the first record that has figures."""
    parts = (record.decisive[1] for record in records if record.decisive is not None)
    known = next((part.reference_perplexity for part in parts if part.reference_perplexity is not None), None)
    row = {"recipe": REFERENCE, "artifact": None, "sha256": None, "bits": 16.0}
    return {} if known is None else row | {"perplexity": f"{known:.3f}"}


def baseline_rows(record: TextRecord) -> list[dict[str, Any]]:
    """The lines of a baseline in the result table."""
    result = record.result
    row = {"recipe": result.recipe, "artifact": "(baseline)", "bits": result.bits["asymptotic"]}
    return _by_text(row, record)


def baseline_record(record: TextRecord) -> dict[str, Any]:
    """The same as JSON, with the names of `Published.record`."""
    row = {"recipe": record.result.recipe, "artifact": record.artifact}
    return row | {"bits_per_element": record.result.bits["asymptotic"]} | _numbers(record) | _texts(record)


def lines(record: TextRecord | None) -> dict[str, str]:
    """The losses on each text of another kind, in words, by its name."""
    found = {name: _cells(one) for name, one in (record.elsewhere() if record else {}).items()}
    return {
        name: f"perplexity {row['vs 16 bit']}, KL {row['KL']:.2g} nats, {row['protocol']}"
        if row.get("KL") is not None else row["vs 16 bit"] for name, row in found.items()
    }  # fmt: skip


def _by_text(row: dict[str, Any], record: TextRecord | None) -> list[dict[str, Any]]:
    """A line with its figures, and one for each text of another kind; texts are named where there are several."""
    others = {} if record is None else record.elsewhere()
    if record is None or not others:
        return [row | _cells(record)]
    named = {"recipe": row["recipe"], "text": record.protocol.text.source}
    return [named | row | _cells(record), *(named | {"text": name} | _cells(one) for name, one in others.items())]


def _cells(record: TextRecord | None) -> dict[str, Any]:
    """Figures for people, or the reason why there are none; nothing of what was not to be measured."""
    if record is None or record.decisive is None:
        return {} if record is None else {"vs 16 bit": "; ".join(record.reasons())}
    protocol, found = record.decisive
    row = {"protocol": SPOKEN[protocol], "perplexity": f"{found.perplexity:.3f}"}
    row |= {"vs 16 bit": percent(found.relative), "KL": found.kl}
    return row if found.beyond is None else row | {"beyond": f"{found.beyond:.2%}"}


def _texts(record: TextRecord | None) -> dict[str, Any]:
    """The same for each text of another kind, by its name; nothing where there is none."""
    others = {} if record is None else record.elsewhere()
    return {"texts": {name: _numbers(one) for name, one in others.items()}} if others else {}


def _numbers(record: TextRecord | None) -> dict[str, Any]:
    """Figures by names with their units, or the reason why there are none."""
    if record is None or record.decisive is None:
        return {} if record is None else {"unmeasured": "; ".join(record.reasons())}
    protocol, found = record.decisive
    ratio = {"perplexity_over_16_bit": 1 + found.relative, "kl_nats_per_token": found.kl}
    ratio |= {} if found.beyond is None else {"blocks_beyond": found.beyond}
    return {"protocol": SPOKEN[protocol], "perplexity": found.perplexity, **ratio}
