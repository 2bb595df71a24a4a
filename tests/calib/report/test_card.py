"""The card says what the records say, and its snippet runs."""

import json
import re
from dataclasses import replace

import pytest
import torch
import yaml

from kvq_calib.cli import outcome
from kvq_calib.model import find as models
from kvq_calib.report import card as report
from kvq_calib.report import sections, tables
from kvq_calib.report.published import Published
from kvq_calib.report.tables import size_of
from kvq_runtime.artifact import artifact
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.cli.version import losses
from kvq_runtime.codec import codec
from kvq_runtime.recipe import preset
from kvq_runtime.registry import rating
from kvq_runtime.registry.evaluation_records import TextRecord, parse
from kvq_runtime.registry.rating import Bounds
from kvq_runtime.registry.resolve import open_registry
from kvq_runtime.store.estimate import Sizes
from kvq_runtime.store.memory import asymptotic_bits


def made(*given, **named) -> TextRecord:
    """`as_json`, read."""
    return parse(as_json(*given, **named))


def as_json(recipe: str, relative: float = 0.0123, parameters: int = 4_070_000) -> dict:
    """An evaluation record whose figures were measured in use."""
    layers = [
        {"layer": n, "key_error": 0.1 + n / 50, "value_error": 0.2, "key_explained": None, "value_explained": None,
         "attention_error": 0.01, "attention_error_encoded": 0.3} for n in range(4)
    ]  # fmt: skip
    bits = {"asymptotic": 2.125, "at_length": 6.0, "at_4096": 3.14, "all_at_4096": 3.3}
    figures = {"perplexity": 20 * (1 + relative), "reference_perplexity": 20.0, "relative": relative,
               "relative_se": 0.002, "kl": 0.00345, "top1": 0.9712, "tokens": 100}  # fmt: skip
    result = {"recipe": recipe, "protocols": {"in-use": figures}, "bits": bits, "layers": layers}
    protocol = {"name": "perplexity", "version": 2, "model": {"id": "demo", "revision": None, "parameters": parameters},
                "step": 32, "windows": 16, "length": 1024, "recent": None, "error_windows": 4,
                "text": {"source": "demo", "split": "held-out"}}  # fmt: skip
    return {"artifact": "0" * 64, "corpus": "1" * 64, "protocol": protocol, "environment": {}, "result": result}


def of_both(recipe: str, full: float | str = 0.1, **result) -> TextRecord:
    """The same by both protocols; `full` is what a full encode costs, or why there is none."""
    record = as_json(recipe)
    in_use: dict = record["result"]["protocols"]["in-use"]
    in_use["decoded"] = {"attention": 0.31, "reads": 0.87, "unread": 0.0}
    dear = {"perplexity": 20.0, "decoded": {"attention": 0.98, "reads": 0.99, "unread": 0.0}}
    other = {"reason": full} if isinstance(full, str) else in_use | dear | {"relative": full, "kl": full}
    record["result"] |= {"protocols": {"full": other, "in-use": in_use}}
    record["result"] |= result
    record["protocol"] |= {"protocols": ["full", "in-use"]}
    return parse(record)


def fit(name: str) -> Artifact:
    files, recipe = models.resolve("demo"), preset(name)
    specs = codec.all_specs(recipe, files.geometry).items()
    tensors = {name: torch.zeros(*shape, dtype=kind) for name, (shape, kind) in specs}
    provenance = {"model": "demo", "revision": None, "samples": 8, "seq_len": 512, "seed": 3, "held_out": 2,
                  "corpus": {"source": "demo", "corpus_digest": "a" * 64}, "environment": {"torch": "2"}}  # fmt: skip
    scheme = {"explained_variance": 0.8765, "relative_error": 0.0123, "mean_energy": 0.5}
    layers = [{"key": scheme, "value": scheme}] * files.geometry.layers
    return Artifact(recipe, files.fingerprint(), tensors, provenance, {"layers": layers})


@pytest.fixture
def fitted() -> Artifact:
    return fit("aqua-2bit")


def test_the_card_says_what_is_known(fitted):
    text = report.card(
        fitted,
        [made("aqua-2bit")],
        "demo-aqua",
        license={"license": "apache-2.0"},
        pictures=["error-by-layer.png"],
    )
    front = yaml.safe_load(text.split("---")[1])
    assert front["library_name"] == "kvq" and front["license"] == "apache-2.0" and "aqua-2bit" in front["tags"]
    assert "base_model" not in front and "datasets" not in front  # demo is no repository of the Hub
    assert "| licence of the model | apache-2.0 |" in text and "PSF-2.0" in text
    (index,) = front["model-index"]
    (result,) = index["results"]
    values = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert index["name"] == "demo-aqua" and values["perplexity"] == 20 * 1.0123 and values["kl_divergence"] == 0.00345
    assert "+1.23% ± 0.20%" in text and "97.12%" in text and "**4.07M parameters**" in text
    assert "0.8765" in text and "2 held-out sequences" in text and "8 of 512 tokens" in text
    assert "a small model (4.07M parameters)" in text
    assert "![error by layer](error-by-layer.png)" in text
    widths = [
        line.count("|") - line.count("\\|")
        for line in text.splitlines()
        if line.startswith("| layer") or line.startswith("| 0 |")
    ]
    assert len(set(widths)) == 1  # a bar inside a cell would make another column


