"""Answer lm-eval's tasks from a compressed cache, as `kvq eval --tasks gsm8k,ifeval` does.

Log-likelihoods arrive in steps through the cache (`evaluate/tasks.py`); lm-eval's own model takes each text in one pass
without a cache, and gives the same figures whatever the recipe. Generated text reads the cache from its second token
on; its prompt is one pass. A task of which no request read anything encoded has no figures.

Finished requests are kept under KVQ_HOME: a command that was stopped repeats none of them. A record is in the form of
`evaluate/tasks.py`; a task has lm-eval's metrics by their names ("acc,none", "exact_match,strict-match"), or the reason
why it has no figures.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from kvq_calib.evaluate.caches import attending, encoded_share, in_use
from kvq_calib.evaluate.candidate import Candidate
from kvq_calib.evaluate.perplexity import REFERENCE, STEP
from kvq_calib.evaluate.record import load_model, of_candidate, setting
from kvq_calib.evaluate.saved_results import SavedResults, digest_of
from kvq_calib.evaluate.tasks import Continuation, loglikelihoods
from kvq_calib.model.files import ModelFiles
from kvq_calib.run.plan import environment
from kvq_runtime.errors import NotFound
from kvq_runtime.hf import KVQCache
from kvq_runtime.hf.model import CACHE
from kvq_runtime.registry.evaluation_records import IN_USE
from kvq_runtime.registry.hub_client import disable_telemetry
from kvq_runtime.registry.reference import home

AT_LENGTH = 4096  # tokens of the cache whose bits a record states


class NotThroughTheCache(RuntimeError):
    """No request of a task read anything that had been encoded: its figures would be the 16-bit model's."""


