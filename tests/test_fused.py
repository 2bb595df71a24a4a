"""A cache whose blocks the decode kernel reads attends as the torch path does over the same blocks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import fitted
import pytest
import torch
from feeding import RECIPES, anything, feed_in, make, newest, oldest, rotary, tensors, turned
from models import prompt, random_model
from parity import DEVICE, error
from test_generate import padded
from test_memory import owned
from torch import Tensor

from kvq_runtime.attention import attend
from kvq_runtime.cache import BlockCache
from kvq_runtime.geometry import Geometry
from kvq_runtime.hf import KVQCache
from kvq_runtime.ops import dispatch
from kvq_runtime.recipe import Recipe, Side, preset, presets
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rtn import Rtn

pytest.importorskip("triton")
from kvq_runtime.attention.fixed import FixedStream
from kvq_runtime.attention.fused import refusal
from kvq_runtime.attention.graph import captured

TOLERANCE = 4e-3  # float16 operands of the kernel's products, bfloat16 codebooks of the torch path
ONE = Geometry(layers=1, kv_heads=2, head_size=32)
RATIO = 2  # query heads of a KV head
SCALE = ONE.head_size**-0.5


def kivi(bits: int, position: str = "post", group: int = 16) -> Recipe:
    """KIVI in blocks of 16, keys in groups of a block or of a part of it."""
    value = Side(Rtn(bits, "head" if group == 16 else group), sinks=2, recent=8, block=16)
    key = replace(value, quantize=Rtn(bits, group), axis="channel")
    return Recipe(f"kivi-{bits}-{position}-{group}", key, value, position)  # type: ignore[arg-type]


def centred(position: str, halves: str = "key value") -> Recipe:
    """KIVI with the mean removed of one side or both."""
    made = kivi(2, position)
    sides = {half: replace(getattr(made, half), predict=Mean()) for half in halves.split()}
    return replace(made, name=f"mean-{made.name}-{halves.replace(' ', '-')}", **sides)


# families (a) and (b) of the kernel
FAMILIES = {
    **{recipe.name: recipe for recipe in (kivi(2), kivi(2, group=8), kivi(2, "pre"), kivi(2, "pre", 8))},
    **{name: RECIPES[name] for name in ("rtn-2bit", "quarot-head-4bit", "higgs-head-2bit", "lloyd-3bit")},
    **{name: RECIPES[name] for name in ("polar-3bit", "polar-3bit-fitted")},
}
MEANS = {
    **{name: RECIPES[name] for name in ("mean-higgs-head-2bit-post", "mean-lloyd-3bit-post")},
    **{one.name: one for one in (centred("post"), centred("pre"), centred("post", "value"), centred("post", "key"))},
}
FAMILIES |= MEANS
PADDED = torch.tensor([21, 0])


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """On a CPU, in Triton's interpreter."""
    with dispatch.forced(True):
        yield


class Driver:
    """A cache of one layer, fed with random keys, values and queries, and compared at every pass."""

    def __init__(self, recipe: Recipe, starts: Tensor | None = None, rows: int = 2, dtype: torch.dtype = torch.float32):
        self.cache = BlockCache(recipe, ONE, fitted.tensors(recipe, ONE) or None, max_tokens=256)
        x = turned(tensors(300, rows, ONE), ONE)
        self.x = x.to(DEVICE, dtype)
        self.q = torch.randn(rows, 2 * RATIO, 300, 32, generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)
        self.real = None if starts is None else torch.arange(300, device=DEVICE) >= starts.to(DEVICE)[:, None]
        self.at, self.silent = 0, False  # tokens so far; whether passes say nothing of padding

    def announce(self, count: int) -> Tensor | None:
        """Tell the cache of the next tokens; the mask that a model would give."""
        stop, real = self.at + count, self.real
        positions = torch.arange(self.at, stop)[None] if real is None else (real.cumsum(1) - 1).clamp(min=0)
        turning = rotary(ONE)
        turning = replace(turning, frequencies_K=turning.frequencies_K.to(DEVICE))
        positions = positions.to(DEVICE) if real is None else positions[:, self.at : stop]
        told = None if real is None or self.silent else real[:, self.at : stop]
        self.cache.timeline.announce(told, positions, turning)
        if real is None or self.silent:
            return None
        causal = torch.ones(count, stop, dtype=torch.bool, device=DEVICE).tril(self.at)
        return causal & real[:, None, None, :stop]

    def step(self, count: int = 1, expected: bool = True) -> tuple[Tensor, Tensor | None]:
        """One pass: (what the cache answers, what the torch path does)."""
        mask, part, cache = self.announce(count), slice(self.at, self.at + count), self.cache
        cache.take(0, *self.x[0, :, :, part].unbind(0))
        out, wanted = cache.attend(0, self.q[:, :, part], mask, SCALE), None
        if expected:
            with dispatch.forced(False):
                wanted = attend.attend(cache.history, 0, self.q[:, :, part], mask, SCALE)
        cache.finish(0)
        self.at += count
        return out, wanted

    def check(self, count: int = 1) -> None:
        """A pass in which both agree, where a row has tokens at all."""
        out, wanted = self.step(count)
        assert wanted is not None
        rows = slice(None) if self.real is None else self.real[:, self.at - count : self.at].all(1)
        assert error(out[rows], wanted[rows]) < TOLERANCE
        assert not torch.equal(out[rows], wanted[rows])  # two roads


