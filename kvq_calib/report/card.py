"""Write the card of an artifact: what it is, where it comes from, what was measured, and how to use it.

Markdown with the front matter of the Hugging Face Hub, from `templates/card.md`. Nothing is claimed that is not in the
artifact or in a record; a figure stands beside the size of the model it was measured on. A model's
licence is read from the front matter of its README.md.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.repocard import metadata_load
from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from kvq_calib.report import tables
from kvq_calib.report.tables import escaped, markdown_table, size_of
from kvq_calib.text.documents import SUFFIXES
from kvq_runtime.artifact import folder
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.artifact.describe import recipe_row
from kvq_runtime.recipe import OURS, ROLES, is_preset
from kvq_runtime.registry import rating
from kvq_runtime.registry.evaluation_records import SPOKEN, TextRecord
from kvq_runtime.store.memory import human

SMALL = 1_000_000_000  # parameters below which a figure says little about the models people serve
LICENSE = ("license", "license_name", "license_link")  # fields of a model's front matter
PLANNED = ("samples", "held_out", "seq_len", "seed", "gradient_tokens")  # numbers of a plan that a fit depends on
_AUTOMATIC = re.compile(r"auto-([\d.]+)bit(?:-(\w+))?")
_HUB = re.compile(r"[\w.-]+/[\w.-]+")


def card(
    artifact: Artifact,
    measured: Sequence[TextRecord] = (),
    name: str | None = None,
    license: Mapping[str, str] | None = None,
    picture: str | None = None,
) -> str:
    """Return the text of README.md.

    measured  evaluation records; those of other artifacts are shown for comparison
    name      in the registry; None: the recipe's
    license   of the base model's weights, from which the artifact is derived, if known: see `license_of`
    picture   file of the plot beside the card
    """
    name, license, recipe = name or artifact.recipe.name, license or {}, artifact.recipe
    model, revision = model_of(artifact)
    sizes = folder.sizes(artifact)
    parameters = {record.protocol.model.parameters for record in measured}
    texts = list(dict.fromkeys(record.protocol.text.source for record in measured))
    return _template().render(
        snippet(artifact, name),
        front=_front(artifact, license),
        name=name,
        verdict=rating.rate(next((one for one in measured if one.result.recipe == recipe.name), None)),
        bits=sizes["bits"],
        least=sizes["smaller_than_16bit_from"],
        sizes=size_rows(sizes),
        caution=rating.fit_warning(artifact.provenance),
        model=model,
        revision=revision,
        recipe=recipe,
        stages=_pairs(recipe_rows(artifact)),
        provenance=_pairs(provenance(artifact, license)),
        layers=_fit(artifact),
        budget=artifact.fit.get("budget"),
        measured=measured[0].protocol if measured else None,
        losses=[] if not measured else tables.table(measured) if len(texts) == 1 else tables.by_text(measured),
        notes=tables.notes(measured) if measured else [],
        gate=measured[0].result.gate if measured else None,
        spoken=SPOKEN,
        held_out=artifact.provenance.get("held_out"),
        picture=picture,
        few=sorted(count for count in parameters if count is not None and count < SMALL),
        texts=texts,
    )


@cache
def _template() -> Template:
    """Load the card's Markdown, in which nothing is escaped."""
    templates = Environment(
        loader=PackageLoader("kvq_calib.report", "templates"), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    templates.filters |= {one.__name__: one for one in (markdown_table, size_of)}
    return templates.get_template("card.md")


def _front(artifact: Artifact, license: Mapping[str, str]) -> str:
    model, _ = model_of(artifact)
    fields: dict[str, Any] = folder.metadata(artifact) | dict(license)
    if _HUB.fullmatch(model):
        fields |= {"base_model": model, "base_model_relation": "quantized"}
    source = str(corpus_of(artifact).get("source"))
    if (corpus := _HUB.match(source)) and not source.endswith(SUFFIXES):
        fields["datasets"] = [corpus[0]]
    return f"---\n{ModelCardData(**fields).to_yaml()}\n---"


def snippet(artifact: Artifact, reference: str, url: str = "") -> dict[str, Any]:
    """Return the values of `templates/use.txt`, which loads model and artifact; `url`: of a registry to be named."""
    model, revision = model_of(artifact)
    values = {"source": _source(model, "loader" in artifact.provenance), "ours": artifact.recipe.needs & OURS}
    return values | {"pinned": f', revision="{revision}"' if revision else "", "reference": reference, "url": url}


def _source(model: str, images: bool) -> dict[str, Any]:
    """Return the parts of the snippet that load the model: extra, classes, where it is."""
    classes = ["AutoModelForImageTextToText" if images else "AutoModelForCausalLM", "AutoTokenizer"]
    source = {"extra": "hf", "classes": classes, "finder": "", "load": "model_id"}
    if model == "demo" or model.endswith(".gguf"):
        source |= {"extra": "calib", "finder": "from kvq_calib.model.find import resolve", "load": "folder"}
        return source | {"where": f'folder = resolve("{model}").path' + "  # give its path" * (model != "demo")}
    if _HUB.fullmatch(model):
        return source | {"where": f'model_id = "{model}"'}
    return source | {"where": f'model_id = "{model}"  # the folder of the model'}


# ---- what the artifact says ------------------------------------------------------------------------------------------


def model_of(artifact: Artifact) -> tuple[str, str | None]:
    """Return (id, revision) of the model that the artifact was fitted to."""
    return str(artifact.provenance.get("model") or "unknown"), artifact.provenance.get("revision")


def corpus_of(artifact: Artifact) -> Mapping[str, Any]:
    """Return the provenance of the text that the artifact was fitted to."""
    given = artifact.provenance.get("corpus")
    return given if isinstance(given, Mapping) else {"source": given}


def license_of(model: Path) -> dict[str, str]:
    """Return the licence fields of a model folder's README.md; empty if it has none."""
    readme = model / "README.md"
    front = metadata_load(readme) if readme.is_file() else None
    return {name: str(front[name]) for name in LICENSE if front and front.get(name)}


POSITIONS = {"pre": "before RoPE", "post": "after RoPE", "segment": "less the angle of their segment's middle"}


def recipe_rows(artifact: Artifact) -> dict[str, str]:
    """Describe how keys and values are stored, and at how many bits."""
    row, shape = recipe_row(artifact.recipe, artifact.fingerprint.geometry), artifact.fingerprint.geometry
    window, which, sliding = artifact.recipe.window, artifact.fingerprint.attending, artifact.fingerprint.sliding
    cached = f"{shape.layers} layers, {shape.kv_heads} KV heads of {shape.head_size}"
    cached += f": those that attend to all tokens, {', '.join(map(str, which))} of the model" if which else ""
    cached += f"; {sliding.layers} slide over {sliding.window} tokens, in 16 bits" if sliding.layers else ""
    return {
        "recipe": f"`{row['name']}`",
        "keys are encoded": POSITIONS[row["position"]],
        "keys": f"`{row['keys']}`",
        "values": f"`{row['values']}`" if row["values"] != "as keys" else "as keys",
        "other layers": row["layers"] or "none",
        "bits per element, asymptotic": f"{row['bits']:.4g}",
        "exact tokens": f"{window.sinks} sinks, {window.recent} recent at least",
        "block": f"{window.block} tokens",
        "cache": cached,
    }


def size_rows(sizes: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return all bytes of a cache of one row at a few lengths, beside 16 bit; `sizes` as of `folder.sizes`."""
    exact = sizes["bytes_of_16bit"]
    return [{"tokens": f"{int(tokens):,}", "all bytes": human(size), "16 bit": human(exact[tokens]),
             "share": f"{size / exact[tokens]:.0%}"} for tokens, size in sizes["bytes"].items()]  # fmt: skip


def provenance(artifact: Artifact, license: Mapping[str, str]) -> dict[str, Any]:
    """Return the model, the text and the machine that the artifact is of."""
    given, (model, revision), text = artifact.provenance, model_of(artifact), corpus_of(artifact)
    rows = {"model": f"`{model}`", "revision": revision and f"`{revision}`"}
    rows |= {"weights": given.get("quantization") and f"{given['quantization']}, dequantized"}
    rows |= {"licence of the model": license.get("license_name") or license.get("license") or "not known here"}
    rows |= {"corpus": text.get("source"), "corpus digest": _short(text.get("corpus_digest"))}
    if "samples" in given:
        rows["sequences"] = f"{given['samples']} of {given.get('seq_len')} tokens, {given.get('held_out', 0)} held out"
        rows["made by"] = made_by(artifact)
    machine = given.get("environment")
    if isinstance(machine, Mapping):
        machine = ", ".join(f"{name} {value}" for name, value in machine.items())
    rows |= {"seed": given.get("seed"), "environment": machine}
    rows["fitted tensors"] = human(sum(tensor.nbytes for tensor in artifact.tensors.values()))
    return {name: value for name, value in rows.items() if value not in (None, "")}


def made_by(artifact: Artifact) -> str | None:
    """Return the command that fits such an artifact, by its provenance; None: the recipe has no name that tells all."""
    name, given = artifact.recipe.name, artifact.provenance
    if chosen := _AUTOMATIC.fullmatch(name):
        name = f"auto --bits {chosen[1]}" + (f" --for {chosen[2]}" if chosen[2] else "")
    elif not is_preset(name):
        return None
    options = {"model": shlex.quote(model_of(artifact)[0]), "recipe": name}
    options |= {"corpus": shlex.quote(str(corpus_of(artifact).get("source")))}
    options |= {key.replace("_", "-"): given.get(key) for key in PLANNED}
    said = " ".join(f"--{key} {value}" for key, value in options.items() if value is not None)
    return f"`kvq-calibrate {said}`"


def _fit(artifact: Artifact) -> list[dict[str, Any]]:
    """Return the measurements of the fit itself, a row a layer; with bits if layers differ in them."""
    rows = tables.by_layer(artifact) if artifact.fit.get("layers") else []
    if len({row[f"{role}s"] for row in rows for role in ROLES}) == 1:
        rows = [{name: row[name] for name in row if name not in ("keys", "values")} for row in rows]
    return rows


def _pairs(rows: Mapping[str, Any]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {escaped(value)} |" for key, value in rows.items())])


def _short(digest: Any) -> str | None:
    return f"`{str(digest)[:16]}…`" if digest else None
