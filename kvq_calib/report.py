"""Write the card of an artifact: what it is, where it comes from, what was measured, and how to use it.

Markdown with the front matter of the Hugging Face Hub. Nothing is claimed that is not in the artifact or in a record; a
figure stands beside the size of the model it was measured on.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from huggingface_hub import ModelCardData

from kvq_calib import licenses
from kvq_calib import plots as draw
from kvq_calib.commands import relative
from kvq_calib.plots import size_of
from kvq_calib.sources import SUFFIXES
from kvq_runtime.artifact import Artifact
from kvq_runtime.describe import artifact_record, recipe_row
from kvq_runtime.memory import side_bits
from kvq_runtime.recipe import HALVES, OURS
from kvq_runtime.registries.card import UNMEASURED, eval_results
from kvq_runtime.table import cell

SMALL = 1_000_000_000  # parameters below which a figure says little about the models people serve
QUERIES = "query-deviation.png"
_CHOSEN = (
    " Keys, values: bits per element of the settings that were chosen, on the same sequences, for the least sum of "
    "errors within {bits:g} bits in all. Attention: the squared error that they put into the model's stream, over its "
    "energy."
)
_HUB = re.compile(r"[\w.-]+/[\w.-]+")


def files(
    artifact: Artifact,
    records: Sequence[Mapping[str, Any]] = (),
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
        drawn["bits-by-layer.png"] = draw.bits_by_layer(name, by_layer(artifact))
    if artifact.provenance.get("held_out") and any(side.feedback for side in artifact.recipe.sides):
        where = f"{_model(artifact)[0]}, {artifact.provenance['held_out']} held-out sequences"
        drawn[QUERIES] = draw.query_deviation(artifact.fit["layers"], where)
    return {"README.md": card(artifact, records, name, license=license, plots=list(drawn)).encode()} | drawn


def card(
    artifact: Artifact,
    records: Sequence[Mapping[str, Any]] = (),
    name: str | None = None,
    version: str | None = None,
    license: Mapping[str, str] | None = None,
    plots: Sequence[str] = (),
) -> str:
    """The text of README.md.

    records   evaluation records; those of other artifacts are shown for comparison
    name      in the registry; None: the recipe's
    license   of the base model's weights, from which the artifact is derived, if known: see `licenses`
    plots     files beside the card
    """
    name = name or artifact.recipe.name
    reference = f"{name}@{version}" if version else name
    parts = [
        _front(artifact, name, records, license or {}),
        f"# {reference}",
        _lead(artifact),
        "## Use\n\n" + _snippet(artifact, reference),
        "## Recipe\n\n" + _recipe(artifact),
        "## Where it comes from\n\n" + _provenance(artifact, license or {}),
        "## Fit\n\n" + _fit(artifact),
        *(["## Queries\n\n" + _queries(artifact)] if QUERIES in plots else []),
        "## Evaluation\n\n" + _evaluation(records),
        *(f"![{_spoken(plot)}]({plot})" for plot in plots if plot != QUERIES),
        "## Limits\n\n" + _limits(artifact, records),
    ]
    return "\n\n".join(parts) + "\n"


def _model(artifact: Artifact) -> tuple[str, str | None]:
    """(id, revision) of the model that the artifact was fitted to."""
    given = artifact.provenance.get("model")
    if isinstance(given, Mapping):
        return str(given.get("id", "unknown")), given.get("revision")
    return str(given or "unknown"), artifact.provenance.get("revision")


def _front(artifact: Artifact, name: str, records: Sequence[Mapping[str, Any]], license: Mapping[str, str]) -> str:
    model, _ = _model(artifact)
    given: dict[str, Any] = {"library_name": "kvq", "tags": ["kvq", "kv-cache", "quantization", artifact.recipe.name]}
    given |= license
    if _HUB.fullmatch(model):
        given |= {"base_model": model, "base_model_relation": "quantized"}
    corpus = _HUB.match(str(_corpus(artifact).get("source")))
    if corpus and "/" in corpus[0] and not str(_corpus(artifact).get("source")).endswith(SUFFIXES):
        given["datasets"] = [corpus[0]]
    own = [record for record in records if record["result"].get("recipe") == artifact.recipe.name]
    if results := eval_results(own):
        given |= {"model_name": name, "eval_results": results}
    return f"---\n{ModelCardData(**given).to_yaml()}\n---"


def _corpus(artifact: Artifact) -> Mapping[str, Any]:
    given = artifact.provenance.get("corpus")
    return given if isinstance(given, Mapping) else {"source": given}


def _lead(artifact: Artifact) -> str:
    row, (model, revision) = recipe_row(artifact.recipe, artifact.fingerprint.geometry), _model(artifact)
    at = f" at revision `{revision}`" if revision else ""
    return (
        f"A fitted key/value-cache quantizer for `{model}`{at}: {artifact.recipe.summary or artifact.recipe.name}. It "
        f"stores a key or value element in {row['bits']:.3g} bits, sinks and recent window apart, and holds no model "
        "weights: load it beside the model."
    )


def _snippet(artifact: Artifact, reference: str) -> str:
    model, revision = _model(artifact)
    if model == "demo":
        head, where = "from kvq_calib.models import resolve\n", 'folder = resolve("demo").path'
        load = "folder"
    else:
        head, load = "", "model_id"
        where = f'model_id = "{model}"' + ("" if _HUB.fullmatch(model) else "  # the folder of the model")
    ours = 'model.set_attn_implementation("kvq")\n' if artifact.recipe.needs & OURS else ""
    pinned = f', revision="{revision}"' if revision else ""
    return f"""\
