"""The parts of vLLM's connector as servers on a folder, without the engine.

A server serves a text whose rows, keys and values [2, layers, tokens, heads, head size], the model would compute; it
returns how many tokens it loaded, and their rows. What it computed it keeps.
"""

import json
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import fitted
import torch
from safetensors import safe_open
from torch import Tensor

from kvq_runtime.artifact import artifact, fingerprint
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.engines import served_recipe, worker
from kvq_runtime.engines.scheduler import Planner, text_of
from kvq_runtime.engines.worker import PrefixWorker
from kvq_runtime.hf.model import CACHE, rotary_of_folder
from kvq_runtime.prefix.store import PrefixBlocks
from kvq_runtime.recipe import preset
from kvq_runtime.vllm.page import Rows, places_of

MODEL = Path(__file__).parents[2] / "artifacts" / "demo-model"
LAYERS, HEADS, SIZE, BLOCK = 6, 2, 64, 128


class VLLM:
    """The parts of vLLM's connector, in its order, over caches as vLLM's GPU backends have them."""

    PAGE = 32

    def __init__(self, folder: Path, recipe: str, model: Path = MODEL):
        served = worker.Served(
            served_recipe.config(str(model), None), str(model), None, torch.bfloat16, None,
            partial(rotary_of_folder, model, torch.bfloat16),
        )  # fmt: skip
        given = worker.Settings(str(folder), recipe, recent=0)
        (store,), (own,) = worker.opened(given, served, "a test", 1), worker.opened(given, served, "a test", 1, 0)
        self.planner = Planner([store], self.PAGE, 0)
        self.caches = [torch.zeros(64, HEADS, self.PAGE, 2 * SIZE, dtype=torch.bfloat16) for _ in range(LAYERS)]
        places = places_of(self.caches[0], HEADS, SIZE, self._put)
        self.keeper = PrefixWorker(own, [Rows(one, places) for one in self.caches], self.PAGE, 1 << 30)

    def _put(self, k_THD: Tensor, v_THD: Tensor, cache_BHNC: Tensor, slots_T: Tensor) -> None:
        cache_BHNC[slots_T // self.PAGE, :, slots_T % self.PAGE] = torch.cat([k_THD, v_THD], -1)

    def serve(self, tokens: list[int], rows_2LTHD: Tensor) -> tuple[int, Tensor]:
        request = SimpleNamespace(
            request_id="a", all_token_ids=tokens, prompt_token_ids=tokens, num_preemptions=0, cache_salt=None,
            mm_features=[], prompt_embeds=None, lora_request=None,
        )  # fmt: skip
        text, place = text_of(request), torch.arange(len(tokens))
        pages = torch.randperm(64)[: -(-len(tokens) // self.PAGE)]
        slots = pages[place // self.PAGE] * self.PAGE + place % self.PAGE
        count = self.planner.matched(text, 0)
        self.planner.allocated(text, count)
        self.keeper.begin(self.planner.orders({}, lambda _: pages.tolist()).loads)
        while count and not self.keeper.take_loaded():
            self.keeper.go_on()
        assert not self.keeper.take_failed()
        held = [one[slots // self.PAGE, :, slots % self.PAGE].view(-1, HEADS, 2, SIZE) for one in self.caches]
        loaded = torch.stack(held).movedim(3, 0)[:, :, :count]
        for layer, one in enumerate(self.caches):
            self._put(*rows_2LTHD[:, layer, count:], one, slots[count:])
        for order in self.planner.orders({"a": (count, len(tokens))}, lambda _: pages.tolist()).keeps:
            self.keeper.keep(order)
        self.planner.finished(["a"])
        return count, loaded

    def written(self) -> None:
        self.keeper.close(120)


@cache
def rows(count: int) -> Tensor:
    """Keys after RoPE and values of the embedded model for `ids(count)`."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([ids(count)]) % model.config.vocab_size, **{CACHE: cache})
    return torch.stack([torch.stack([x[0].transpose(0, 1) for x in (one.keys, one.values)]) for one in cache.layers], 1)


def ids(count: int) -> list[int]:
    return list(range(1000, 1000 + count))


def aqua(folder: Path) -> str:
    """An artifact of the model, before RoPE and across layers, with the tensors of a fit drawn at random."""
    config, recipe = served_recipe.config(str(MODEL), None), preset("aqua-2bit")
    print_of = fingerprint.from_config(config, served_recipe._weights(MODEL))
    path = folder / "kvq.safetensors"
    path.write_bytes(
        artifact.to_bytes(Artifact(recipe, print_of, fitted.tensors(recipe, print_of.geometry), {"model": "demo"}, {}))
    )
    return str(path)


def decoded(recipe: str, tokens: list[int], rows_2LTHD: Tensor) -> Tensor:
    """What kvq's own store of these tokens gives, without an engine."""
    given = served_recipe.read(recipe)
    geometry = served_recipe.match(given, served_recipe.config(str(MODEL), None), str(MODEL), None)
    store = PrefixBlocks(
        None, given.recipe, geometry, given.tensors, model="x", rotary=rotary_of_folder(MODEL, torch.bfloat16)
    )
    store.put(tokens, rows_2LTHD[0], rows_2LTHD[1])
    return torch.stack([torch.stack([k, v]) for _, k, v in store.decode(store.load(tokens))], 1).clone()


def files(folder: Path) -> list[Path]:
    """The files of a folder, by the number of their block."""

    def number(path: Path) -> int:
        with safe_open(path, "pt") as opened:
            return json.loads(opened.metadata()["kvq"])["number"]

    return sorted(folder.rglob("*.safetensors"), key=number)
