"""Gather what a card says of the origin of an artifact and of its measurements: rows of tables, and some in Markdown.

Licences are stated where they are known, and nothing is guessed from a name. A model's is in the front matter of its
README.md, or in its GGUF file. Of corpora, only those of embedded ones are known here: a dataset of the Hub states its
own on its card, which ours names.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.repocard import metadata_load

from kvq_calib.report import tables
from kvq_calib.report.tables import by_layer, escaped, markdown_table
from kvq_runtime.artifact import folder
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.artifact.describe import artifact_record, recipe_row, stages
from kvq_runtime.errors import counted
from kvq_runtime.recipe import ROLES, Recipe
from kvq_runtime.registry.evaluation_records import TextRecord
from kvq_runtime.store.estimate import Sizes
from kvq_runtime.store.memory import human

LICENSE = ("license", "license_name", "license_link")  # fields of a model's
CORPORA = {  # licences of embedded ones
    "demo": "PSF-2.0 (the documentation of Python)",
    "demo-code": "PSF-2.0 (the library of Python)",
}
LONG = 240  # characters of the stages of single layers from which they are folded away
_HEADS = {"recipe": "cache", "at 4096": "bits at 4096 tokens", "vs 16 bit": "against 16 bit", "KL": "KL, nats",
          "top-1": "top-1 agreement"}  # fmt: skip


def model_of(artifact: Artifact) -> tuple[str, str | None]:
    """(id, revision) of the model that the artifact was fitted to."""
    given = artifact.provenance.get("model")
    if isinstance(given, Mapping):
        return str(given.get("id", "unknown")), given.get("revision")
    return str(given or "unknown"), artifact.provenance.get("revision")


def corpus_of(artifact: Artifact) -> Mapping[str, Any]:
    """Return the provenance of the text that the artifact was fitted to."""
    given = artifact.provenance.get("corpus")
    return given if isinstance(given, Mapping) else {"source": given}


def license_of(model: Path) -> dict[str, str]:
    """The licence fields of a model folder's README.md; empty if it has none."""
    readme = model / "README.md"
    found = metadata_load(readme) if readme.is_file() else None
    return {field: str(found[field]) for field in LICENSE if found and found.get(field)}


def recipe(artifact: Artifact) -> str:
    """Describe how keys and values are stored, and at how many bits."""
    row = recipe_row(artifact.recipe, artifact.fingerprint.geometry)
    window, shape = artifact.recipe.window, artifact.fingerprint.geometry
    exceptions = _exceptions(artifact.recipe)
    folded = sum(len(part) for one in exceptions for part in one) > LONG
    rows = {
        "recipe": f"`{row['name']}`",
        "keys are encoded": "before RoPE" if row["position"] == "pre" else "after RoPE",
        "keys": f"`{row['keys']}`",
        "values": f"`{row['values']}`" if row["values"] != "as keys" else "as keys",
        "other layers": f"{len(artifact.recipe.layers)} of {shape.layers}, below"
        if folded
        else "; ".join(f"{layers}: `{keys}` | `{values}`" for layers, keys, values in exceptions) or "none",
        "bits per element, asymptotic": f"{row['bits']:.4g}",
        "exact tokens": f"{window.sinks} sinks, {window.recent} recent at least",
        "block": f"{window.block} tokens",
        "cache": f"{shape.layers} layers, {shape.kv_heads} KV heads of {shape.head_size}{_others(artifact)}",
    }
    if not folded:
        return _pairs(rows)
    table = markdown_table([
        {"layers": layers, "keys": f"`{keys}`", "values": f"`{values}`"} for layers, keys, values in exceptions
    ])  # fmt: skip
    return f"{_pairs(rows)}\n\n<details>\n<summary>Stages by layer</summary>\n\n{table}\n\n</details>"


def _others(artifact: Artifact) -> str:
    """Say which layers of a model those are, where not all attend to all tokens; and what the others hold."""
    which, sliding = artifact.fingerprint.attending, artifact.fingerprint.sliding
    if which is None:
        return ""
    own = f": those that attend to all tokens, {', '.join(map(str, which))} of the model"
    return own + (f"; {sliding.layers} slide over {sliding.window} tokens, in 16 bits" if sliding.layers else "")