@pytest.mark.parametrize("starts", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("name", FAMILIES)
def test_kernel_and_torch_agree(name, starts):
    driver = Driver(FAMILIES[name], starts)
    driver.step(58, expected=False)
    streams = driver.cache.layers[0]
    blocks = streams[0].blocks
    assert all(isinstance(stream, FixedStream) and stream.blocks for stream in streams)
    for count in (1, 15, 1) if starts is None else (2,):
        driver.check(count)
    assert streams[0].blocks > blocks or starts is not None


def test_sixteen_bits():
    driver = Driver(FAMILIES["higgs-head-2bit"], PADDED, dtype=torch.bfloat16)
    driver.step(40, expected=False)
    driver.check()


def test_sinks_that_arrive_after_the_prompt():
    driver = Driver(FAMILIES["rtn-2bit"], torch.tensor([31, 0]))
    driver.step(33, expected=False)
    for _ in range(4):
        driver.check()
    assert driver.cache.layers[0][0].blocks


def test_reset_crop_and_other_rows():
    driver = Driver(FAMILIES["rtn-2bit"], PADDED)
    driver.step(70, expected=False)
    for change in (lambda: driver.cache.crop(68), lambda: driver.cache.crop(37), lambda: driver.cache.reset()):
        driver.check()
        change()
        driver.at = driver.cache.length
    driver.step(60, expected=False)
    for rows in ([1, 0], [0, 0], [1, 0, 1]):
        driver.check()
        chosen = torch.tensor(rows, device=DEVICE)
        driver.cache.select(chosen)
        driver.x, driver.q, driver.real = driver.x[:, :, chosen], driver.q[chosen], driver.real[chosen]  # type: ignore
    driver.check()


@pytest.mark.parametrize("name", ["kivi-2-pre-16", "higgs-head-2bit", "lloyd-3bit"])
def test_blocks_are_the_same_however_many_are_due(name):
    one, two = Driver(FAMILIES[name], PADDED), Driver(FAMILIES[name], PADDED)
    one.step(58, expected=False)
    for _ in range(2):
        two.step(29, expected=False)
    for a, b in zip(one.cache.layers[0], two.cache.layers[0], strict=True):
        assert a.blocks == b.blocks > 1
        assert all(torch.equal(field, b.fields(0, b.blocks)[name]) for name, field in a.fields(0, a.blocks).items())


# ---- what the kernel does not answer -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, says",
    [
        ("aqua-2bit", "no kernel for its keys"),
        ("svdq-2bit", "no kernel for its keys"),
        ("aqua-klt-1bit", "no kernel for its keys"),
        ("h2o-higgs-2bit", "keeps tokens by their attention weights"),
        ("svdq-shadow-2bit", "chunks that each query asks for"),
        ("polar-online", "a codec of its own"),
        ("squat-pre-online-2bit", "a codec of its own"),
    ],
)
def test_other_recipes_say_so(name, says):
    reason = refusal(preset(name), ONE)
    assert reason is not None and says in reason and "decoded" in reason and name in reason
    assert refusal(FAMILIES["rtn-2bit"], ONE) is None
    assert refusal(preset("polar-3bit-fitted-plain"), ONE) is None  # whatever is fitted
    assert refusal(preset("mean-higgs-head-2bit-post"), ONE) is None
    assert "registers" in str(refusal(preset("mean-higgs-head-2bit-post"), replace(ONE, head_size=256)))
    windows = replace(FAMILIES["rtn-2bit"], value=replace(FAMILIES["rtn-2bit"].value, recent=3))
    assert "different sinks" in str(refusal(windows, ONE))


