"""Gather everything that is known of one version, as JSON: what `kvq report --json` prints and the page is drawn from.

    registry, file → known → page

Nothing is computed by a model here: figures are those of the file, of the registry's records, or of shapes. What is not
known is None or an empty list; a file that does not load leaves its own parts out, and `health` says why.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvq_calib.report import answered, greedy, tables
from kvq_calib.report.page import evidence
from kvq_calib.report.sections import corpus_of, model_of
from kvq_calib.report.tables import kl_error
from kvq_runtime import __version__
from kvq_runtime.artifact import folder
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.artifact.describe import diff, recipe_row
from kvq_runtime.cli.names import changes
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.registry import verdict
from kvq_runtime.registry.events import State, Version
from kvq_runtime.registry.measured import FULL, Record, TextRecord, of_text
from kvq_runtime.registry.registry import Registry
from kvq_runtime.registry.sound import sound
from kvq_runtime.store.held import Sizes

MAX_LINES = 60  # lines of settings that differ from the last version's; more are counted
CARD = "README.md"


def of_version(registry: Registry, name: str, number: str, compared: Sequence[TextRecord] = ()) -> dict[str, Any]:
    """Everything known of a version.

    compared   records of other recipes on the same model, as `kvq compare --output` writes them
    Raises NotFound for a name or version that is not there, ArtifactError for a damaged history.
    """
    state = registry.existing(name)
    version = state.get(number)
    checks, made = evidence.checked(registry, name, version)
    records, whole = evidence.evaluations(registry, name, version)
    known = {"kvq": __version__, "name": name, "version": number, "registry": registry.url}
    known |= _published(state, version) | {"health": checks + whole + evidence.beside(registry, name, version)}
    known |= of_artifact(made) if made else {"recipe": None}
    known |= _measured(records, made) | {"history": changes(state)[::-1]}
    known["compared"] = _neighbours(registry, name, version, evidence.main(records, made), compared)
    known["before"] = _before(registry, state, version, made, records)
    known["card"] = _card(registry, name, version)
    return known


def of_file(made: Artifact, name: str, sha256: str, size: int, compared: Sequence[TextRecord] = ()) -> dict[str, Any]:
    """Describe a file that is in no registry: no history, and no measurement."""
    known = {"kvq": __version__, "name": name, "version": "", "registry": "", "sha256": sha256, "size": size}
    known |= {"published": None, "yanked": None, "aliases": [], "files": {}, "health": evidence.passed(registry=False)}
    known |= of_artifact(made) | _measured([], made) | {"history": []}
    return known | {"compared": list(_points(compared)), "before": None, "card": None}


def _published(state: State, version: Version) -> dict[str, Any]:
    found: dict[str, Any] = {"sha256": version.sha256, "size": version.size, "published": version.at}
    found |= {"yanked": version.yanked, "aliases": aliases(state, version)}
    return found | {"files": {name: dict(about) for name, about in version.files.items()}}


def aliases(state: State, version: Version) -> list[str]:
    """The names that mean the version."""
    return [alias for alias in state.aliases if state.at(alias) == version.version]


def named(one: Mapping[str, Any]) -> str:
    """The reference of a version: its name and number."""
    return f"{one['name']}@{one['version']}" if one.get("version") else str(one["name"])


def of_artifact(made: Artifact) -> dict[str, Any]:
    """Describe a file from its contents: recipe, model, origin, sizes, layers of the fit."""
    geometry, (model, revision) = made.fingerprint.geometry, model_of(made)
    sizes = Sizes(made.recipe, geometry, sliding=made.fingerprint.sliding)
    held = [sizes.at(tokens) for tokens in folder.LENGTHS]
    return {
        "recipe": recipe_row(made.recipe, geometry) | {"papers": [f"arXiv:{one}" for one in made.recipe.papers]},
        "settings": made.recipe.to_json(),
        "model": {"id": model, "revision": revision, **geometry.shape},
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
    plain = [
        {role: dict(part) for role, part in one.items() if isinstance(part, Mapping)}
        if isinstance(one, Mapping)
        else {}
        for one in measures  # files may hold anything
    ]
    return tables.by_layer(replace(made, fit={"layers": plain}))


def _measured(records: Sequence[Record], made: Artifact | None) -> dict[str, Any]:
    main = evidence.main(records, made)
    found: dict[str, Any] = {
        "losses": evidence.losses(main, evidence.fitted_on(made)[0]) if main else [],
        "evaluation": evidence.about(main) if main else None,
        "errors": list(main.result.layers) if main else [],
    }
    judged = verdict.of_record(main)
    found["verdict"] = {"word": judged.word, "why": judged.why, "caution": made and verdict.thinness(made.provenance)}
    found |= {"gate": evidence.gate(records), "drift": evidence.weekly(records), "records": evidence.brief(records)}
    return found | {"tasks": answered.answers(records), "greedy": greedy.found(records)}


def _card(registry: Registry, name: str, version: Version) -> str | None:
    """The text of the card; None where there is none, or it cannot be read (`health` says so)."""
    if CARD not in version.files:
        return None
    try:
        return registry.attachments(name, version)[CARD].decode(errors="replace")
    except (ArtifactError, OSError):
        return None


def _neighbours(
    registry: Registry, name: str, version: Version, own: TextRecord | None, compared: Sequence[TextRecord] = ()
) -> list[dict[str, Any]]:
    """Points of a picture, this version's first: name, recipe, bits, divergence by full encode and its standard error.

    own        the record that stands for the version; None: it was not measured, and there are no others to find
    compared   records of the caller: of the same model, or a ValueError
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
    mine = _points([own], {"name": name, "version": version.version, "this": True})
    others = (row for row in _points(compared) if row["artifact"] != version.sha256)
    return [*mine, *_beside(registry, name, version, own), *others]


