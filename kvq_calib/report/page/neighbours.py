"""Find what a version can be compared with: versions on the same model and windows, and records of the caller."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvq_calib.report.points import kl_error
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.registry.events import Version
from kvq_runtime.registry.measured import FULL, TextRecord, of_text
from kvq_runtime.registry.registry import Registry
from kvq_runtime.registry.sound import sound


def found(
    registry: Registry, name: str, version: Version, own: TextRecord | None, compared: Sequence[TextRecord] = ()
) -> list[dict[str, Any]]:
    """Points of a picture, this version's first: name, recipe, bits, divergence by full encode and its standard error.

    own        the record that stands for the version; None: it was not measured, and there are no others to find
    compared   records of the caller: of the same model, or a ValueError
    """
    mine = list(rows([own], {"name": name, "version": version.version, "this": True})) if own else []
    if own is not None:
        for record in compared:
            given, wanted = record.protocol.model.id, own.protocol.model.id
            if given != wanted:
                raise ValueError(
                    f"--compare: records of {given!r:.80}, and {name} was measured on {wanted!r:.80}; "
                    "give those that kvq compare wrote for this model"
                )
    others = list(_beside(registry, name, version, own)) if own else []
    given = [row for row in rows(compared) if own is None or row["artifact"] != version.sha256]
    return mine + others + given


def rows(records: Sequence[TextRecord], about: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """A point a record with figures by full encode."""
    for record in records:
        part, bits = record.figures(FULL), record.result.bits.get("asymptotic")
        if part is not None and bits is not None:
            row: dict[str, Any] = {"recipe": record.result.recipe, "bits": bits, "kl": part.kl}
            row |= {"kl_se": kl_error(part), "artifact": record.artifact, "this": False}
            yield row | dict(about or {"name": row["recipe"], "version": None})


def _beside(registry: Registry, name: str, version: Version, own: TextRecord) -> Iterator[dict[str, Any]]:
    """Every other version in the registry that was measured on the same windows of the same model; versions that cannot
    be read are passed over."""
    for other in registry.names():
        try:
            state = registry.state(other)
            for one in state.versions.values():
                if (other, one.version) != (name, version.version) and one.yanked is None:
                    records = of_text(sound(registry.evaluations(one.sha256, other)))
                    same = next((record for record in records if _windows(record) == _windows(own)), None)
                    yield from rows([same] if same else [], {"name": other, "version": one.version})
        except (ArtifactError, NotFound, PermissionError):
            continue


def _windows(record: TextRecord) -> tuple[Any, ...]:
    """Return what two records must share to be one picture: model, text and which of its tokens."""
    given = record.protocol
    return (given.model.id, given.length, given.windows, given.text.token_digest, given.sinks)