```sh
pip install "kvq-runtime[{"calib" if model == "demo" else "hf"}]"
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

{head}from kvq_runtime import KVQCache

{where}
tokenizer = AutoTokenizer.from_pretrained({load}{pinned})
model = AutoModelForCausalLM.from_pretrained({load}{pinned}, dtype="auto")
{ours}cache = KVQCache.from_pretrained("{reference}", model=model)

inputs = tokenizer("The cache of a language model", return_tensors="pt").to(model.device)
output = model.generate(**inputs, past_key_values=cache, max_new_tokens=64)
print(tokenizer.decode(output[0]))
print(cache.memory_report())
```"""


def _recipe(artifact: Artifact) -> str:
    row = recipe_row(artifact.recipe, artifact.fingerprint.geometry)
    side, shape = artifact.recipe.key, artifact.fingerprint.geometry
    rows = {
        "recipe": f"`{row['name']}`",
        "keys are encoded": "before RoPE" if row["position"] == "pre" else "after RoPE",
        "keys": f"`{row['keys']}`",
        "values": f"`{row['values']}`" if row["values"] != "as keys" else "as keys",
        "other layers": f"`{row['layers']}`" if row["layers"] else "none",
        "bits per element, asymptotic": f"{row['bits']:.4g}",
        "exact tokens": f"{side.sinks} sinks, {side.recent} recent at least",
        "block": f"{side.block} tokens",
        "cache": f"{shape.layers} layers, {shape.kv_heads} KV heads of {shape.head_size}",
    }
    return _pairs(rows)


def _provenance(artifact: Artifact, license: Mapping[str, str]) -> str:
    given = artifact.provenance
    model, revision = _model(artifact)
    text = _corpus(artifact)
    rows = {"model": f"`{model}`", "revision": revision and f"`{revision}`"}
    rows |= {"licence of the model": license.get("license_name") or license.get("license") or "not known here"}
    rows |= {"licence of the corpus": licenses.of_corpus(str(text.get("source")))}
    rows |= {"corpus": text.get("source"), "corpus digest": _short(text.get("corpus_digest"))}
    rows |= {"token digest": _short(text.get("token_digest"))}
    if "samples" in given:
        rows["sequences"] = f"{given['samples']} of {given.get('seq_len')} tokens, {given.get('held_out', 0)} held out"
    rows["seed"] = given.get("seed")
    rows["environment"] = ", ".join(f"{key} {value}" for key, value in (given.get("environment") or {}).items())
    rows["fitted tensors"] = f"{artifact_record(artifact)['tensor_bytes'] / 2**20:.3g} MiB"
    return _pairs({key: value for key, value in rows.items() if value not in (None, "")})


def _fit(artifact: Artifact) -> str:
    layers = artifact.fit.get("layers") or []
    if not layers:
        return "Nothing was measured during the fit."
    rows = by_layer(artifact)
    if len({row[f"{half}s"] for row in rows for half in HALVES}) == 1:
        rows = [{name: row[name] for name in row if name not in ("keys", "values")} for row in rows]
    chosen = artifact.fit.get("budget")
    held = artifact.provenance.get("held_out")
    where = f"on {held} held-out sequences" if held else "on the sequences of the fit itself"
    return (
        "Explained: the share of the variance about the mean that the prediction takes away. Error: what is left of it "
        f"after rounding. Measured {where}.{_CHOSEN.format(**chosen) if chosen else ''}\n\n{_table(rows)}"
    )


def by_layer(artifact: Artifact) -> list[dict[str, Any]]:
    """Bits of keys and values in each layer, and what the fit measured there."""
    names = {"explained_variance": "explained", "relative_error": "error", "attention_error": "attention"}
    rows = []
    for layer, measures in enumerate(artifact.fit["layers"]):
        found: dict[str, Any] = {"layer": layer}
        for half in HALVES:
            found[f"{half}s"] = round(side_bits(artifact.recipe, layer, half, artifact.fingerprint.geometry), 4)
        for half in HALVES:
            own = measures.get(half) or {}
            found |= {f"{half}s {short}": own[name] for name, short in names.items() if name in own}
        rows.append(found)
    return rows


def _queries(artifact: Artifact) -> str:
    held = artifact.provenance.get("held_out")
    return (
        "Keys are rounded so that the error stays out of the directions of queries. The part of a query that sticks "
        "out of the leading directions of its layer, over the query's length: root mean square over heads and the "
        f"queries of {held} held-out sequences.\n\n![{_spoken(QUERIES)}]({QUERIES})"
    )


def _evaluation(records: Sequence[Mapping[str, Any]]) -> str:
    if not records:
        return UNMEASURED
    blocks = []
    for group in _groups(records):
        given, first = group[0]["protocol"], group[0]["result"]
        rows = [{"cache": "16 bit", "bits": 16.0, "bits at 4096 tokens": 16.0,
                 "perplexity": f"{first['reference_perplexity']:.4g}"}]  # fmt: skip
        for record in group:
            result, bits = record["result"], record["result"]["bits"]
            rows.append({
                "cache": result["recipe"],
                "bits": bits["asymptotic"],
                "bits at 4096 tokens": bits["at_4096"],
                "perplexity": f"{result['perplexity']:.4g}",
                "against 16 bit": relative(result),
                "KL, nats": result["kl"],
                "top-1 agreement": f"{result['top1']:.2%}",
            })  # fmt: skip
        model, text = given["model"], given["text"]
        recent = "as in use" if given["recent"] is None else f"of {given['recent']} tokens"
        recent += f", {given['sinks']} exact first tokens" if "sinks" in given else ""
        blocks.append(
            f"`{model['id']}`, **{size_of(model['parameters'])} parameters**; {given['windows']} windows of "
            f"{given['length']} tokens of {text['source']}, {text['split']} part; in steps of {given['step']} tokens "
            f"with the compressed cache, recent window {recent}. ± is a standard error over windows.\n\n{_table(rows)}"
        )
    verdict = records[0]["result"].get("gate")
    if verdict:
        bounds = ", ".join(f"{name} {bound:g}" for name, bound in verdict["bounds"].items())
        kept = "; ".join(verdict["failed"]) or "kept"
        blocks.append(f"Bounds for publication: {bounds}. {kept[0].upper()}{kept[1:]}.")
    return "\n\n".join(blocks)


def _groups(records: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Records of one protocol and environment together: only those can be compared."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(repr((record["protocol"], record["environment"], record["corpus"])), []).append(record)
    return list(groups.values())


def _limits(artifact: Artifact, records: Sequence[Mapping[str, Any]]) -> str:
    lines = ["It belongs to the weights it was fitted to: the runtime compares, and refuses others unless it is told."]
    sizes = {record["protocol"]["model"]["parameters"] for record in records}
    if any(size < SMALL for size in sizes):
        small = ", ".join(size_of(size) for size in sorted(sizes) if size < SMALL)
        lines.append(
            f"Every figure above is of a small model ({small} parameters). Such models have no massive outliers, and "
            "these say nothing about larger models, long contexts or tasks."
        )
    lines.append("Perplexity was measured on one text. Where the use is another, measure there: `kvq eval`.")
    if artifact.recipe.chained:
        lines.append("Layers are predicted from layers below: all must attend to all tokens, none may be skipped.")
    return "\n".join(f"- {line}" for line in lines)


def _pairs(rows: Mapping[str, Any]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {_escaped(value)} |" for key, value in rows.items())])


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---", *["---:"] * (len(names) - 1)]]
    lines += [[_escaped(row.get(name)) for name in names] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _escaped(value: Any) -> str:
    return cell(value).replace("|", "\\|")


def _short(digest: Any) -> str | None:
    return f"`{str(digest)[:16]}…`" if digest else None


def _spoken(file: str) -> str:
    return file.rpartition(".")[0].replace("-", " ")