def _exceptions(recipe: Recipe) -> list[tuple[str, str, str]]:
    """(layers, keys, values) of the layers that have stages of their own, layers with equal ones together."""
    same: dict[tuple[str, str], list[int]] = {}
    for layer, (key, value) in sorted(recipe.layers.items()):
        same.setdefault((stages(key), stages(value)), []).append(layer)
    return [(", ".join(map(str, layers)), *pair) for pair, layers in same.items()]


def sizes(artifact: Artifact) -> tuple[list[dict[str, str]], int | None]:
    """All bytes of a cache of one row at a few lengths, beside 16 bit; and from how many tokens on they are fewer."""
    whole = Sizes(artifact.recipe, artifact.fingerprint.geometry, sliding=artifact.fingerprint.sliding)
    found = [whole.at(tokens) for tokens in folder.LENGTHS]
    rows = [{"tokens": f"{one.tokens:,}", "all bytes": human(one.total), "16 bit": human(one.exact),
             "share": f"{one.total / one.exact:.0%}"} for one in found]  # fmt: skip
    return rows, whole.smaller_from()


def provenance(artifact: Artifact, license: Mapping[str, str]) -> str:
    """The model, the text and the machine that the artifact is of."""
    given = artifact.provenance
    model, revision = model_of(artifact)
    text = corpus_of(artifact)
    rows = {"model": f"`{model}`", "revision": revision and f"`{revision}`"}
    rows |= {"weights": given.get("quantization") and f"{given['quantization']}, dequantized"}
    rows |= {"licence of the model": license.get("license_name") or license.get("license") or "not known here"}
    rows |= {"licence of the corpus": CORPORA.get(str(text.get("source")), "not known here; see the corpus")}
    rows |= {"corpus": text.get("source"), "corpus digest": _short(text.get("corpus_digest"))}
    rows |= {"token digest": _short(text.get("token_digest"))}
    if "samples" in given:
        rows["sequences"] = f"{given['samples']} of {given.get('seq_len')} tokens, {given.get('held_out', 0)} held out"
    rows["seed"] = given.get("seed")
    rows["environment"] = machine_of(given.get("environment") or {})
    rows["fitted tensors"] = human(artifact_record(artifact)["tensor_bytes"])
    return _pairs({key: value for key, value in rows.items() if value not in (None, "")})


def machine_of(given: Mapping[str, Any]) -> str:
    """Versions, then the device with its kind of processor, and the arithmetic, in words."""
    about = {"machine", "dtype", "threads", "device", "cpu"}
    said = [f"{name} {number}" for name, number in given.items() if name not in about]
    processor = " ".join(str(given[name]) for name in ("machine", "cpu") if given.get(name))
    device = {"cpu": "CPU", None: ""}.get(given.get("device"), given.get("device"))
    said += [" ".join(filter(None, (device, processor and f"({processor})")))] if device or processor else []
    said += [str(given["dtype"])] if "dtype" in given else []
    said += [counted(given["threads"], "thread")] if "threads" in given else []
    return ", ".join(said)


def fit(artifact: Artifact) -> list[dict[str, Any]]:
    """The measurements of the fit itself, a row a layer; bits where those of layers differ."""
    rows = by_layer(artifact) if artifact.fit.get("layers") else []
    if len({row[f"{role}s"] for row in rows for role in ROLES}) == 1:
        rows = [{name: row[name] for name in row if name not in ("keys", "values")} for row in rows]
    return rows


def evaluations(records: Sequence[TextRecord]) -> list[dict[str, Any]]:
    """Group what was measured since, texts of other kinds too, by what can be compared: of each the protocol, the text
    in words, and a row a recipe and protocol."""
    elsewhere = [one for record in records for one in record.elsewhere().values()]
    found = []
    for group in _groups([*records, *elsewhere]):
        given = group[0].protocol
        rows = [{_HEADS.get(head, head): cell for head, cell in row.items()} for row in tables.by_protocol(group)]
        for row in rows:
            row.pop(f"at {given.length}", None)
        text = tables.about_text(given)
        found.append({"given": given, "text": text, "rows": rows})
    return found


def _groups(records: Sequence[TextRecord]) -> list[list[TextRecord]]:
    """Records of one protocol and environment together: only those can be compared."""
    groups: dict[str, list[TextRecord]] = {}
    for record in records:
        groups.setdefault(repr((record.protocol, record.environment, record.corpus)), []).append(record)
    return list(groups.values())


def _pairs(rows: Mapping[str, Any]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {escaped(value)} |" for key, value in rows.items())])


def _short(digest: Any) -> str | None:
    return f"`{str(digest)[:16]}…`" if digest else None
