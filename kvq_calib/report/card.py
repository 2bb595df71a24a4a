"""Write the card of an artifact: what it is, where it comes from, what was measured, and how to use it.

Markdown with the front matter of the Hugging Face Hub. Nothing is claimed that is not in the artifact or in a record;
a figure stands beside the size of the model it was measured on. Its text is `templates/card.md`, tables are in
`sections.py`.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from kvq_calib.model.catalog import entry
from kvq_calib.report import plots, sections
from kvq_calib.report.tables import by_layer, in_bold, markdown_table, size_of
from kvq_calib.text.documents import SUFFIXES
from kvq_runtime.artifact import folder
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.recipe import OURS
from kvq_runtime.registry import rating
from kvq_runtime.registry.card import UNMEASURED, eval_results
from kvq_runtime.registry.evaluation_records import SPOKEN, Record, other_texts, text_records
from kvq_runtime.store.memory import asymptotic_bits

SMALL = 1_000_000_000  # parameters below which a figure says little about the models people serve
_HUB = re.compile(r"[\w.-]+/[\w.-]+")


def files(
    artifact: Artifact,
    records: Sequence[Record] = (),
    name: str | None = None,
    measured: Mapping[str, bytes] = MappingProxyType({}),
    license: Mapping[str, str] | None = None,
) -> dict[str, bytes]:
    """The card, and the plots of what was measured and of what the fit saw, by file name.

    records, name, license   as for `card`
    measured                 plots of the records
    """
    drawn, name = dict(measured), name or artifact.recipe.name
    if "budget" in artifact.fit:
        drawn["bits-by-layer.png"] = plots.png(plots.bits_by_layer(by_layer(artifact)))
    return {"README.md": card(artifact, records, name, license=license, pictures=list(drawn)).encode()} | drawn


def card(
    artifact: Artifact,
    records: Sequence[Record] = (),
    name: str | None = None,
    license: Mapping[str, str] | None = None,
    pictures: Sequence[str] = (),
) -> str:
    """The text of README.md.

    records   evaluation records; those of other artifacts are shown for comparison
    name      in the registry; None: the recipe's
    license   of the base model's weights, from which the artifact is derived, if known: see `sections.license_of`
    pictures  files beside the card
    """
    name, license, recipe = name or artifact.recipe.name, license or {}, artifact.recipe
    model, revision = sections.model_of(artifact)
    measured = text_records(records)
    parameters = {record.protocol.model.parameters for record in records}
    sizes, least = sections.sizes(artifact)
    sources = [record.protocol.text.source for record in measured] + other_texts(measured)
    return _template().render(
        front=_front(artifact, name, records, license),
        name=name,
        verdict=rating.rate(next((one for one in measured if _is_of(artifact, one)), None)),
        bits=asymptotic_bits(recipe, artifact.fingerprint.geometry),
        caution=rating.fit_warning(artifact.provenance),
        model=model,
        revision=revision,
        recipe=recipe,
        source=_source(model, "loader" in artifact.provenance),
        pinned=f', revision="{revision}"' if revision else "",
        ours=recipe.needs & OURS,
        stages=sections.recipe(artifact),
        sizes=sizes,
        least=least,
        provenance=sections.provenance(artifact, license),
        layers=sections.fit(artifact),
        budget=artifact.fit.get("budget"),
        evaluations=sections.evaluations(measured),
        unmeasured=UNMEASURED,
        gate=measured[0].result.gate if measured else None,
        spoken=SPOKEN,
        held_out=artifact.provenance.get("held_out"),
        pictures=pictures,
        few=sorted(count for count in parameters if count is not None and count < SMALL),
        texts=list(dict.fromkeys(sources)),
    )


@cache
def _template() -> Template:
    """The text around what sections say: Markdown, of which nothing is escaped."""
    found = Environment(
        loader=PackageLoader("kvq_calib.report", "templates"), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    found.filters |= {one.__name__: one for one in (in_bold, markdown_table, size_of)}
    return found.get_template("card.md")


def _is_of(artifact: Artifact, record: Record) -> bool:
    return record.result.recipe == artifact.recipe.name


def _front(artifact: Artifact, name: str, records: Sequence[Record], license: Mapping[str, str]) -> str:
    model, _ = sections.model_of(artifact)
    given: dict[str, Any] = folder.metadata(artifact) | dict(license)
    if _HUB.fullmatch(model):
        given |= {"base_model": model, "base_model_relation": "quantized"}
    source = str(sections.corpus_of(artifact).get("source"))
    if (corpus := _HUB.match(source)) and not source.endswith(SUFFIXES):
        given["datasets"] = [corpus[0]]
    if results := eval_results([record for record in records if _is_of(artifact, record)]):
        given |= {"model_name": name, "eval_results": results}
    return f"---\n{ModelCardData(**given).to_yaml()}\n---"


def _source(model: str, images: bool) -> dict[str, Any]:
    """State where transformers finds a model, in the words of the snippet: extra, classes, and what loads it."""
    classes = ["AutoModelForImageTextToText" if images else "AutoModelForCausalLM", "AutoTokenizer"]
    found = {"extra": "hf", "classes": classes, "finder": "", "options": "", "load": "model_id"}
    if model.endswith(".gguf"):
        found |= {"where": f'gguf_file = "{model}"  # in this folder', "load": '".", gguf_file=gguf_file'}
        found |= {"options": ", quantization_config=GgufConfig(dequantize=True)", "extra": "gguf"}
        return found | {"classes": [*classes, "GgufConfig"]}
    if model == "demo":
        finder = "from kvq_calib.model.find import resolve"
        return found | {"extra": "calib", "finder": finder, "where": 'folder = resolve("demo").path', "load": "folder"}
    if _HUB.fullmatch(model):
        return found | {"where": f'model_id = "{model}"'}
    if entry(model).package is not None:
        return found | {"where": f'model_id = "build/{model}"  # make real-model'}
    return found | {"where": f'model_id = "{model}"  # the folder of the model'}
