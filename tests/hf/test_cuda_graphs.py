"""`model.generate` under CudaGraphs: the tokens and logits of eager steps, replayed, and a reason for every other step.

There is no graph here: `frozen` repeats the step while all that the host counts stays as it was when it was recorded.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from feeding import RECIPES
from frozen import Silent, frozen
from fused_driver import with_kernels  # noqa: F401
from generating import padded
from models import prompt, random_model
from torch import Tensor
from transformers import PreTrainedModel

from kvq_runtime import CudaGraphs, KVQCache
from kvq_runtime.hf.cuda_graphs import step_refusal
from kvq_runtime.hf.model import CACHE
from kvq_runtime.ops import dispatch

pytest.importorskip("triton")

RECIPE = RECIPES["rtn-2bit"]  # recent 12, blocks of 16
NEW = 24


def model_of(attention: str = "kvq", layers: int = 2, **settings: Any) -> PreTrainedModel:
    return random_model("llama", attention, num_hidden_layers=layers, head_dim=64, **settings)


def exact_alone(q_BHTD: Tensor, keys: Any, values: Any, exact: Any, lengths: Tensor, starts_B: Tensor, *rest: Any):
    """Attention in place of the kernel's: to the window alone, found as the kernel finds it, by what the device counts.

    How many blocks there are, and where rows start, changes the result too.
    """
    blocks, first, count = lengths[:3].unbind()
    k_window, v_window, heads = exact.k_window, exact.v_window, keys.geometry.kv_heads
    place = torch.arange(k_window.shape[1])
    seen = (place >= first) & (place < first + count)
    k, v = (
        x.unflatten(-1, (heads, -1)).transpose(1, 2).repeat_interleave(q_BHTD.shape[1] // heads, 1)
        for x in (k_window.nan_to_num(), v_window.nan_to_num())
    )
    scores = (q_BHTD @ k.mT / 6).masked_fill(~seen, -torch.inf)
    out = scores.softmax(-1) @ v * (1 + 0.05 * blocks) + 0.02 * starts_B[:, None, None, None]
    return out, scores.logsumexp(-1)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel in the interpreter: what is compared are two ways to take a step, not what it computes."""
    monkeypatch.setattr("kvq_runtime.kernels.attend.launch.attend", exact_alone)
    monkeypatch.setattr(dispatch, "kernel", dispatch.OPS.__getitem__)


@contextmanager
def graphs_of(model: PreTrainedModel, *caches: KVQCache) -> Iterator[CudaGraphs]:
    """CudaGraphs with the stand-in; the cache that is being recorded is the one whose pass is tried."""

    def record(step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        (cache,) = [cache for cache in caches if cache.blocks.positions.recorded]
        recorded = frozen(cache.blocks, step, torch.empty(cache.blocks.rows, 1, model.config.vocab_size))
        with pytest.MonkeyPatch.context() as patch, Silent(patch):
            step()
        return recorded

    with CudaGraphs(model, record) as graphs:
        yield graphs


def generate(model: PreTrainedModel, ids: Tensor, cache: KVQCache, **settings: Any) -> Any:
    given = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 1} | settings
    given |= {"return_dict_in_generate": True, "output_logits": True}
    torch.manual_seed(7)
    return model.generate(ids, past_key_values=cache, **given)


def compared(model: PreTrainedModel, ids: Tensor, **settings: Any) -> tuple[CudaGraphs, Any]:
    """Generate eagerly and with graphs: the same tokens, and the same logits bit for bit."""
    cache, other = KVQCache(RECIPE, model), KVQCache(RECIPE, model)
    wanted = generate(model, ids, other, **settings)
    with graphs_of(model, cache) as graphs:
        found = generate(model, ids, cache, **settings)
    assert torch.equal(found.sequences, wanted.sequences)
    assert torch.equal(torch.stack(found.logits), torch.stack(wanted.logits))
    assert cache.get_seq_length() == other.get_seq_length() == found.sequences.shape[1] - 1
    for layer, store in cache.blocks.layers.items():
        assert store.blocks == other.blocks.layers[layer].blocks
    return graphs, found


