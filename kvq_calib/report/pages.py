"""Write HTML pages: one of a version, and the index of a registry.

Jinja escapes every value; unprintable characters are shown as escapes. A page is one file without scripts, and its
Content-Security-Policy lets it load nothing; pictures are SVG in `<img>`, in which nothing runs. Figures are those of
the file and of the registry's records; whatever cannot be read is named on the page, and returned as a fault.
"""

import base64
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from kvq_calib.report import card, plots, tables
from kvq_runtime import __version__
from kvq_runtime.artifact import artifact, folder
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.cli.table import cell, percent
from kvq_runtime.errors import ArtifactError, NotFound, counted
from kvq_runtime.registry import rating
from kvq_runtime.registry.evaluation_records import SPOKEN, TextRecord, readable
from kvq_runtime.registry.events import State, Version
from kvq_runtime.registry.reference import PRODUCTION, order
from kvq_runtime.registry.registry import Registry
from kvq_runtime.store.memory import human

COLOURS = {rating.USABLE: "good", rating.LOSSY: "bad", rating.NOT_MEASURED: "warn"}  # classes of the style sheet
DRIFTED = 1.1  # times the divergence that was measured at publication, from which a version has drifted
UNREADABLE = (ArtifactError, NotFound, PermissionError)
Page = tuple[str, list[str]]  # its text, and a sentence for each thing that could not be read