def _points(records: Sequence[TextRecord], about: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
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
                    same = next((record for record in records if _measured_on(record) == _measured_on(own)), None)
                    yield from _points([same] if same else [], {"name": other, "version": one.version})
        except (ArtifactError, NotFound, PermissionError):
            continue


def _measured_on(record: TextRecord) -> tuple[Any, ...]:
    """Return what two records must share to be one picture: model, text and which of its tokens."""
    given = record.protocol
    return (given.model.id, given.length, given.windows, given.text.token_digest, given.sinks)


def _before(
    registry: Registry, state: State, version: Version, made: Artifact | None, records: Sequence[Record]
) -> dict[str, Any] | None:
    """Return the differences from the last version; None if there is none.

    `same_windows` is None where one of the two was not measured; losses of other windows are shown, and said to be so.
    """
    published = list(state.versions.values())
    place = published.index(version)
    if place == 0:
        return None
    other = published[place - 1]
    found: dict[str, Any] = {"version": other.version, "published": other.at, "sha256": other.sha256}
    found |= {"size": other.size, "yanked": other.yanked, "settings": [], "left_out": 0, "reason": None}
    checks, before = evidence.checked(registry, state.name, other)
    earlier, _ = evidence.evaluations(registry, state.name, other)
    mine, theirs = evidence.main(records, made), evidence.main(earlier, before)
    found["losses"] = _losses(mine, theirs)
    digests = [one.protocol.text.token_digest for one in (mine, theirs) if one]
    found["same_windows"] = digests[0] == digests[1] if len(digests) == 2 else None
    if before is None or made is None:
        failed = next((row["what"] for row in checks if row["result"] == evidence.FAILED), "this version does not load")
        return found | {"reason": failed}
    rows = diff(before, made)
    settings = [row for row in rows if row["part"] in ("recipe", "model", "provenance")]
    tensors = [row for row in rows if row["part"] == "tensor"]
    changes = [row["change"] for row in tensors if row["change"] is not None]
    found["settings"], found["left_out"] = settings[:MAX_LINES], max(0, len(settings) - MAX_LINES)
    mean = sum(changes) / len(changes) if changes else None
    found["tensors"] = {"differ": len(tensors), "of": len(made.tensors), "mean_change": mean}
    return found | {"sizes": _sizes(before, made)}


def _sizes(before: Artifact, made: Artifact) -> list[dict[str, Any]]:
    """Bits of an element, and bytes of a row of some lengths, before and now."""
    old, new = folder.sizes(before), folder.sizes(made)
    pairs = ((int(tokens), old["bytes"][tokens], new["bytes"][tokens]) for tokens in old["bytes"])
    lengths = ({"what": "bytes", "tokens": tokens, "before": before, "now": now} for tokens, before, now in pairs)
    return [{"what": "bits", "before": old["bits"], "now": new["bits"]}, *lengths]


def _losses(mine: TextRecord | None, theirs: TextRecord | None) -> list[dict[str, Any]]:
    """Divergence and perplexity against 16 bit of both, by text and protocol."""
    given = [evidence.losses(one) if one else [] for one in (theirs, mine)]
    sides = [{(row["text"], row["protocol"]): row for row in rows} for rows in given]
    found = []
    for text, protocol in dict.fromkeys([*sides[1], *sides[0]]):
        row: dict[str, Any] = {"text": text, "protocol": protocol}
        for name in ("kl", "relative"):
            row[f"{name}_before"], row[name] = (side.get((text, protocol), {}).get(name) for side in sides)
        found.append(row)
    return found