def test_the_front_matter_has_what_the_hub_lists_and_the_sizes(fitted):
    front = yaml.safe_load(report.card(fitted, [made("aqua-2bit")]).split("---")[1])
    sizes = Sizes(fitted.recipe, fitted.fingerprint.geometry)
    assert front["pipeline_tag"] == "text-generation"
    assert {"kvq", "aqua-2bit", "arxiv:2411.17525", "arxiv:2501.19392"} <= set(front["tags"])
    assert front["kvq"]["bits"] == round(asymptotic_bits(fitted.recipe, fitted.fingerprint.geometry), 4)
    assert front["kvq"]["bytes"] == {str(n): sizes.at(n).total for n in (4096, 32768, 131072)}
    assert front["kvq"]["smaller_than_16bit_from"] == sizes.smaller_from()


def test_a_model_of_the_hub_is_named(fitted):
    corpus = {"source": f"org/text:en@{'d' * 40}"}
    provenance = {**fitted.provenance, "model": "Qwen/Qwen2.5-7B", "revision": "c" * 40, "corpus": corpus}
    hub = Artifact(fitted.recipe, fitted.fingerprint, fitted.tensors, provenance, fitted.fit)
    text = report.card(hub, [made("aqua-2bit", parameters=7_600_000_000)])
    front = yaml.safe_load(text.split("---")[1])
    assert (front["base_model"], front["base_model_relation"]) == ("Qwen/Qwen2.5-7B", "quantized")
    assert front["datasets"] == ["org/text"]
    assert f'AutoModelForCausalLM.from_pretrained(model_id, revision="{"c" * 40}"' in text
    assert "**7.6B parameters**" in text and "small model" not in text


def test_the_licence_is_what_the_model_says(tmp_path):
    assert sections.license_of(tmp_path) == {}
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: qwen-research\n---\n# x\n")
    assert sections.license_of(tmp_path) == {"license": "other", "license_name": "qwen-research"}


def test_the_card_has_both_protocols_and_what_was_decoded(fitted):
    gate = {"bounds": {"kl": 0.05}, "protocol": "full", "failed": ["KL divergence, nats, full ..."]}
    record = of_both("aqua-2bit", gate=gate)
    text = report.card(fitted, [record, of_both("subkv-2bit", "it chooses")], "demo-aqua")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    cells = {(row[0], row[3]): row[4:] for row in rows if row[0] in ("aqua-2bit", "subkv-2bit") and len(row) == 9}
    assert cells["aqua-2bit", "full encode"][1:3] == ["+10.00% ± 0.20%", "0.1"]
    assert cells["aqua-2bit", "full encode"][4] == "98% of attention, 99% of reads"
    assert cells["aqua-2bit", "in use"][1:3] == ["+1.23% ± 0.20%", "0.00345"]
    assert cells["subkv-2bit", "full encode"] == ["", "", "", "", "it chooses"]
    assert "Bounds for publication, full encode: kl 0.05. KL divergence, nats, full" in text
    (index,) = yaml.safe_load(text.split("---")[1])["model-index"]
    named = {
        (one["type"], one["name"].rsplit(", ")[-1]): one["value"] for r in index["results"] for one in r["metrics"]
    }
    assert named["kl_divergence", "full encode"] == 0.1 and named["kl_divergence", "in use"] == 0.00345


def of_two_texts() -> TextRecord:
    """A record of demo, and of demo-code with a tenth more loss."""
    raw, code = of_both("aqua-2bit").raw, of_both("aqua-2bit", 0.2).raw
    about = {"text": {"source": "demo-code", "split": "held-out"}, "windows": 4, "length": 512}
    raw["protocol"]["texts"] = {"demo-code": about}
    raw["result"]["texts"] = {"demo-code": {"protocols": code["result"]["protocols"]}}
    return parse(raw)


def test_figures_of_each_text_are_a_result_of_their_own(fitted):
    (index,) = yaml.safe_load(report.card(fitted, [of_two_texts()]).split("---")[1])["model-index"]
    kl = {one["dataset"]["name"]: [m["value"] for m in one["metrics"] if m["type"] == "kl_divergence"]
          for one in index["results"]}  # fmt: skip
    assert kl == {"demo": [0.1, 0.00345], "demo-code": [0.2, 0.00345]}