@cache
def _templates() -> Environment:
    made = Environment(
        loader=PackageLoader("kvq_calib.report", "templates"), autoescape=True, undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else cell(value), trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.globals |= {"kvq": __version__, "colours": COLOURS}
    made.filters |= {"address": _address}
    return made


def _address(figure: Figure) -> str:
    """Return a picture as the address of an image."""
    return "data:image/svg+xml;base64," + base64.b64encode(plots.svg(figure)).decode()


# ---- a version -------------------------------------------------------------------------------------------------------


def of_version(registry: Registry, name: str, number: str) -> Page:
    """Write the page of a version. Raises NotFound for a name or version that does not exist."""
    state = registry.existing(name)
    version, faults = state.get(number), []
    made = _attempt(faults, lambda: artifact.load(registry.fetch(name, version), version.sha256, version.size))
    records = _attempt(faults, lambda: readable(registry.evaluations(version.sha256, name))) or []
    _attempt(faults, lambda: registry.attachments(name, version))
    corpus = card.corpus_of(made) if made else {}
    main = rating.main_record(records, corpus.get("source"))
    reference, others = f"{name}@{number}", []
    if main is not None:
        main = replace(main, name=reference)
        others = list(_measured_alike(registry, version, main))
    history = [vars(event.change) | {"at": event.at, "change": event.change.kind} for event in reversed(state.events)]
    columns = ("at", "change", "version", "alias", "reason")
    about = {
        "reference": reference, "registry": registry.url, "sha256": version.sha256,
        "size": version.size, "published": version.at, "badges": _badges(state, version),
        "history": [{column: row.get(column) for column in columns} for row in history], "faults": faults,
    }  # fmt: skip
    return _version(about, made, records, main, others), faults


def _version(
    about: Mapping[str, Any], made: Artifact | None, records: Sequence[TextRecord], main: TextRecord | None,
    others: Sequence[TextRecord],
) -> str:  # fmt: skip
    points = [main, *others] if main else []
    gated = [(rating.drift_week(one), one.result.gate) for one in records if one.result.gate]
    template = _templates().get_template("version.html")
    url = about["registry"] if about["registry"].startswith("file:") else ""
    model, corpus = (card.model_of(made)[0], card.corpus_of(made).get("source")) if made else ("MODEL", None)
    command = ["kvq", "eval", about["reference"], "--model", model, *(["--corpus", str(corpus)] if corpus else [])]
    command += ["--registry", url] if url else []
    return template.render(
        {**about, **(card.snippet(made, about["reference"], url) if made else {})},
        command=shlex.join(command),
        recipe=made and card.recipe_rows(made),
        summary=made.recipe.summary if made else "",
        sizes=card.size_rows(folder.sizes(made)) if made else [],
        provenance=card.provenance(made, {}) if made else {},
        model=card.model_of(made)[0] if made else None,
        verdict=rating.rate(main),
        caution=rating.fit_warning(made.provenance) if made else None,
        parameters=tables.size_of(main.protocol.model.parameters) if main else None,
        small=bool(main) and (main.protocol.model.parameters or 0) < card.SMALL,
        losses=tables.table(points) if points else [],
        texts=tables.notes([main]) if main else [],
        gates=sorted(gated, key=lambda gate: gate[0] or 0),
        drift=[row for record in records if (row := _drift(record))],
        frontier=plots.cost_by_bits(points) if len(points) > 1 else None,
    )


def _attempt(faults: list[str], read: Any) -> Any:
    """Return what `read` does, or None with the reason among the faults."""
    try:
        return read()
    except UNREADABLE as error:
        faults.append(str(error))
        return None


def _badges(state: State, version: Version) -> list[str]:
    """Return the aliases of a version, and whether it was withdrawn."""
    aliases = [alias for alias in state.aliases if state.at(alias) == version.version]
    return [*aliases, *([] if version.yanked is None else [f"yanked: {version.yanked}"])]


def _drift(record: TextRecord) -> dict[str, Any] | None:
    """Return the row of a weekly check; None for another record."""
    if record.decisive is None or (week := rating.drift_week(record)) is None:
        return None
    return {"week": week, "KL": record.decisive[1].kl, "vs 16 bit": percent(record.decisive[1].relative)}


def _measured_alike(registry: Registry, version: Version, own: TextRecord) -> Iterator[TextRecord]:
    """Yield a record of every other version in the registry that was measured on the same windows of the same model.

    Versions that cannot be read are passed over.
    """
    for name in registry.names():
        try:
            for one in registry.state(name).versions.values():
                if one.sha256 != version.sha256 and one.yanked is None:
                    records = readable(registry.evaluations(one.sha256, name))
                    same = next((record for record in records if _windows(record) == _windows(own)), None)
                    yield from [replace(same, name=f"{name}@{one.version}")] if same else []
        except UNREADABLE:
            continue


def _windows(record: TextRecord) -> tuple[Any, ...]:
    """Return the fields that records must share to be compared: model, text and its tokens."""
    given = record.protocol
    return given.model.id, given.length, given.windows, given.text.token_digest, given.sinks


# ---- a registry ------------------------------------------------------------------------------------------------------


def of_registry(registry: Registry, now: datetime, linked: bool = False) -> Page:
    """Write the index: a row a version, read from events and records alone.

    linked   whether rows lead to the pages of their versions: see `file_name`
    """
    rows, faults = [], []
    for name in registry.names():
        rows += _attempt(faults, lambda name=name: _rows(registry, registry.state(name), now, faults)) or []
    names = counted(len({row["name"] for row in rows}), "name")
    heading = f"Registry: {names}, {counted(len(rows), 'version')}"
    for row in rows if linked else ():
        row["page"] = file_name(row["name"], row["version"])
    made = now.strftime("%Y-%m-%d %H:%M UTC")
    given = {"heading": heading, "registry": registry.url, "made": made, "rows": rows, "faults": faults}
    return _templates().get_template("registry.html").render(given), faults


def file_name(name: str, version: str) -> str:
    """Return the file name of a version's page."""
    return f"{name}-v{version}.html"


def _rows(registry: Registry, state: State, now: datetime, faults: list[str]) -> list[dict[str, Any]]:
    """Return the rows of a name, the newest version first."""
    newest, rows = state.newest(), []
    for version in sorted(state.versions.values(), key=lambda one: order(one.version), reverse=True):
        damage: list[str] = []
        evaluations = lambda version=version: readable(registry.evaluations(version.sha256, state.name))  # noqa: E731
        records = _attempt(damage, evaluations) or []
        faults += [f"{state.name} {version.version}: {one}" for one in damage]
        badges = _badges(state, version)
        row = {"name": state.name, "version": version.version, "badges": badges, "size": human(version.size)}
        row |= {"recipe": version.about["recipe"], "model": version.about["model"]}
        row["days"] = max(0, (now - datetime.fromisoformat(version.at)).days)
        main = rating.main_record(records, version.about["corpus"])
        served = PRODUCTION in badges or (newest is not None and version == newest)
        rows.append(row | _loss(records, main, damage, served))
    return rows


def _loss(
    records: Sequence[TextRecord], main: TextRecord | None, damage: Sequence[str], served: bool
) -> dict[str, Any]:
    """Return verdict, bits, the loss that counts, the last weekly check over it, and the reasons for concern."""
    judged, concerns = rating.rate(main), [f"cannot be read: {one}" for one in damage]
    row: dict[str, Any] = dict.fromkeys(("bits", "relative", "KL", "drift")) | {"verdict": judged.word}
    if judged.word == rating.LOSSY:
        concerns.append(judged.why)
    if main is not None and main.decisive is not None:
        protocol, figures = main.decisive
        row |= {"bits": main.result.bits.get("asymptotic"), "relative": percent(figures.relative)}
        row |= {"KL": figures.kl, "protocol": SPOKEN[protocol]}
        weeks = sorted(drift["week"] and (drift["week"], drift["KL"]) for one in records if (drift := _drift(one)))
        if weeks and weeks[-1][1] is not None and figures.kl:
            row["drift"] = weeks[-1][1] / figures.kl
            if row["drift"] > DRIFTED:
                concerns.append(f"drifted: {row['drift']:.2f} times the divergence at publication")
    elif served and not damage:
        concerns.append("not measured: kvq eval")
    return row | {"concerns": concerns}
