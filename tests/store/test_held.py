"""Computed bytes: those of a cache that is really filled, and of large models those of a pencil; one break-even length
a cache, of the dtype that it has, and what is said of one that the model never reaches.
"""

from dataclasses import replace
from pathlib import Path

import fitted
import pytest
import tiny
import torch
from feeding import GEOMETRY, feed_in, filled, make, tensors
from transformers import AutoModelForCausalLM
from written import EVERY, REPRESENTATIVE

from kvq_calib.evaluate.subject import costs
from kvq_calib.model import find as models
from kvq_calib.model.catalog import CATALOG
from kvq_runtime import KVQCache
from kvq_runtime.artifact import artifact, recipe_text
from kvq_runtime.geometry import MODELS, NONE_SLIDE, Geometry
from kvq_runtime.recipe import preset
from kvq_runtime.store.held import Sizes
from kvq_runtime.store.storage import SLACK

SMALL = Geometry(layers=2, kv_heads=2, head_size=32)
EIGHT = MODELS["llama-3.1-8b"]
MIB = 1 << 20
GOLDEN = Path(__file__).parents[2] / "artifacts" / "golden" / "v1"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in REPRESENTATIVE else pytest.mark.all_recipes) for n in EVERY]
)
def test_what_is_computed_is_what_a_cache_holds(name):
    """After a prompt of several slabs and a step; to the byte. A window that nothing attended to decides nothing."""
    recipe = EVERY[name]
    try:
        sizes = Sizes(recipe.check(SMALL), SMALL)
    except ValueError as refusal:
        assert recipe.name in str(refusal)
        return
    found = fitted.tensors(recipe, SMALL) or None
    for tokens in (100, 700, 5000 if name in ("higgs-2bit", "kivi-2bit-r32", "h2o-higgs-2bit") else 1501):
        held, report = sizes.at(tokens), filled(recipe, SMALL, tokens, found)
        undecided = held.sequence.get("timeline", 0) if recipe.policy("window") else 0
        assert sum(held.shared.values()) == report.shared_bytes
        window = recipe.widest.window  # a short prompt leaves it with less room, or a little more
        if tokens > window.sinks + window.recent + window.block + SLACK:
            assert sum(held.sequence.values()) - undecided == report.sequence_bytes, tokens
            assert held.bits == pytest.approx(report.all_bits + 8 * undecided / (held.exact / 2))
        assert held.exact == report.exact_bytes
        stated = costs(recipe, SMALL, NONE_SLIDE, tokens)
        assert stated["shared_bytes"] == report.shared_bytes
        assert stated["smaller_from"] == report.smaller_than_higgs_from
        assert stated["asymptotic"] == report.asymptotic_bits and stated["at_length"] == held.own_bits


@pytest.mark.parametrize("name", ["aqua-fisher-1bit", "svdq-wf-2bit"])
def test_bits_that_a_fit_found_are_known_from_its_recipe(name):
    """Calibration gave each latent channel its bits; they are not those of the recipe before the fit."""
    made = artifact.load(GOLDEN / f"{name}.safetensors")
    geometry = made.fingerprint.geometry
    report, stated = filled(made.recipe, geometry, 1400, made.tensors), costs(made.recipe, geometry, NONE_SLIDE, 1400)
    assert stated["at_length"] == pytest.approx(report.bits_per_element, rel=1e-12)
    assert stated["shared_bytes"] == report.shared_bytes
    assert made.recipe.layers and stated != costs(replace(made.recipe, layers={}), geometry, NONE_SLIDE, 1400)


@pytest.mark.parametrize("name", ["kivi-2bit", "svdq-online-2bit-v4", "svdq-shadow-2bit-v4", "h2o-higgs-2bit"])
def test_rows_hold_as_much_each_and_share_what_is_fitted(name):
    recipe, rows = replace(preset(name), window=replace(preset(name).window, recent=64)), 3
    cache = make(recipe)
    feed_in(cache, tensors(900, rows=rows).to(torch.bfloat16), [899, 1])
    report, held = cache.memory_report(), Sizes(recipe, GEOMETRY).at(900, rows)
    assert (held.total, held.exact) == (report.total_bytes, report.exact_bytes)