def test_what_was_measured_on_another_text_is_shown(capsys):
    both = of_two_texts()
    full = [row for row in losses([both]) if row["protocol"] == "full encode"]
    assert [(row["text"], row["windows"], row["KL"]) for row in full] == [("demo", 16, 0.1), ("demo-code", 4, 0.2)]
    done = Published("aqua-2bit", "x", "0" * 64, 2.1, 0.1, 0.1, both)
    outcome.show([done], [both, both])
    said = capsys.readouterr().out
    assert [line.split()[1] for line in said.splitlines() if "+20.00%" in line and "perplexity" not in line] == [
        "demo-code", "demo-code",
    ], "of the artifact and of a baseline"  # fmt: skip
    assert "on demo-code   perplexity +20.00%, KL 0.2 nats, full encode" in said
    outcome.show([done], [both], json=True)
    (row,) = json.loads(capsys.readouterr().out)
    assert row["kl_nats_per_token"] == 0.1 and row["texts"]["demo-code"]["kl_nats_per_token"] == 0.2


def test_the_full_encode_decides_where_it_was_measured():
    in_use, both = made("aqua-2bit"), of_both("aqua-2bit")
    assert (in_use.decisive[0], both.decisive[0]) == ("in-use", "full")
    rows = tables.table([in_use])
    assert rows[1]["vs 16 bit"] == "+1.23% ± 0.20%" and rows[0]["perplexity"] == "20.000"
    assert tables.by_bits([both, in_use])[0] is in_use
    assert rating.failed_bounds(in_use, Bounds(kl=0.01)) == [] != rating.failed_bounds(both, Bounds(kl=0.01))


def test_records_of_other_protocols_are_not_compared(fitted):
    other = as_json("higgs-2bit")
    other["protocol"]["length"] = 256
    text = report.card(fitted, [made("aqua-2bit"), made("mean-higgs-2bit"), parse(other)])
    assert text.count("| cache | bits |") == 2


def test_stages_by_layer_are_folded_away(fitted):
    others = ["kivi-2bit", "aqua-fisher-1bit", "svdq-2bit-v4", "aqua-fisher-1bit", "higgs-2bit", "polar-3bit"]
    pairs = [(recipe.key, recipe.value) for recipe in map(preset, others)]
    mixed = replace(fitted, recipe=replace(fitted.recipe, name="auto-2bit", layers=dict(enumerate(pairs))))
    text = sections.recipe(mixed)
    head, folded = text.split("<details>")
    assert "| other layers | 6 of 6, below |" in head and folded.rstrip().endswith("</details>")
    rows = [line for line in folded.splitlines() if line.startswith("| ")][1:]
    assert len(rows) - 1 == 5 and any(row.startswith("| 1, 3 |") for row in rows), "equal layers are one row"
    assert max(len(cell) for line in text.splitlines() for cell in line.split(" | ")) < 200
    assert "<details>" not in sections.recipe(fitted) and "0: `" in sections.recipe(fitted)


def test_the_card_says_sizes_and_the_machine_in_words(fitted):
    sizes = Sizes(fitted.recipe, fitted.fingerprint.geometry)
    text = report.card(fitted)
    assert f"smaller than 16 bit from {sizes.smaller_from():,} tokens on" in text
    assert f"| {sizes.at(32768).total / sizes.at(32768).exact:.0%} |" in text and "| 131,072 |" in text
    about = {"torch": "2.13", "machine": "x86_64", "dtype": "bfloat16", "threads": 1, "device": "cpu", "cpu": "AVX512"}
    made = replace(fitted, provenance={**fitted.provenance, "environment": about})
    assert "| environment | torch 2.13, CPU (x86_64 AVX512), bfloat16, 1 thread |" in sections.provenance(made, {})
    gpu = replace(made, provenance={**made.provenance, "environment": about | {"device": "NVIDIA H100", "threads": 8}})
    assert "torch 2.13, NVIDIA H100 (x86_64 AVX512), bfloat16, 8 threads" in sections.provenance(gpu, {})


@pytest.mark.parametrize("name", ["aqua-2bit", "subkv-aqua-2bit"])
def test_the_snippet_runs(name, capsys):
    fitted = fit(name)
    open_registry().publish(f"demo-{name}", artifact.to_bytes(fitted))
    text = report.card(fitted, name=f"demo-{name}")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert ("set_attn_implementation" in code) == (name == "subkv-aqua-2bit")
    exec(code, {})
    assert name in capsys.readouterr().out


@pytest.mark.parametrize(
    "count, said", [(494_000_000, "494M"), (7_615_616_512, "7.62B"), (260_032, "260K"), (12, "12")]
)
def test_sizes(count, said):
    assert size_of(count) == said