# ---- steps that are replays --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_kernels_own_step_is_replayed():
    graphs, _ = compared(model_of(layers=1), prompt(1, 40), max_new_tokens=4)
    assert (graphs.replayed, graphs.recorded, graphs.reason) == (3, 1, None)


@pytest.mark.parametrize("way", [{}, {"do_sample": True, "temperature": 0.8, "top_k": 20}], ids=["greedy", "sampling"])
@pytest.mark.parametrize("lengths", [(40, 40), (40, 23)], ids=["whole", "padded"])
def test_tokens_and_logits_are_those_of_eager_steps(way, lengths, quick):
    ids, mask = padded(prompt(2, 40), *lengths)
    graphs, found = compared(model_of(), ids, attention_mask=mask, **way)
    assert (graphs.replayed, graphs.recorded, dict(graphs.eager)) == (NEW - 1, 1, {})
    assert found[CACHE].blocks.layers[0].blocks == 3  # two of them in replayed steps
    assert "23 steps replayed, 1 graphs recorded" in repr(graphs)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(40, 40), (40, 23)], ids=["whole", "padded"])
def test_a_gpu_replays_what_it_recorded(lengths):
    model: Any = model_of()
    model.to("cuda")
    ids, mask = (x.to("cuda") for x in padded(prompt(2, 40), *lengths))
    wanted = generate(model, ids, KVQCache(RECIPE, model), attention_mask=mask)
    with CudaGraphs(model) as graphs:
        found = generate(model, ids, KVQCache(RECIPE, model), attention_mask=mask)
    assert (graphs.replayed, graphs.recorded, dict(graphs.eager)) == (NEW - 1, 1, {})
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), rtol=1e-3, atol=1e-3)


def turns(model: PreTrainedModel, cache: KVQCache, change: Callable[[KVQCache, Tensor], Tensor]) -> list[Tensor]:
    """Two turns with one cache, of 40 and 30 tokens, and a change between them; the logits of both."""
    first = generate(model, prompt(2, 40), cache, max_new_tokens=7)
    text = change(cache, first.sequences)
    second = generate(model, torch.cat([text, prompt(2, 30, seed=3)], 1), cache, max_new_tokens=9)
    return [torch.stack(turn.logits) for turn in (first, second)]


def cropped(cache: KVQCache, text: Tensor) -> Tensor:
    cache.crop(-20)  # into a block
    return text[:, :-20]


def swapped(cache: KVQCache, text: Tensor) -> Tensor:
    cache.reorder_cache(torch.tensor([1, 0]))
    return text[[1, 0]]


def emptied(cache: KVQCache, text: Tensor) -> Tensor:
    cache.reset()
    return text


@pytest.mark.parametrize("change", [cropped, swapped, emptied])
def test_a_second_turn_is_recorded_anew(change, quick):
    model = model_of()
    one, two = KVQCache(RECIPE, model), KVQCache(RECIPE, model)
    with graphs_of(model, one) as graphs:
        found = turns(model, one, change)
    wanted = turns(model, two, change)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert (graphs.replayed, graphs.recorded) == (6 + 8, 2)


def test_tables_that_are_outgrown_are_recorded_anew(quick):
    """Room for 32 blocks of 16 tokens: the 33rd comes in a replayed step."""
    model = model_of(max_position_embeddings=512)
    graphs, found = compared(model, prompt(1, 530), max_new_tokens=20)
    store = found[CACHE].blocks.layers[0]
    assert store.blocks == 33 and len(store.index.tables[0]) == 4
    assert (graphs.replayed, graphs.recorded) == (19, 2)


# ---- steps that are not ------------------------------------------------------------------------------------------


def eager(graphs: CudaGraphs, says: str, steps: int = NEW - 1) -> None:
    """All steps were eager, for one reason."""
    (reason,) = graphs.eager
    assert says in reason and graphs.eager[reason] == steps and graphs.reason == reason
    assert graphs.replayed == graphs.recorded == 0
    assert f"{steps} eager: {reason}" in repr(graphs)


def test_a_step_that_encodes_a_block_is_not_recorded_but_the_next(quick):
    graphs, _ = compared(model_of(), prompt(1, 43))
    assert dict(graphs.eager) == {"the next step encodes a block; take it first, then record": 1}
    assert (graphs.replayed, graphs.recorded, graphs.reason) == (NEW - 2, 1, None)


