"""Write the card of an artifact: what it is, where it comes from, what was measured, and how to use it.

Markdown with the front matter of the Hugging Face Hub. Nothing is claimed that is not in the artifact or in a record; a
figure stands beside the size of the model it was measured on.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from huggingface_hub import ModelCardData

from kvq_calib.model.catalog import entry
from kvq_calib.report import answered, greedy, sections
from kvq_calib.report import fit_plots as draw
from kvq_calib.report.tables import by_layer
from kvq_calib.report.words import size_of
from kvq_calib.text.documents import SUFFIXES
from kvq_runtime.artifact import folder
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.artifact.describe import recipe_row
from kvq_runtime.recipe import OURS
from kvq_runtime.registry import verdict
from kvq_runtime.registry.card import eval_results
from kvq_runtime.registry.measured import Record, of_text, texts
from kvq_runtime.store.held import Sizes
from kvq_runtime.store.memory import asymptotic_bits

SMALL = 1_000_000_000  # parameters below which a figure says little about the models people serve
QUERIES = "query-deviation.png"
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
        where = f"{_model(artifact, records)}, {artifact.provenance.get('samples')} sequences of the fit"
        drawn["bits-by-layer.png"] = draw.bits_by_layer(name, by_layer(artifact), where)
    if artifact.provenance.get("held_out") and any(scheme.feedback for scheme in artifact.recipe.schemes):
        where = f"{_model(artifact, records)}, {artifact.provenance['held_out']} held-out sequences"
        drawn[QUERIES] = draw.query_deviation(artifact.fit["layers"], where)
    return {"README.md": card(artifact, records, name, license=license, plots=list(drawn)).encode()} | drawn


def _model(artifact: Artifact, records: Sequence[Record]) -> str:
    """The model's name, and its size where a record has it."""
    sizes = [size_of(record.protocol.model.parameters) for record in records[:1]]
    return sections.model_of(artifact)[0] + (f" ({sizes[0]} parameters)" if sizes else "")


def card(
    artifact: Artifact,
    records: Sequence[Record] = (),
    name: str | None = None,
    license: Mapping[str, str] | None = None,
    plots: Sequence[str] = (),
) -> str:
    """The text of README.md.

    records   evaluation records; those of other artifacts are shown for comparison
    name      in the registry; None: the recipe's
    license   of the base model's weights, from which the artifact is derived, if known: see `sections.license_of`
    plots     files beside the card
    """
    name = name or artifact.recipe.name
    parts = [
        _front(artifact, name, records, license or {}),
        f"# {name}",
        _verdict(artifact, records),
        _lead(artifact),
        "## Use\n\n" + _snippet(artifact, name),
        "## Recipe\n\n" + sections.recipe(artifact),
        "## Size\n\n" + sections.size(artifact),
        "## Where it comes from\n\n" + sections.provenance(artifact, license or {}),
        "## Fit\n\n" + sections.fit(artifact),
        *(["## Queries\n\n" + _queries(artifact)] if QUERIES in plots else []),
        "## Evaluation\n\n" + sections.evaluation(of_text(records)),
        *answered.sections(records),
        *greedy.sections(records),
        *(f"![{_spoken(plot)}]({plot})" for plot in plots if plot != QUERIES),
        "## Limits\n\n" + _limits(artifact, records),
    ]
    return "\n\n".join(parts) + "\n"


def _verdict(artifact: Artifact, records: Sequence[Record]) -> str:
    """Write the card's first line: the bits, whether it can be used, from how many tokens on it pays."""
    geometry = artifact.fingerprint.geometry
    found = verdict.of_record(next((one for one in of_text(records) if _is_of(artifact, one)), None))
    start = Sizes(artifact.recipe, geometry).smaller_from()
    pays = (
        "never smaller than 16 bit" if start is None else f"smaller than 16 bit from {start:,} tokens on, in bfloat16"
    )
    caution = verdict.thinness(artifact.provenance)
    said = f"**{found.word.upper()}**: {asymptotic_bits(artifact.recipe, geometry):.3g} bits, {found.why}; {pays}."
    return said + (f" Caution: {caution}." if caution else "")


def _is_of(artifact: Artifact, record: Record) -> bool:
    return record.result.recipe == artifact.recipe.name


