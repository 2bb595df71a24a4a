"""Attention that rebuilds no layer, against float64 attention over chains that are rebuilt by hand."""

import pickle
from dataclasses import replace

import pytest
import torch
from feeding import error, feed_in, rotary, small, tensors, turned
from fitted import tensors as fitted_tensors

from kvq_runtime.artifact.recipe_text import read
from kvq_runtime.attention.absorbed import bits_read, chain, refusal
from kvq_runtime.attention.path import Query
from kvq_runtime.cache import BlockCache
from kvq_runtime.cli.main import main
from kvq_runtime.geometry import MODELS, Geometry
from kvq_runtime.ops import rope
from kvq_runtime.recipe import Recipe, Scheme, preset
from kvq_runtime.recipes import higgs, rtn, turboquant
from kvq_runtime.stages.predict import MLP, Linear, LowRank

GEOMETRY = Geometry(layers=5, kv_heads=2, head_size=32)
GROUP = 3  # query heads per KV head
SCALE = GEOMETRY.head_size**-0.5
PLAIN = read("aqua-absorbed-2bit-2+all.predict.anchor_every=3")


def of(scheme: Scheme, key=None, **settings) -> Recipe:
    key = key or Linear(**settings)
    return small(Recipe("any", replace(scheme, predict=key), replace(scheme, predict=replace(key, keys=False))))


CASES = {
    "chain": small(PLAIN, GEOMETRY),
    "star": small(preset("aqua-absorbed-2bit-4-star"), GEOMETRY),
    "unbroken": of(higgs.scheme("2bit")),
    "two below": of(higgs.scheme("3bit", "head"), below=(1, 2), anchor_every=4),
    "affine codes": of(rtn.scheme(2, "head"), anchor_every=3),
    "per channel": of(replace(higgs.scheme("2bit"), axis="channel"), anchor_every=2),
    "low rank": of(turboquant.scheme(2, "all"), LowRank(rank=8, anchor_every=3)),
    "packed predictors": of(higgs.scheme("2bit"), storage="gptq4", anchor_every=2),
}


def filled(recipe: Recipe, tokens: int, rows: int, real_BT=None) -> BlockCache:
    cache = BlockCache(recipe, GEOMETRY, fitted_tensors(recipe, GEOMETRY))
    feed_in(cache, turned(tensors(tokens, rows, GEOMETRY), GEOMETRY), [tokens], real_BT=real_BT)
    return cache


def by_hand(cache: BlockCache, layer: int, role: int) -> torch.Tensor:
    """All centred blocks of a layer, rebuilt from those below in float64: [B, T, C]."""
    codec, store = cache.codecs[layer][role], cache.layers[layer]
    residuals = [
        codec.decode_residual({name: field.flatten(0, 1) for name, field in store.fields(role, *run).items()})
        for run in store.runs()
    ]
    whole = torch.cat([x.double().unflatten(0, (store.rows, -1)).flatten(1, 2) for x in residuals], 1)
    if codec.below:
        own = {name.removeprefix("predict."): x for name, x in codec.tensors.items() if name.startswith("predict.")}
        inputs = torch.cat([by_hand(cache, layer - depth, role) for depth in codec.below], -1)
        if "down" in own:
            whole = whole + inputs @ own["down"].double() @ own["up"].double()
        else:
            unpacked = isinstance(codec.predictor, Linear) and codec.predictor.matrix(own, inputs.shape[-1])
            whole = whole + inputs @ unpacked.double()
        whole = whole + own["bias"].double()
    return whole


def expected(cache: BlockCache, layer: int, q_BHTD: torch.Tensor, positions_BT: torch.Tensor, real_BT) -> torch.Tensor:
    """Softmax attention in float64 over rebuilt blocks, with exact sinks and window in their places."""
    store, pair = cache.layers[layer], []
    tables = [table.double() for table in rotary(GEOMETRY).tables(positions_BT)]
    for role in (0, 1):
        mean_HD = cache.codecs[layer][role].tensors["predict.mean"].double().view(GEOMETRY.kv_heads, -1)
        mean = mean_HD.expand(*positions_BT.shape, -1, -1)
        mean = (rope.rotate(mean, *tables) if role == 0 else mean).flatten(-2)
        blocks = by_hand(cache, layer, role) + mean[:, : store.encoded]
        sinks = store.sinks_2BSC[role].double()
        for row, real in enumerate(real_BT):
            first = real[: store.encoded].nonzero().flatten()[: sinks.shape[1]]
            blocks[row, first] = sinks[row, : len(first)]
        whole = torch.cat([blocks, store.window_2BTC[role].double()], 1)
        pair.append(whole.unflatten(-1, (GEOMETRY.kv_heads, -1)).transpose(1, 2).repeat_interleave(GROUP, 1))
    keys, values = pair
    count, length = q_BHTD.shape[2], store.length
    seen = torch.ones(count, length, dtype=torch.bool).tril(length - count) & real_BT[:, None, None]
    scores = (q_BHTD.double() @ keys.mT * SCALE).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ values


