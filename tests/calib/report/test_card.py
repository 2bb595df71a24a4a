"""The card says what the records say, and its snippet runs."""

import re
from dataclasses import replace

import many_versions as many
import pytest
import torch
import yaml

from kvq_calib.model import find as models
from kvq_calib.report import card as cards
from kvq_calib.report import tables
from kvq_runtime.artifact import artifact, folder
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.codec import codec
from kvq_runtime.recipe import preset
from kvq_runtime.registry.evaluation_records import TextRecord, parse
from kvq_runtime.registry.resolve import open_registry


def record(recipe: str = "aqua-2bit", kl: float = 0.02, parameters: int = 4_071_168, **parts) -> TextRecord:
    """A record of perplexity; `parts` replace those of a protocol."""
    given = many.record("0" * 64, kl, recipe=recipe)
    given["protocol"]["model"]["parameters"] = parameters
    for name, part in parts.items():
        given["result"]["protocols"][name] = part
    return parse(given)


def fit(name: str) -> Artifact:
    files, recipe = models.resolve("demo"), preset(name)
    specs = codec.all_specs(recipe, files.geometry).items()
    tensors = {name: torch.zeros(*shape, dtype=kind) for name, (shape, kind) in specs}
    provenance = {"model": "demo", "revision": None, "samples": 8, "seq_len": 512, "seed": 3, "held_out": 2,
                  "corpus": {"source": "demo", "corpus_digest": "a" * 64}, "environment": {"torch": "2"}}  # fmt: skip
    scheme = {"explained_variance": 0.8765, "relative_error": 0.0123, "mean_energy": 0.5}
    layers = [{"key": scheme, "value": scheme}] * files.geometry.layers
    return Artifact(recipe, files.fingerprint(), tensors, provenance, {"layers": layers})


@pytest.fixture(scope="module")
def fitted() -> Artifact:
    return fit("aqua-2bit")


def front_of(text: str) -> dict:
    return yaml.safe_load(text.split("---")[1])


def test_the_card_says_what_is_known(fitted):
    text = cards.card(fitted, [record()], "demo-aqua", {"license": "apache-2.0"}, "perplexity-by-bits.png")
    front = front_of(text)
    assert front["license"] == "apache-2.0" and {"kvq", "aqua-2bit"} <= set(front["tags"])
    assert "base_model" not in front and "datasets" not in front  # demo is no repository of the Hub
    sizes = folder.sizes(fitted)
    assert front["kvq"] == sizes
    assert f"smaller than 16 bit from {sizes['smaller_than_16bit_from']:,} tokens on" in text
    for fact in (
        "| licence of the model | apache-2.0 |", "+2.00% ± 0.20%", "**4.07M parameters**", "0.8765", "| 131,072 |",
        "2 held-out sequences", "8 of 512 tokens", "a small model (4.07M parameters)",
        "![perplexity by bits](perplexity-by-bits.png)", "**USABLE**",
    ):  # fmt: skip
        assert fact in text, fact
    widths = {line.count("|") - line.count("\\|") for line in text.splitlines() if re.match(r"\| (layer|0) ", line)}
    assert len(widths) == 1, "a bar inside a cell would make another column"


def test_a_card_of_several_texts_has_a_column_of_each_and_the_command_of_the_fit(fitted):
    first, second = record(kl=0.02), record(kl=0.03)
    text = replace(second.protocol.text, source="b.txt")
    second = replace(second, protocol=replace(second.protocol, text=text))
    given = cards.card(fitted, [first, second], "demo-aqua")
    source = first.protocol.text.source
    assert f"| recipe | bits | {source} | b.txt |" in given and f"measured on {source}, b.txt." in given
    assert re.search(r"\| aqua-2bit \| [\d.]+ \| \+2\.00% ± 0\.20%, 0\.02 \| \+3\.00% ± 0\.30%, 0\.03 \|", given)
    made = "kvq-calibrate --model demo --recipe aqua-2bit --corpus demo --samples 8 --held-out 2 --seq-len 512 --seed 3"
    assert f"| made by | `{made}` |" in given
    named = {"aqua-2bit+name=mine": None, "auto-2.5bit-kernel": "--recipe auto --bits 2.5 --for kernel --corpus"}
    for name, options in named.items():
        own = replace(fitted, recipe=replace(fitted.recipe, name=name))
        assert (cards.made_by(own) is None) if options is None else (options in str(cards.made_by(own)))


def test_a_model_of_the_hub_is_named(fitted):
    corpus = {"source": f"org/text:en@{'d' * 40}"}
    provenance = {**fitted.provenance, "model": "Qwen/Qwen2.5-7B", "revision": "c" * 40, "corpus": corpus}
    hub = Artifact(fitted.recipe, fitted.fingerprint, fitted.tensors, provenance, fitted.fit)
    text = cards.card(hub, [record(parameters=7_600_000_000)])
    front = front_of(text)
    assert (front["base_model"], front["base_model_relation"]) == ("Qwen/Qwen2.5-7B", "quantized")
    assert front["datasets"] == ["org/text"]
    assert f'AutoModelForCausalLM.from_pretrained(model_id, revision="{"c" * 40}"' in text
    assert "**7.6B parameters**" in text and "small model" not in text


def test_bounds_and_reasons_are_on_the_card(fitted):
    gate = {"bounds": {"kl": 0.05}, "protocol": "full", "failed": ["KL divergence, nats, full ..."]}
    own = parse(many.record("0" * 64, 0.1, recipe="aqua-2bit", gate=gate))
    text = cards.card(fitted, [own, record("subkv-2bit", full={"reason": "it chooses"})])
    assert "Bounds for publication, full encode: kl 0.05. KL divergence, nats, full" in text
    (row,) = (line for line in text.splitlines() if "| subkv-2bit" in line and "| none |" in line)
    assert "+0.20%" in row and "subkv-2bit: full encode: it chooses." in text
    assert "Not evaluated" in cards.card(fitted)


def test_a_table_has_a_row_a_recipe():
    part = many.record("0" * 64, 0.1)["result"]["protocols"]["full"]
    rows = tables.table([record(), record("higgs-2bit", full=part | {"beyond": 0.0125, "windows": None})])
    assert [row["recipe"] for row in rows] == ["16 bit", "aqua-2bit", "higgs-2bit"]
    assert rows[0]["full"] == "14.000" and rows[1]["full"] == "+2.00% ± 0.20%" and rows[1]["in use decoded"] == "10%"
    assert (rows[0]["rating"], rows[1]["rating"]) == (None, "usable")
    assert rows[2]["full"] == "+10.00%" and rows[2]["full beyond"] == "1.25%"


@pytest.mark.parametrize("name", ["aqua-2bit", pytest.param("subkv-aqua-2bit", marks=pytest.mark.slow)])
def test_the_snippet_runs(name, capsys):
    made = fit(name)
    open_registry().publish(f"demo-{name}", artifact.to_bytes(made))
    text = cards.card(made, name=f"demo-{name}")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert ("set_attn_implementation" in code) == (name == "subkv-aqua-2bit")
    exec(code, {})
    assert name in capsys.readouterr().out
