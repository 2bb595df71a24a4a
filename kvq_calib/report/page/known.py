"""Gather everything that is known of one version, as JSON: what `kvq report --json` prints and the page is drawn from.

    registry, file → known → page

Nothing is computed by a model here: figures are those of the file, of the registry's records, or of shapes. What is not
known is None or an empty list; a file that does not load leaves its own parts out, and `health` says why.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvq_calib.report import asked, tables
from kvq_calib.report.page import earlier, health, losses, neighbours
from kvq_calib.report.sections import corpus_of, model_of
from kvq_runtime import __version__
from kvq_runtime.artifact import folder
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.artifact.describe import recipe_row
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry import verdict
from kvq_runtime.registry.events import State, Version
from kvq_runtime.registry.measured import Record, TextRecord
from kvq_runtime.registry.registry import Registry
from kvq_runtime.store.held import Sizes

CARD = "README.md"


def of_version(registry: Registry, name: str, number: str, compared: Sequence[TextRecord] = ()) -> dict[str, Any]:
    """Everything known of a version.

    compared   records of other recipes on the same model, as `kvq compare --output` writes them
    Raises NotFound for a name or version that is not there, ArtifactError for a damaged history.
    """
    state = registry.existing(name)
    version = state.get(number)
    checks, made = health.checked(registry, name, version)
    records, whole = health.evaluations(registry, name, version)
    known = {"kvq": __version__, "name": name, "version": number, "registry": registry.url}
    known |= _published(state, version) | {"health": checks + whole + health.beside(registry, name, version)}
    known |= of_artifact(made) if made else {"recipe": None}
    known |= _measured(records, made) | {"history": history(state)}
    known["compared"] = neighbours.found(registry, name, version, losses.main(records, made), compared)
    known["before"] = earlier.compared(registry, state, version, made, records)
    known["card"] = _card(registry, name, version)
    return known


def of_file(made: Artifact, name: str, sha256: str, size: int, compared: Sequence[TextRecord] = ()) -> dict[str, Any]:
    """Describe a file that is in no registry: no history, and no measurement."""
    known = {"kvq": __version__, "name": name, "version": "", "registry": "", "sha256": sha256, "size": size}
    known |= {"published": None, "yanked": None, "aliases": [], "files": {}, "health": health.passed(registry=False)}
    known |= of_artifact(made) | _measured([], made) | {"history": []}
    return known | {"compared": list(neighbours.rows(compared)), "before": None, "card": None}


def _published(state: State, version: Version) -> dict[str, Any]:
    aliases = [alias for alias in state.aliases if state.at(alias) == version.version]
    found: dict[str, Any] = {"sha256": version.sha256, "size": version.size, "published": version.at}
    return found | {
        "yanked": version.yanked,
        "aliases": aliases,
        "files": {n: dict(v) for n, v in version.files.items()},
    }


def of_artifact(made: Artifact) -> dict[str, Any]:
    """Describe a file from its contents: recipe, model, origin, sizes, layers of the fit."""
    geometry, (model, revision) = made.fingerprint.geometry, model_of(made)
    sizes = Sizes(made.recipe, geometry, sliding=made.fingerprint.sliding)
    held = [sizes.at(tokens) for tokens in folder.LENGTHS]
    shape = {"layers": geometry.layers, "kv_heads": geometry.kv_heads, "head_size": geometry.head_size}
    return {
        "recipe": recipe_row(made.recipe, geometry) | {"papers": [f"arXiv:{one}" for one in made.recipe.papers]},
        "settings": made.recipe.to_json(),
        "model": {"id": model, "revision": revision, **shape},
        "corpus": dict(corpus_of(made)),
        "provenance": dict(made.provenance),
        "tensor_bytes": sum(tensor.nbytes for tensor in made.tensors.values()),
        "sizes": [{"tokens": one.tokens, "bytes": one.total, "of_16_bit": one.exact, "bits": one.bits} for one in held],
        "smaller_from": sizes.smaller_from(),
        "layers": layers(made),
    }


def layers(made: Artifact) -> list[dict[str, Any]]:
    """Bits of keys and values by layer, with what the fit measured there where it measured anything."""
    given, count = made.fit.get("layers"), made.fingerprint.geometry.layers
    measures = given if isinstance(given, list) and len(given) == count else [{}] * count
    plain = [_of_roles(one) for one in measures]
    return tables.by_layer(replace(made, fit={"layers": plain}))


def _of_roles(measures: Any) -> dict[str, Any]:
    """Return what a fit measured of keys and of values in a layer; files may hold anything."""
    pairs = measures.items() if isinstance(measures, Mapping) else ()
    return {role: dict(part) for role, part in pairs if isinstance(part, Mapping)}


def _measured(records: Sequence[Record], made: Artifact | None) -> dict[str, Any]:
    main = losses.main(records, made)
    found: dict[str, Any] = {
        "losses": losses.rows(main, losses.source(made)) if main else [],
        "evaluation": losses.about(main) if main else None,
    }
    found["errors"] = list(main.result.layers) if main else []
    judged = verdict.of_records(records, losses.source(made))
    found["verdict"] = {"word": judged.word, "why": judged.why, "caution": made and verdict.thinness(made.provenance)}
    found |= {"gate": losses.gate(records), "drift": losses.weekly(records), "records": losses.brief(records)}
    return found | {"tasks": asked.tasks(records), "greedy": asked.greedy(records)}


def history(state: State) -> list[dict[str, Any]]:
    """Every change of the name, the newest first."""
    rows = []
    for event in reversed(state.events):
        fields = {field: getattr(event.change, field, None) for field in ("version", "alias", "reason", "sha256")}
        rows.append({"number": event.number, "at": event.at, "change": event.change.kind} | fields)
    return rows


def _card(registry: Registry, name: str, version: Version) -> str | None:
    """The text of the card; None where there is none, or it cannot be read (`health` says so)."""
    if CARD not in version.files:
        return None
    try:
        return registry.attachments(name, version)[CARD].decode(errors="replace")
    except (ArtifactError, OSError):
        return None