class CompressedLM(HFLM):
    """A model that answers one request at a time through a cache with one recipe or artifact.

    candidate   None: the 16-bit model, in the same steps
    through     by task: its requests, how many of them read encoded tokens, and the mean share of encoded tokens
    """

    def __init__(
        self, files: ModelFiles, model: PreTrainedModel, candidate: Candidate | None = None, quiet: bool = False
    ):
        super().__init__(model, tokenizer=str(files.path))
        self.candidate, self._quiet = candidate, quiet
        self.through: dict[str, dict[str, float]] = {}
        self._shares: list[float] = []
        _, saved = setting(files, str(model.device), model.dtype, SavedResults(home() / "evaluated"))
        self._saved = saved.within(lm_eval=candidate.identity if candidate else REFERENCE)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._by_task(super().loglikelihood, requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        return self._by_task(super().loglikelihood_rolling, requests, disable_tqdm)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        return self._by_task(super().generate_until, requests, disable_tqdm)

    def _by_task(self, answer: Callable[..., list[Any]], requests: Sequence[Any], disable_tqdm: bool) -> list[Any]:
        """Answer the requests of each task apart; raise NotThroughTheCache for a task that read nothing encoded."""
        tasks: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            tasks.setdefault(str(request.task_name), []).append(number)
        answers: dict[int, Any] = {}
        for task, numbers in tasks.items():
            shares = self._shares = []
            given = answer([requests[number] for number in numbers], disable_tqdm=disable_tqdm or self._quiet)
            answers |= dict(zip(numbers, given, strict=True))
            if self.candidate is not None and not any(shares):
                window = self.candidate.recipe.window
                raise NotThroughTheCache(
                    f"{task}: nothing was encoded that any of its {len(shares)} requests read, so that the figures "
                    f"would be the 16-bit model's: {window.recent} recent tokens and a block of {window.block} stay "
                    "exact; use longer prompts, or a recipe+window.recent=0"
                )
            if self.candidate is not None:
                counts = {"requests": len(shares), "read_encoded": sum(share > 0 for share in shares)}
                self.through[task] = {**counts, "decoded": sum(shares) / len(shares)}
        return [answers[number] for number in range(len(requests))]

    def _cache(self) -> Cache:
        if self.candidate is None:
            return DynamicCache(config=self.model.config)
        return in_use(self.candidate.recipe, self.model, self.candidate.tensors)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Answer (texts, context, continuation), the longest first; one pass serves requests that differ in their last
        token alone."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise ValueError(f"a continuation of {len(continuation)} tokens; the model takes {self.max_length}")
            row = tuple([*context, *continuation][-(self.max_length + 1) :][:-1])
            rows.setdefault(row, []).append(number)
        answers: list[Any] = [None] * len(requests)
        hidden = disable_tqdm or self._quiet or "override_bs" in kwargs  # one window of a text
        for row in tqdm(sorted(rows, key=lambda row: (-len(row), row)), disable=hidden):
            continuations = [tuple(requests[number][2]) for number in rows[row]]
            unit = {"row": row, "step": STEP, "continuations": continuations}
            kept = self._saved.kept(partial(self._scored, row, continuations), **unit)
            for number, (loss, greedy) in zip(rows[row], kept["answers"], strict=True):
                answers[number] = loss, greedy
            self._shares += [kept["share"]] * len(continuations)
        return answers

    def _scored(self, row: Sequence[int], continuations: Sequence[Continuation]) -> dict[str, Any]:
        answers, share = loglikelihoods(self.model, self._cache(), row, continuations, STEP)
        return {"answers": answers, "share": share}

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        raise NotImplementedError("logits without a cache: kvq answers log-likelihoods in steps")

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        """Generate from a prompt, int64 [1, T]; return its tokens with what follows them."""
        settings = {name: value for name, value in generation_kwargs.items() if name != "attention_mask"}
        unit = {"context": context.tolist(), "max_length": max_length, "stop": stop, "settings": settings}

        def generated() -> dict[str, Any]:
            cache = self._cache()
            with attending(self.model, cache), torch.inference_mode():
                tokens = HFLM._model_generate(self, context, max_length, stop, **{CACHE: cache, **generation_kwargs})
            # the first token comes of the prompt's own pass, which reads exact keys and values
            read = tokens.shape[1] > context.shape[1] + 1
            share = encoded_share(cache) if read and isinstance(cache, KVQCache) else 0.0
            return {"tokens": tokens.tolist(), "share": share}

        kept = generated() if settings.get("do_sample") else self._saved.kept(generated, **unit)
        self._shares.append(kept["share"])
        return torch.tensor(kept["tokens"], device=context.device)


# ---- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """The arguments of lm-eval's evaluation; limit: examples of each task, the first ones, None: all."""

    tasks: tuple[str, ...]
    limit: int | None = None
    apply_chat_template: bool = False


def evaluate(
    files: ModelFiles,
    candidates: Sequence[Candidate],
    asked: Asked,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    include_path: str | None = None,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Return one record for the 16-bit model, then one per candidate.

    include_path   a folder of task files beside lm-eval's own

    Raises NotFound for an unknown task, RuntimeError for a task whose data or packages are missing.
    """
    disable_telemetry()
    manager = TaskManager(include_path=include_path)
    for task in asked.tasks:
        _check(manager, task)
    model = load_model(files, device, dtype)
    used = environment(device, str(model.dtype).removeprefix("torch."), torch.get_num_threads())
    about = {"name": "lm-eval", "version": 1, "lm_eval": version("lm_eval"), "protocols": [IN_USE]}
    about |= {"model": files.about, **asdict(asked)}
    records = []
    for candidate in (None, *candidates):
        lm = CompressedLM(files, model, candidate, quiet)
        part: dict[str, Any] = {"tasks": {}}
        prompts: dict[str, str] = {}
        for task in asked.tasks:
            figures, digests = _answered(lm, manager, task, asked)
            part["tasks"] |= figures
            prompts |= digests
        if candidate is not None:
            part["through_the_cache"] = lm.through
            part["reference"] = records[0]["result"]["protocols"][IN_USE]["tasks"]
        # prompts do not depend on the recipe, and the 16-bit model, asked first, is never refused
        corpus = records[0]["corpus"] if records else digest_of(prompts)
        records.append(of_candidate(files, candidate, {IN_USE: part}, AT_LENGTH, corpus, about, used))
    return records


def _answered(lm: CompressedLM, manager: Any, task: str, asked: Asked) -> tuple[dict[str, Any], dict[str, str]]:
    """Figures by task, of a group also those of its parts, and a digest of each part's prompts."""
    try:
        with redirect_stdout(sys.stderr):  # it says there what it computes, where our own output is JSON
            results = simple_evaluate(
                lm, tasks=[task], task_manager=manager, limit=asked.limit,
                apply_chat_template=asked.apply_chat_template,
            )  # fmt: skip
    except NotThroughTheCache as error:
        return {task: {"reason": str(error)}}, {}
    assert results is not None, "this is the only process"
    counts = {name: samples["effective"] for name, samples in results["n-samples"].items()}
    figures = {name: _figures(row, counts.get(name)) for name, row in results["results"].items()}
    prompts = {
        name: digest_of([[sample["prompt_hash"], sample["target_hash"]] for sample in samples])
        for name, samples in results["samples"].items()
    }
    return {name: task for name, task in figures.items() if task["metrics"]}, prompts


def _figures(row: dict[str, Any], texts: int | None) -> dict[str, Any]:
    """{"metrics": {"acc,none": {"value", "se"}}, "texts"} of a row of lm-eval's results."""
    metrics = {}
    for name, value in row.items():
        metric, _, chosen = name.partition(",")
        if not chosen or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        spread = row.get(f"{metric}_stderr,{chosen}")
        metrics[name] = {"value": float(value), "se": float(spread) if isinstance(spread, int | float) else None}
    return {"metrics": metrics} | ({} if texts is None else {"texts": texts})


def _check(manager: Any, task: str) -> None:
    """Load a task once, before the model: missing data are found before the work."""
    if task not in manager.task_index and not task.endswith(".yaml"):
        near = ", ".join([name for name in manager.all_tasks if name.startswith(task[:4])][:5])
        known = f"there are {near}" if near else "`lm-eval ls tasks` lists them"
        raise NotFound(f"task {task} is neither kvq's (docs/measure.md) nor lm-eval's; {known}")
    try:
        manager.load([task])
    except (ImportError, OSError, ValueError) as error:  # of packages, and of datasets without a data set
        why = " ".join(str(error).split())[:300]
        raise RuntimeError(f"task {task}: {why}. Install the missing package, or go online once for data") from error