@pytest.mark.parametrize("name", [name for name in presets() if name.startswith("squat-pre-") and "online" not in name])
def test_squat_before_rope_has_a_kernel(name):
    assert refusal(preset(name), Geometry(layers=2, kv_heads=8, head_size=128)) is None


def test_a_mean_and_rope_on_a_part_of_the_head(monkeypatch):
    """The kernel does not answer; the torch path does."""
    driver = Driver(FAMILIES["mean-higgs-head-2bit-post"])
    part = rotary(ONE)
    monkeypatch.setattr("test_fused.rotary", lambda geometry: replace(part, frequencies_K=part.frequencies_K[:8]))
    driver.step(58, expected=False)
    out, wanted = driver.step(1)
    assert wanted is not None and torch.equal(out, wanted)
    assert isinstance(driver.cache.layers[0][0], FixedStream) and not driver.cache.fused.regular


def test_a_recipe_without_a_kernel_takes_the_torch_path():
    driver = Driver(RECIPES["higgs-2bit"])
    driver.step(40, expected=False)
    out, wanted = driver.step(1)
    assert wanted is not None and torch.equal(out, wanted)
    assert not any(isinstance(stream, FixedStream) for stream in driver.cache.layers[0])


def answered(driver: Driver, count: int, mask: Tensor | None) -> Tensor | None:
    """What the kernel, if it is asked, answers to the newest `count` queries."""
    q_BHTD = driver.q[:, :, driver.at - count : driver.at]
    found = driver.cache.fused.attend(driver.cache.history, 0, q_BHTD, mask, SCALE)
    return None if found is None else found[0]


def test_masks_that_are_not_left_padding():
    driver = Driver(FAMILIES["rtn-2bit"])
    driver.step(40, expected=False)
    assert answered(driver, 1, None) is not None
    assert answered(driver, 1, torch.ones(1, 1, 1, 40, dtype=torch.bool)) is None  # nobody announced it
    driver.real = torch.arange(300, device=DEVICE) != torch.tensor([[5], [60]], device=DEVICE)  # a hole
    driver.cache.reset()
    driver.at = 0
    driver.step(40, expected=False)
    out, wanted = driver.step(1)
    assert wanted is not None and torch.equal(out, wanted)


@pytest.mark.parametrize("starts", [None, PADDED, torch.tensor([70, 0])], ids=["whole", "padded", "late"])
@pytest.mark.parametrize("name", ["kivi-2-pre-16", "mean-higgs-head-2bit-post"])
def test_many_queries_attend_slab_by_slab(name, starts, monkeypatch):
    monkeypatch.setattr("kvq_runtime.kernels.attention.attend", None)
    driver = Driver(FAMILIES[name], starts)
    driver.step(90, expected=False)
    driver.check(33)  # 66 rows of queries per KV head
    monkeypatch.setattr("kvq_runtime.attention.tall.SCORES", 1000)
    driver.check(66)


def test_a_long_pass_after_a_step():
    driver = Driver(FAMILIES["rtn-2bit"])
    for count in (40, 1, 70, 1):  # 70 tokens have no room where the window is
        driver.check(count) if driver.at else driver.step(count, expected=False)


