"""Gather what is known of one version, as JSON, and write its page.

Nothing is computed by a model: figures are those of the file, of the registry's records, or of shapes. What is not
known is None or an empty list. A file that does not load leaves its own parts out, and `health` has the reason.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvq_calib.report import card, evidence, html, plots, sections, tables
from kvq_calib.report.plots import Point
from kvq_calib.report.tables import figure, size_of, spread
from kvq_runtime import __version__
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.artifact.describe import recipe_row
from kvq_runtime.cli.table import percent
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.registry import rating
from kvq_runtime.registry.evaluation_records import FULL, SPOKEN, Record, TextRecord, readable, text_records
from kvq_runtime.registry.events import State, Version
from kvq_runtime.registry.registry import Registry

Known = Mapping[str, Any]


def of_version(registry: Registry, name: str, number: str, compared: Sequence[TextRecord] = ()) -> dict[str, Any]:
    """Gather everything known of a version.

    compared   records of other recipes on the same model, as `kvq compare --output` writes them
    Raises NotFound for a name or version that is not there, ArtifactError for a damaged history.
    """
    state = registry.existing(name)
    version = state.get(number)
    checks, made = evidence.checked(registry, name, version)
    records, whole = evidence.evaluations(registry, name, version)
    main = evidence.main(records, made)
    return {
        "kvq": __version__, "name": name, "version": number, "registry": registry.url, "sha256": version.sha256,
        "size": version.size, "published": version.at, "yanked": version.yanked, "aliases": aliases(state, version),
        "files": {file: dict(about) for file, about in version.files.items()},
        "health": checks + whole + evidence.beside(registry, name, version),
        **(of_artifact(made) if made else {"recipe": None}),
        **_measured(records, main, made),
        "history": _history(state),
        "compared": _neighbours(registry, name, version, main, compared),
    }  # fmt: skip


def of_file(made: Artifact, name: str, sha256: str, size: int, compared: Sequence[TextRecord] = ()) -> dict[str, Any]:
    """Describe a file that is in no registry: no history, and no measurement."""
    known = {"kvq": __version__, "name": name, "version": "", "registry": "", "sha256": sha256, "size": size}
    known |= {"published": None, "yanked": None, "aliases": [], "files": {}, "health": [], "history": []}
    return known | of_artifact(made) | _measured([], None, made) | {"compared": list(_points(compared))}


def of_artifact(made: Artifact) -> dict[str, Any]:
    """Describe a file from its contents: recipe, model, origin, sizes, layers."""
    geometry, (model, revision) = made.fingerprint.geometry, sections.model_of(made)
    return {
        "recipe": recipe_row(made.recipe, geometry) | {"papers": [f"arXiv:{number}" for number in made.recipe.papers]},
        "model": {"id": model, "revision": revision, **geometry.shape},
        "corpus": dict(sections.corpus_of(made)),
        "provenance": dict(made.provenance),
        "sizes": sections.sizes(made)[0],
        "layers": tables.by_layer(replace(made, fit={"layers": [{}] * geometry.layers})),
    }


def aliases(state: State, version: Version) -> list[str]:
    """Return the names that mean the version."""
    return [alias for alias in state.aliases if state.at(alias) == version.version]


def _history(state: State) -> list[dict[str, Any]]:
    """Return a row a change of the name, the newest first."""
    fields = ("version", "alias", "reason")
    rows = [
        {"at": event.at, "change": event.change.kind} | {field: getattr(event.change, field, None) for field in fields}
        for event in state.events
    ]
    return rows[::-1]


def _measured(records: Sequence[Record], main: TextRecord | None, made: Artifact | None) -> dict[str, Any]:
    judged = rating.rate(main)
    said = []
    if main:
        given = main.protocol
        said = [tables.about_text(given), *(tables.about_text(given.texts[text], text) for text in main.result.texts)]
    return {
        "verdict": {"word": judged.word, "why": judged.why, "caution": made and rating.fit_warning(made.provenance)},
        "losses": evidence.losses(main, evidence.fitted_on(made)) if main else [],
        "texts": said,
        "parameters": main.protocol.model.parameters if main else None,
        "errors": list(main.result.layers) if main else [],
        "gate": evidence.gate(records),
        "drift": evidence.weekly(records),
    }


def _neighbours(
    registry: Registry, name: str, version: Version, own: TextRecord | None, compared: Sequence[TextRecord] = ()
) -> list[dict[str, Any]]:
    """Return points of a picture, this version's first. ValueError for records of another model.

    own   the record that stands for the version; None: it was not measured, and there are no others to find
    """
    if own is None:
        return list(_points(compared))
    for record in compared:
        given, wanted = record.protocol.model.id, own.protocol.model.id
        if given != wanted:
            raise ValueError(
                f"--compare: records of {given!r:.80}, and {name} was measured on {wanted!r:.80}; "
                "give those that kvq compare wrote for this model"
            )
    mine = _points([own], f"{name}@{version.version}")
    others = (row for row in _points(compared) if row["artifact"] != version.sha256)
    return [*mine, *_measured_alike(registry, name, version, own), *others]


def _points(records: Sequence[TextRecord], name: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield a point a record with figures by full encode."""
    for record in records:
        part, bits = record.figures(FULL), record.result.bits.get("asymptotic")
        if part is not None and bits is not None and part.kl is not None:
            row = {"name": name or record.result.recipe, "recipe": record.result.recipe, "bits": bits}
            yield row | {"kl": part.kl, "kl_se": tables.kl_error(part), "artifact": record.artifact}