@pytest.mark.parametrize("padding", [0, 9])
@pytest.mark.parametrize("name", CASES)
def test_no_layer_is_rebuilt_and_attention_is_that_over_rebuilt_layers(name, padding, monkeypatch):
    recipe = CASES[name]
    tokens, rows = 3 * recipe.window.block + recipe.window.recent + 5, 2
    real_BT = torch.arange(tokens) >= torch.tensor([padding, 0])[:, None]
    cache = filled(recipe, tokens, rows, real_BT if padding else None)
    assert all(store.blocks for store in cache.layers.values())
    monkeypatch.setattr(cache.decoder, "run", lambda *_: pytest.fail("a layer was rebuilt"))
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(1, tokens, dtype=torch.bool).expand(rows, 1, -1, -1) & real_BT[:, None, None]
    positions_BT = (real_BT.cumsum(1) - 1).clamp(min=0)
    for layer, store in cache.layers.items():
        q_BHTD = torch.randn(rows, GROUP * GEOMETRY.kv_heads, 1, GEOMETRY.head_size, generator=generator)
        found = cache.paths.absorbed.attend(Query(store, q_BHTD, mask if padding else None, SCALE))
        assert found is not None
        assert (
            error(found.out_BHTD.double(), expected(cache, layer, q_BHTD, positions_BT, real_BT)) < 4e-3
        )  # decoded residuals are bfloat16


def test_several_queries_and_slabs():
    recipe = replace(CASES["chain"], window=replace(CASES["chain"].window, recent=4))
    tokens = 35 * recipe.window.block + 9
    cache = filled(recipe, tokens, 1)
    assert len(list(cache.layers[2].runs())) == 2
    q_BHTD = torch.randn(
        1, GROUP * GEOMETRY.kv_heads, 3, GEOMETRY.head_size, generator=torch.Generator().manual_seed(1)
    )
    found = cache.paths.absorbed.attend(Query(cache.layers[2], q_BHTD, None, SCALE))
    real_BT = torch.ones(1, tokens, dtype=torch.bool)
    assert (
        error(found.out_BHTD.double(), expected(cache, 2, q_BHTD, torch.arange(tokens)[None], real_BT)) < 4e-3
    )  # decoded residuals are bfloat16


def test_many_queries_are_left_to_the_path_that_rebuilds():
    cache = filled(CASES["chain"], 100, 1)
    heads = GROUP * GEOMETRY.kv_heads
    few, many = (torch.randn(1, heads, count, GEOMETRY.head_size) for count in (1, 40))
    assert cache.paths.absorbed.attend(Query(cache.layers[2], few, None, SCALE)) is not None
    assert cache.paths.absorbed.attend(Query(cache.layers[2], many, None, SCALE)) is None
    assert torch.isfinite(cache.attend(2, many, None, SCALE)).all()


def test_a_copy_attends_alike():
    cache = filled(CASES["star"], 100, 1)
    q_BHTD = torch.randn(1, GROUP * GEOMETRY.kv_heads, 1, GEOMETRY.head_size)
    found = cache.paths.absorbed.attend(Query(cache.layers[3], q_BHTD, None, SCALE))
    copy = pickle.loads(pickle.dumps(cache))
    assert torch.equal(copy.paths.absorbed.attend(Query(copy.layers[3], q_BHTD, None, SCALE)).out_BHTD, found.out_BHTD)


def test_a_layer_reads_the_residuals_down_to_its_anchor():
    assert [chain(PLAIN, "key", layer) for layer in range(5)] == [[0], [1, 0], [2, 1, 0], [3], [4, 3]]
    star = preset("aqua-absorbed-2bit-4-star")
    assert [chain(star, "value", layer) for layer in range(6)] == [[0], [1, 0], [2, 0], [3, 0], [4], [5, 4]]


def test_bits_read_are_those_of_the_chain():
    geometry = MODELS["demo"]
    one = PLAIN.key.bits(128, geometry)
    assert bits_read(preset("mean-higgs-2bit"), geometry) == pytest.approx(one)
    assert bits_read(PLAIN, geometry) == pytest.approx(one * (1 + 2 + 3) / 3)
    assert bits_read(preset("aqua-absorbed-2bit-4-star"), geometry) == pytest.approx(one * (1 + 2 + 2 + 2 + 1 + 2) / 6)


@pytest.mark.parametrize(
    "recipe, why",
    [
        (preset("higgs-2bit"), "no layer is predicted"),
        (preset("aqua-2bit"), "before RoPE"),
        (read("aqua-2bit+position=post"), "keys=false"),
        (of(higgs.scheme("2bit"), MLP()), "mlp, which is not linear"),
    ],
)
def test_what_cannot_be_absorbed_says_why(recipe, why):
    said = refusal(recipe, 1)
    assert said is not None and why in said
    assert refusal(PLAIN, 1) is None


@pytest.mark.parametrize(
    "settings, why",
    [
        ({"anchor_every": 1}, "anchor_every=1; use 2 to 64"),
        ({"anchor_every": -2}, "anchor_every=-2"),
        ({"reads": "anchor"}, "say by anchor_every"),
        ({"reads": "anchor", "anchor_every": 4, "below": (1, 2)}, "leave below"),
        ({"reads": "all"}, "reads='all'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        Linear(**settings)


def test_the_command_says_what_a_step_reads(capsys):
    assert main(["recipes", "aqua-absorbed-2bit-2"]) == 0
    assert "by torch; 3.047 bits per element of keys and values" in capsys.readouterr().out
    assert main(["recipes", "aqua-2bit"]) == 0
    assert "packed residuals" not in capsys.readouterr().out
