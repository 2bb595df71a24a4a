"""Read the header of an artifact's file, without torch: for lists of hundreds of versions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq_runtime.artifact import header
from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError

SCHEMA = 1
CHECKS = ("header", "size", "sha256", "schema", "content", "recipe", "fingerprint", "tensors", "finite")


def describe(path: Path | str) -> dict[str, Any]:
    """The metadata of a file: schema, recipe, fingerprint, provenance, fit and content. Only the header is checked."""
    with files.opened(Path(path)) as (file, size):
        return about_of(header.read(file, size))


def about_of(head: header.Header) -> dict[str, Any]:
    """The metadata under the key `kvq` of a header."""
    about = strict_json.loads(head.kvq, "header: kvq")
    schema = about.get("schema") if isinstance(about, dict) else None
    if type(schema) is not int or schema != SCHEMA:
        raise ArtifactError(
            f"schema: the file has {schema!r:.40}, this version reads {SCHEMA}; install another version of kvq-runtime"
        )
    names = {"schema", "recipe", "fingerprint", "provenance", "fit", "content"}
    strict_json.keys(about, names, "schema: kvq")
    if not isinstance(about["provenance"], dict) or not isinstance(about["fit"], dict):
        raise ArtifactError("schema: provenance and fit must be objects")
    return about


def summary(about: Mapping[str, Any]) -> dict[str, Any]:
    """Recipe, model and corpus from the metadata of an artifact's header: what `kvq search` compares."""
    provenance = about["provenance"]
    model, text = provenance.get("model"), provenance.get("corpus")
    model = model if isinstance(model, Mapping) else {"id": model, "revision": provenance.get("revision")}
    text = text if isinstance(text, Mapping) else {"source": text}
    recipe = about["recipe"].get("name") if isinstance(about["recipe"], Mapping) else None
    fields = {"recipe": recipe, "model": model.get("id"), "revision": model.get("revision")}
    fields |= {"corpus": text.get("source"), "corpus_digest": text.get("corpus_digest")}
    return {name: value if value is None else str(value)[:200] for name, value in fields.items()}