def test_without_a_gpu(caplog):
    model = model_of()
    cache = KVQCache(RECIPE, model)
    with dispatch.forced(False), CudaGraphs(model) as graphs, caplog.at_level(logging.WARNING, "kvq_runtime"):
        assert graphs.reason is None
        generate(model, prompt(1, 40), cache)
    eager(graphs, "the cache is on cpu, and graphs are of CUDA devices")
    (line,) = caplog.messages
    assert graphs.reason in line


def test_a_recipe_that_is_not_recorded_says_why(quick):
    model = model_of()
    cache = KVQCache(RECIPES["subkv-2bit"], model)
    with graphs_of(model, cache) as graphs:
        generate(model, prompt(1, 40), cache, max_new_tokens=5)
    eager(graphs, "the dynamic policy of subkv-2bit asks the host", 4)


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"output_hidden_states": True}, "the model gives hidden_states beside logits"),
        ({"prompt_lookup_num_tokens": 3}, "assisted decoding"),
        ({"num_beams": 2}, None),
        ({"disable_compile": True}, None),
        ({"prefill_chunk_size": 13}, None),
    ],
)
def test_other_ways_of_generating_are_eager(settings, says, quick):
    model, found = model_of(), []
    for on in (True, False):
        cache = KVQCache(RECIPE, model)
        with graphs_of(model, cache) as graphs:
            if not on:
                graphs.close()
            found.append(generate(model, prompt(1, 40), cache, **settings).sequences)
        if on:
            assert bool(graphs.eager) == bool(says) and all(says in reason for reason in graphs.eager)
    assert torch.equal(*found)


def test_another_attention_says_so(quick):
    graphs, _ = compared(model_of("sdpa"), prompt(1, 40))
    eager(graphs, 'sdpa attention decodes the history at each step; call model.set_attn_implementation("kvq")')


def test_padding_inside_a_row_says_so(quick):
    ids, mask = prompt(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[0, 20:23] = 0
    graphs, _ = compared(model_of(), ids, attention_mask=mask, max_new_tokens=5)
    eager(graphs, "padding is not on the left", 4)


def test_what_cuda_cannot_record_is_taken_eagerly(quick):
    def record(step: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    model = model_of()
    cache, other = KVQCache(RECIPE, model), KVQCache(RECIPE, model)
    wanted = generate(model, prompt(1, 40), other)
    with CudaGraphs(model, record) as graphs:
        found = generate(model, prompt(1, 40), cache)
    eager(graphs, "it cannot be recorded: operation not permitted when stream is capturing")
    assert torch.equal(torch.stack(found.logits), torch.stack(wanted.logits))


def test_arguments_that_a_replay_would_not_take_say_so():
    given = {"input_ids": torch.tensor([[5]]), "position_ids": torch.tensor([[9]])}
    model = model_of()
    cache = KVQCache(RECIPE, model)
    for more, says in (
        ({"cache_position": torch.tensor([9])}, "cache_position"),
        ({"attention_mask": torch.ones(1, 1, 1, 10, dtype=torch.bool)}, "a mask of the caller's own"),
        ({"position_ids": None}, "no position_ids"),
    ):
        assert says in str(step_refusal(model, given | {CACHE: cache} | more))


# ---- on and off --------------------------------------------------------------------------------------------------


def test_it_ends_with_the_block(quick):
    model = model_of()
    before = dict(vars(model))
    with graphs_of(model) as graphs:
        with pytest.raises(RuntimeError, match="has CudaGraphs already"):
            CudaGraphs(model)
        assert "get_compiled_call" in vars(model)
    assert vars(model) == before
    generate(model, prompt(1, 40), KVQCache(RECIPE, model), max_new_tokens=3)
    assert not graphs.eager and not graphs.replayed


def test_what_does_not_generate_is_refused():
    with pytest.raises(TypeError, match="give the model that has"):
        CudaGraphs(model_of().model)
    with pytest.raises(TypeError, match="loaded transformers model"):
        CudaGraphs("a-name")  # type: ignore[arg-type]