@pytest.mark.parametrize("query, starts", [(newest, None), (oldest, None), (anything, PADDED)])
def test_a_dynamic_window_hears_the_kernel(query, starts):
    """What the kernel's log-sum-exp says of the two tokens that count is what the torch path's weights say."""
    x, recipe = tensors(220, geometry=ONE), RECIPES["subkv-2bit"]
    real = None if starts is None else torch.arange(220) >= starts[:, None]
    caches = [make(recipe, ONE), make(recipe, ONE)]
    for size in (40, 1, 1, 1, 40, 1, 1, 1, 124, 1, 1, 1):
        for kernel, cache in zip((True, False), caches, strict=True):
            with dispatch.forced(kernel):
                feed_in(cache, x, [size], real_BT=real, query=query)
        one, two = caches
        assert one.votes is not None and two.votes is not None
        assert [*map(type, one.layers[0])] == [FixedStream] * 2 and not isinstance(two.layers[0][0], FixedStream)
        assert [stream.blocks for stream in one.layers[0]] == [stream.blocks for stream in two.layers[0]]
        for found, wanted in zip(one.votes.tensors, two.votes.tensors, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0.02, atol=2e-4, equal_nan=True)
    assert one.layers[0][0].blocks > 1
    with pytest.raises(RuntimeError, match="no graph: the window of subkv-2bit asks the device"):
        captured(one, lambda: None)


@pytest.mark.parametrize("name", ["higgs-head-2bit", "mean-higgs-head-2bit-post"])
def test_the_report_is_what_the_cache_owns(name):
    driver = Driver(FAMILIES[name], PADDED)
    for count in (40, 1, 1):
        driver.step(count, expected=False)
        report = driver.cache.memory_report()
        assert report.total_bytes == sum(owned(driver.cache).values())
        assert report.parts["tables"] > 0


# ---- a step as one graph -----------------------------------------------------------------------------------------


def frozen(cache: BlockCache, step: Callable[[], Tensor], like: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """What a graph is to a step, where there is none: all that the host counts stays as it was at the recording."""
    things = [cache, cache.timeline, cache.fused, *(stream for pair in cache.layers.values() for stream in pair)]

    def counts() -> list[dict[str, int]]:
        return [{name: value for name, value in vars(thing).items() if isinstance(value, int)} for thing in things]

    def restore(held: list[dict[str, int]]) -> None:
        for thing, values in zip(things, held, strict=True):
            vars(thing).update(values)

    out, then = torch.full_like(like, torch.nan), counts()

    def replay() -> None:
        now = counts()
        restore(then)
        out.copy_(step())
        restore(now)

    return out, replay


class Silent:
    """Inside, a tensor that is asked for its value raises: what a recorded step must not do."""

    NAMES = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "nonzero", "cpu")

    def __init__(self, patch: pytest.MonkeyPatch):
        self.patch = patch

    def __enter__(self) -> None:
        def asked(*args, **settings):
            raise AssertionError("the step asks the device")

        for name in self.NAMES:
            self.patch.setattr(torch.Tensor, name, asked)
        self.patch.setattr(torch, "equal", asked)

    def __exit__(self, *args) -> None:
        self.patch.undo()


def replayed(name: str, starts: Tensor | None, record: Callable | None, count: int = 4) -> None:
    """A recorded step gives, token after token and over a flush, what steps taken one by one do, bit for bit."""
    one, two = Driver(FAMILIES[name], starts), Driver(FAMILIES[name], starts)
    _, recent, block = FAMILIES[name].key.window
    for driver in (one, two):
        driver.step(recent + 4 * block - 3, expected=False)  # the third step from here encodes a block
        driver.silent = True
        driver.step(1, expected=False)
        driver.cache.crop(driver.at - 1)
        driver.at -= 1
    k_BTC, v_BTC, q_BHTD = one.x[0, 0, :, :1].clone(), one.x[0, 1, :, :1].clone(), one.q[:, :, :1].clone()

    def step() -> Tensor:
        one.announce(1)
        one.cache.take(0, k_BTC, v_BTC)
        out = one.cache.attend(0, q_BHTD, None, SCALE)
        one.cache.finish(0)
        return out

    again = captured(one.cache, step, *([] if record is None else [lambda s: record(one.cache, s, q_BHTD)]))
    blocks = one.cache.layers[0][0].blocks
    for at in range(one.at, one.at + count):
        for held, new in ((k_BTC, one.x[0, 0]), (v_BTC, one.x[0, 1]), (q_BHTD, one.q)):
            held.copy_(new.narrow(-2, at, 1))
        out, (wanted, _) = again(), two.step(1, expected=False)
        assert torch.equal(out, wanted)
    assert one.cache.layers[0][0].blocks > blocks
    assert one.cache.length == two.cache.length