def _front(artifact: Artifact, name: str, records: Sequence[Record], license: Mapping[str, str]) -> str:
    model, _ = sections.model_of(artifact)
    given: dict[str, Any] = folder.metadata(artifact) | dict(license)
    if _HUB.fullmatch(model):
        given |= {"base_model": model, "base_model_relation": "quantized"}
    corpus = _HUB.match(str(sections.corpus_of(artifact).get("source")))
    if corpus and "/" in corpus[0] and not str(sections.corpus_of(artifact).get("source")).endswith(SUFFIXES):
        given["datasets"] = [corpus[0]]
    if results := eval_results([record for record in records if _is_of(artifact, record)]):
        given |= {"model_name": name, "eval_results": results}
    return f"---\n{ModelCardData(**given).to_yaml()}\n---"


def _lead(artifact: Artifact) -> str:
    row, (model, revision) = recipe_row(artifact.recipe, artifact.fingerprint.geometry), sections.model_of(artifact)
    at = f" at revision `{revision}`" if revision else ""
    return (
        f"A fitted key/value-cache quantizer for `{model}`{at}: {artifact.recipe.summary or artifact.recipe.name}. It "
        f"stores a key or value element in {row['bits']:.3g} bits, not counting sinks and recent window, and holds no "
        "model weights: load it beside the model."
    )


def _snippet(artifact: Artifact, reference: str) -> str:
    model, revision = sections.model_of(artifact)
    loader = "AutoModelForImageTextToText" if "loader" in artifact.provenance else "AutoModelForCausalLM"
    options, imported, extras = "", f"{loader}, AutoTokenizer", "hf"
    if model.endswith(".gguf"):
        head, load, where = "", '".", gguf_file=gguf_file', f'gguf_file = "{model}"  # in this folder'
        options, extras = ", quantization_config=GgufConfig(dequantize=True)", "gguf"
        imported += ", GgufConfig"
    elif model == "demo":
        extras = "calib"
        head, where = "from kvq_calib.model.find import resolve\n", 'folder = resolve("demo").path'
        load = "folder"
    else:
        head, load = "", "model_id"
        made = entry(model).package is not None and not _HUB.fullmatch(model)
        beside = "build/" + model if made else model
        about = "  # make real-model" if made else "" if _HUB.fullmatch(model) else "  # the folder of the model"
        where = f'model_id = "{beside}"{about}'
    ours = 'model.set_attn_implementation("kvq")\n' if artifact.recipe.needs & OURS else ""
    pinned = f', revision="{revision}"' if revision else ""
    return f"""\
```sh
pip install -e '.[{extras}]'    # in a checkout of kvq, of which there is no release yet
```

```python
from transformers import {imported}

{head}from kvq_runtime import KVQCache

{where}
tokenizer = AutoTokenizer.from_pretrained({load}{pinned})
model = {loader}.from_pretrained({load}{pinned}{options}, dtype="auto")
{ours}cache = KVQCache.from_pretrained("{reference}", model=model)

inputs = tokenizer("The cache of a language model", return_tensors="pt").to(model.device)
output = model.generate(**inputs, past_key_values=cache, max_new_tokens=64)
print(tokenizer.decode(output[0]))
print(cache.memory_report())
```"""


def _queries(artifact: Artifact) -> str:
    held = artifact.provenance.get("held_out")
    return (
        "Keys are rounded so that the error stays out of the directions of queries. The part of a query that sticks "
        "out of the leading directions of its layer, over the query's length: root mean square over heads and the "
        f"queries of {held} held-out sequences.\n\n![{_spoken(QUERIES)}]({QUERIES})"
    )


def _limits(artifact: Artifact, records: Sequence[Record]) -> str:
    lines = ["It belongs to the weights it was fitted to: the runtime compares, and refuses others unless it is told."]
    sizes = {record.protocol.model.parameters for record in records}
    if few := sorted(size for size in sizes if size is not None and size < SMALL):
        small = ", ".join(map(size_of, few))
        lines.append(
            f"Every figure above is of a small model ({small} parameters). Such models have no massive outliers, and "
            "these say nothing about larger models, long contexts or tasks."
        )
    names = [record.protocol.text.source for record in of_text(records)] + texts(of_text(records))
    where = "one text" if len(set(names)) < 2 else ", ".join(dict.fromkeys(names))
    lines.append(f"Perplexity was measured on {where}. Where the use is another, measure there: `kvq eval --also`.")
    if artifact.recipe.cross_layer:
        lines.append("Layers are predicted from layers below: all must attend to all tokens, none may be skipped.")
    return "\n".join(f"- {line}" for line in lines)


def _spoken(file: str) -> str:
    return file.rpartition(".")[0].replace("-", " ")