def _measured_alike(registry: Registry, name: str, version: Version, own: TextRecord) -> Iterator[dict[str, Any]]:
    """Yield every other version in the registry that was measured on the same windows of the same model; versions that
    cannot be read are passed over."""
    for other in registry.names():
        try:
            for one in registry.state(other).versions.values():
                if (other, one.version) != (name, version.version) and one.yanked is None:
                    records = text_records(readable(registry.evaluations(one.sha256, other)))
                    same = next((record for record in records if _windows(record) == _windows(own)), None)
                    yield from _points([same] if same else [], f"{other}@{one.version}")
        except (ArtifactError, NotFound, PermissionError):
            continue


def _windows(record: TextRecord) -> tuple[Any, ...]:
    """Return what two records must share to be compared: model, text and which of its tokens."""
    given = record.protocol
    return (given.model.id, given.length, given.windows, given.text.token_digest, given.sinks)


# ---- the page --------------------------------------------------------------------------------------------------------


def page(known: Known) -> str:
    """Write the whole page."""
    reference = f"{known['name']}@{known['version']}" if known["version"] else str(known["name"])
    badges = [*known["aliases"], *(["yanked"] if known["yanked"] is not None else [])]
    model, size, registry = (known.get("model") or {}).get("id"), known["parameters"], known["registry"]
    about = [str(model or "unknown model"), size and f"{size_of(size)} parameters", known["published"]]
    points = [Point(row["name"], row["bits"], row["kl"], row["kl_se"]) for row in known["compared"]]
    return html.page(
        "version.html",
        known=known,
        reference=reference,
        loads=f"{registry}/{reference}" if registry.startswith("hf://") else reference,
        folder=registry if registry.startswith("file:") else None,
        model=shlex.quote(str(model)) if model else "MODEL",
        badges=[*badges, *(["damaged"] if faults(known) else [])],
        about=", ".join(filter(None, about)),
        small=size is not None and size < card.SMALL,
        losses=losses(known),
        compared=[
            {name: row[name] for name in ("name", "recipe", "bits")}
            | {"KL, nats": spread(figure(row["kl"]), row["kl_se"], ".2g")}
            for row in known["compared"]
        ],
        provenance=provenance(known),
        bits=plots.bits_by_layer(known["layers"]) if known["recipe"] else None,
        errors=plots.layer_errors({"": known["errors"]}),
        divergence=plots.divergence_by_bits(points),
    )


def faults(known: Known) -> list[str]:
    """Return the damage that checks found, a sentence each."""
    failed = (row for row in known["health"] if row["result"] == evidence.FAILED and row["check"] != "yanked")
    return [f"{row['check']}: {row['what']}" for row in failed]


def losses(known: Known) -> list[dict[str, Any]]:
    """Return losses by text and protocol, in words; where there are none, the reason."""
    rows = []
    for one in known["losses"]:
        domain = {True: "in", False: "out", None: "not known"}[one["in_domain"]]
        row = {"text": one["text"], "domain": domain, "protocol": SPOKEN[one["protocol"]]}
        if "reason" in one:
            rows.append(row | {"decoded": one["reason"]})
            continue
        row |= {"16 bit": figure(one["reference_perplexity"], ".3f"), "perplexity": figure(one["perplexity"], ".3f")}
        row |= {"against 16 bit": spread(percent(one["relative"]), one["relative_se"], ".2%")}
        row |= {"KL, nats": spread(figure(one["kl"]), one["kl_se"], ".2g")}
        rows.append(row | {"top-1": figure(one["top1"], ".2%"), "decoded": figure(one["decoded"], ".0%")})
    return rows


def provenance(known: Known) -> dict[str, Any]:
    """Return model, text, machine and digests."""
    model, given, corpus = known.get("model") or {}, known.get("provenance") or {}, known.get("corpus") or {}
    machine = given.get("environment")
    return {
        "model": model.get("id"),
        "revision": model.get("revision"),
        "shape": f"{model['layers']} layers, {model['kv_heads']} KV heads of {model['head_size']}" if model else None,
        "corpus": corpus.get("source"),
        "corpus digest": corpus.get("corpus_digest"),
        "token digest": corpus.get("token_digest"),
        "sequences": f"{given['samples']} of {given.get('seq_len')} tokens" if "samples" in given else None,
        "held out": given.get("held_out"),
        "seed": given.get("seed"),
        "environment": sections.machine_of(machine) if isinstance(machine, Mapping) else machine,
        "papers": ", ".join((known["recipe"] or {}).get("papers", [])) or None,
        "bytes": known["size"],
        "sha256": known["sha256"],
        "registry": known["registry"] or None,
    }