@pytest.mark.parametrize(
    "name, starts", [("rtn-2bit", None), ("higgs-head-2bit", PADDED), ("mean-lloyd-3bit-post", PADDED)]
)
def test_a_step_depends_on_nothing_that_the_host_counts(name, starts):
    replayed(name, starts, frozen)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="records a CUDA graph")
@pytest.mark.parametrize("starts", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_is_one_graph(name, starts):
    replayed(name, starts, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Tensor.cpu is the interpreter's here")
@pytest.mark.parametrize("name", ["rtn-2bit", "kivi-2-pre-16", "mean-higgs-head-2bit-post"])
def test_a_step_asks_the_device_nothing(name, monkeypatch):
    driver = Driver(FAMILIES[name], PADDED)
    driver.step(58, expected=False)
    driver.silent = True
    driver.step(1, expected=False)
    driver.step(1, expected=False)
    monkeypatch.setattr("kvq_runtime.cache._finite", lambda *args: True)  # asked on a CPU alone
    driver.announce(1)
    new = driver.x[0, :, :, driver.at : driver.at + 1].unbind(0)
    launched = []
    monkeypatch.setattr("kvq_runtime.kernels.attention.attend", lambda q, *rest: launched.append(q) or (q, q))
    with pytest.MonkeyPatch.context() as patch, Silent(patch):
        driver.cache.take(0, *new)
        driver.cache.attend(0, driver.q[:, :, :1], None, SCALE)
        driver.cache.finish(0)
    assert launched


def test_recording_is_refused_where_it_cannot_be():
    driver = Driver(RECIPES["higgs-2bit"])
    driver.step(40, expected=False)
    with pytest.raises(RuntimeError, match="no kernel for its keys"):
        captured(driver.cache, lambda: None)
    driver = Driver(FAMILIES["rtn-2bit"])
    driver.step(58, expected=False)
    with pytest.raises(RuntimeError, match="no tokens yet"):
        captured(BlockCache(FAMILIES["rtn-2bit"], ONE), lambda: None)
    left = driver.cache.layers[0][0]
    driver.step(left.side.recent + left.side.block - left.window_BTC.shape[1] - 1, expected=False)
    with pytest.raises(RuntimeError, match="encodes a block"):
        captured(driver.cache, lambda: None)
    driver.step(1, expected=False)
    again = captured(driver.cache, lambda: driver.step(1, expected=False)[0], lambda step: (None, lambda: None))
    driver.cache.reset()
    with pytest.raises(RuntimeError, match="record it again"):
        again()


# ---- whole models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beams", [1, 2])
def test_models_generate_as_with_torch(beams):
    model: Any = random_model("qwen2", attention="kvq", num_hidden_layers=2)
    model.to(DEVICE)
    ids, mask = (x.to(DEVICE) for x in padded(prompt(2, 44), 44, 30))
    settings = {"max_new_tokens": 3, "pad_token_id": 1, "do_sample": False, "num_beams": beams}
    found, after = [], []
    for kernels in (True, False):
        model.set_attn_implementation("kvq")
        with dispatch.forced(kernels), torch.no_grad():
            cache = KVQCache(FAMILIES["rtn-2bit"], model)
            given = {"past_key_values": cache, "return_dict_in_generate": True, "output_logits": True}
            found.append(torch.stack(model.generate(ids, attention_mask=mask, **settings, **given).logits))
            model.set_attn_implementation("sdpa")  # any other attention is served decoded tensors
            after.append(model(ids[:1, :1].expand(2 * beams, 1), past_key_values=cache).logits)
        stream = cache.blocks.layers[0][0]
        assert isinstance(stream, FixedStream) == kernels and stream.blocks
    assert cache.refusal is None
    assert error(*found) < 4 * TOLERANCE
    assert error(*after) < 4 * TOLERANCE