def test_large_models_by_pencil():
    """Llama 3.1 8B: 32 layers, C = 1024. KIVI: 3 bits; AQUA-KV: 31 layers of a C x C and a 2C x C map in 16 bits."""
    tokens, elements = 131072, 2 * 32 * 1024
    kivi = Sizes(preset("kivi-2bit"), EIGHT).at(tokens)
    blocks = (tokens - 128) // 128
    assert blocks == 1023 and kivi.sequence["codes"] == 1024 * 128 * elements * 2 // 8  # 1024: a slab of 32 is whole
    assert kivi.sequence["scales"] == 1024 * 128 * elements * 2 * 2 // 32
    assert kivi.sequence["window"] == 256 * elements * 2 and "sinks" not in kivi.sequence
    assert kivi.exact == 16 << 30

    aqua, first = Sizes(preset("aqua-2bit"), EIGHT), 2 * 4 * 1024
    maps = 31 * (3 * 1024 * 1024 * 2 + 2 * (4 + 4) * 1024)
    assert aqua.shared["predictors"] == maps + first
    assert aqua.shared["predictors"] / MIB == pytest.approx(186, abs=1)
    for batch in (1, 16):
        found = aqua.at(8192, batch)
        assert found.bits == pytest.approx(aqua.at(8192).bits - aqua.shared["predictors"] * 8 / 8192 / elements * (
            1 - 1 / batch) - aqua.shared["rotations"] * 8 / 8192 / elements * (1 - 1 / batch))  # fmt: skip


@pytest.mark.parametrize("name", ["aqua-2bit", "higgs-2bit", "kivi-2bit-r32", "svdq-shadow-2bit-v4", "h2o-higgs-2bit"])
@pytest.mark.parametrize("batch", [1, 4])
def test_from_the_break_even_on_all_bytes_are_fewer(name, batch):
    sizes = Sizes(preset(name), SMALL)
    start = sizes.smaller_from(batch)
    assert start is not None
    held = [sizes.at(tokens, batch) for tokens in (start - 1, *range(start, 3 * start + 9000, 7))]
    assert held[0].total >= held[0].exact and all(one.total < one.exact for one in held[1:])
    assert sizes.smaller_from(10**6) <= start


def test_sixteen_bits_and_more_never_save():
    assert Sizes(preset("exact"), SMALL).smaller_from() is None
    recipe = recipe_text.read("exact+policies.chunks=on")
    assert Sizes(recipe, SMALL).smaller_from() is None


def test_geometries_are_those_of_the_catalog():
    assert MODELS.keys() == CATALOG.keys()
    assert MODELS["demo"] == models.resolve("demo").geometry


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"), "llama", layers=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_cache_and_a_filled_one_say_the_same_length(folder, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    cache = KVQCache.from_recipe("higgs-4bit", model=model)
    empty = cache.memory_report()
    with torch.inference_mode():
        model(torch.arange(64)[None], past_key_values=cache)
    filled = cache.memory_report()
    assert empty.smaller_than_16bit_from == filled.smaller_than_16bit_from
    assert empty.dtype == filled.dtype == str(dtype).removeprefix("torch.")
    assert ("exact tokens are in float32" in str(filled)) == (dtype == torch.float32)


def test_a_length_that_the_model_never_reaches_is_a_warning(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    start = KVQCache.from_recipe("higgs-4bit", model=model).memory_report().smaller_than_16bit_from
    for positions, warned in ((start - 1, True), (start, False)):
        model.config.max_position_embeddings = positions
        said = str(KVQCache.from_recipe("higgs-4bit", model=model).memory_report())
        assert (
            f"WARNING: smaller from {start:,} tokens on, and the model was made for {positions:,}" in said
        ) == warned


def test_attention_that_decodes_the_whole_history_is_said_once_with_the_line_that_mends_it(folder, caplog):
    from kvq_runtime.hf import hooks

    hooks._slow.clear()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def told(attention: str, step: torch.Tensor) -> list[str]:
        caplog.clear()
        model.set_attn_implementation(attention)
        for _ in range(2):
            cache = KVQCache.from_recipe("higgs-4bit", model=model)
            with torch.inference_mode():
                model(torch.arange(128).repeat(3)[None] % 256, past_key_values=cache)
                for _ in range(2):
                    model(step, past_key_values=cache)
        return [one.getMessage() for one in caplog.records if "decodes the whole history" in one.getMessage()]

    one, several = torch.tensor([[1]]), torch.tensor([[1, 2]])
    assert told("kvq", one) == told("sdpa", several) == [], "no step, but a text that is read"
    (said,) = told("sdpa", one)
    assert 'model.set_attn_implementation("kvq")' in said
