"""Answer questions greedily, in batches, through compressed caches on a CPU.

What precedes the last token, or a question, is one pass, which reads exact keys and values, and which all recipes begin
with; what follows reads the cache. Blocks are of BLOCK tokens, and no newest token stays exact but those of an
unfinished block.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvq_calib.evaluate.caches import Reads, attending, count_reads, encoded_by_layer, in_use
from kvq_calib.evaluate.candidate import Candidate, find
from kvq_calib.model.files import ModelFiles
from kvq_runtime.hf.model import CACHE, announce_pass

BATCH, BLOCK = 24, 32  # rows, at most; tokens
TAIL, KEPT = 8, 7 / 8  # newest tokens that may hold a stop; rows are dropped when no more than this share go on


@dataclass(frozen=True)
class Task:
    """A task, by name: whether an answer is right, and the question that follows the context; none: it has all."""

    name: str
    right: Callable[[str], bool]
    question: str = ""


@dataclass(frozen=True)
class Sheet:
    """Tasks whose contexts are one pass.

    contexts   a row each: of each task, or one of all
    most       tokens of an answer
    stops      where an answer ends, besides special tokens
    turns      whether a question follows the answers before it, else the context of all
    """

    contexts: list[str]
    tasks: list[Task]
    most: int
    stops: Sequence[str] = ()
    turns: bool = False


@dataclass(frozen=True)
class Prompts:
    """What a pass has read: its cache in the model's precision, its inputs [B, T], and the tokens after it, [B, 1]."""

    cache: DynamicCache
    inputs: dict[str, Tensor]
    last_B1: Tensor

    @staticmethod
    @torch.inference_mode()
    def read(model: Any, tokenizer: Any, texts: Sequence[str]) -> "Prompts":
        """Read all tokens of texts but the last, with padding on the left."""
        whole = dict(tokenizer(list(texts), return_tensors="pt", padding=True, add_special_tokens=False))
        inputs, cache = {name: x[:, :-1] for name, x in whole.items()}, DynamicCache(config=model.config)
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
        model(**inputs, **{CACHE: cache}, logits_to_keep=1)
        return Prompts(cache, inputs, whole["input_ids"][:, -1:])

    def select(self, rows: Sequence[int]) -> "Prompts":
        """Return a copy of these rows."""
        cache, chosen = copy.deepcopy(self.cache), torch.tensor(rows)
        cache.batch_select_indices(chosen)
        return Prompts(cache, {name: x[chosen] for name, x in self.inputs.items()}, self.last_B1[chosen])

    def cached(self, model: Any, candidate: Candidate | None) -> Any:
        """Return a cache that has taken in the pass; None: that of 16 bits."""
        if candidate is None:
            return copy.deepcopy(self.cache)
        cache = in_use(candidate.recipe, model, candidate.tensors)
        announce_pass(model.get_decoder(), (), self.inputs | {CACHE: cache})
        for n, layer in enumerate(self.cache.layers):
            cache.update(layer.keys, layer.values, n)
        return cache


class Answers:
    """Continues texts greedily; `reads` counts what that has read of a KVQCache."""

    def __init__(self, model: Any, tokenizer: Any, sheet: Sheet):
        self.model, self.tokenizer, self.sheet, self.reads = model, tokenizer, sheet, Reads()

    def to(self, prompts: Prompts, candidate: Candidate | None) -> list[list[int]]:
        """Return the tokens of the answer to each task of the sheet; `prompts` has a row of each, or one of all."""
        sheet, whole = self.sheet, prompts.cached(self.model, candidate)
        if not sheet.tasks[0].question:
            return self._continue(whole, prompts.inputs["attention_mask"], prompts.last_B1)
        answers, last = [], [prompts.last_B1]
        for task in sheet.tasks:
            cache = whole if sheet.turns else copy.deepcopy(whole)
            new_1T = self.tokenizer(task.question, return_tensors="pt", add_special_tokens=False).input_ids
            new_1T = torch.cat([*last, new_1T], 1)
            answers += self._continue(cache, new_1T.new_ones(1, cache.get_seq_length()), new_1T)
            last = [] if sheet.turns else last
        return answers

    @torch.inference_mode()
    def _continue(self, cache: Any, mask_BT: Tensor, new_BT: Tensor) -> list[list[int]]:
        """Return what follows `new_BT`, token by token; rows that have ended are dropped, some at a time."""
        rows = list(range(len(new_BT)))
        answers: list[list[int]] = [[] for _ in rows]
        done = [False for _ in rows]
        with attending(self.model, cache):
            while True:
                if hasattr(cache, "blocks"):
                    new = range(cache.get_seq_length(), cache.get_seq_length() + new_BT.shape[1])
                    self.reads.add(count_reads(cache, encoded_by_layer(cache), new) or Reads())
                mask_BT = torch.cat([mask_BT, torch.ones_like(new_BT)], 1)
                positions_BT = mask_BT.cumsum(-1)[:, -new_BT.shape[1] :] - 1
                inputs = {"input_ids": new_BT, "attention_mask": mask_BT, "position_ids": positions_BT, CACHE: cache}
                new_BT = self.model(**inputs, logits_to_keep=1).logits.argmax(-1)
                for row, token in zip(rows, new_BT[:, 0].tolist(), strict=True):
                    if not done[row]:
                        answers[row].append(token)
                        done[row] = len(answers[row]) == self.sheet.most or self._ended(answers[row])
                going = [n for n, row in enumerate(rows) if not done[row]]
                if not going:
                    return answers
                if len(going) <= KEPT * len(rows):
                    kept = torch.tensor(going)
                    cache.batch_select_indices(kept)
                    rows, mask_BT, new_BT = [rows[n] for n in going], mask_BT[kept], new_BT[kept]

    def _ended(self, answer: list[int]) -> bool:
        tail = self.tokenizer.decode(answer[-TAIL:])
        return answer[-1] in self.tokenizer.all_special_ids or any(stop in tail for stop in self.sheet.stops)

    def text(self, answer: list[int]) -> str:
        """Return an answer up to its end."""
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        for stop in self.sheet.stops:
            text = text.partition(stop)[0]
        return text


def through(text: str, files: ModelFiles, registry: str | None = None) -> Candidate:
    """Return a recipe or artifact with short blocks, and no exact tokens but its sinks and those of the newest one."""
    candidate = find(text, files, registry)
    window = replace(candidate.recipe.window, recent=0, block=BLOCK)
    return replace(candidate, recipe=replace(candidate.recipe, window=window).check())


def pack(model: Any) -> None:
    """Let oneDNN keep the weights of linear layers as it reads them: half the time for few rows on a CPU with AVX2."""

    def linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.forward = partial(linear, torch.ops.mkldnn._reorder_linear_weight(module.weight, BATCH), module.bias)
