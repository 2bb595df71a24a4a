"""The model `kvq` of lm-eval: a model of transformers whose every answer is read from a compressed cache.

    lm_eval.simple_evaluate("kvq", {"pretrained": "demo", "recipe": "higgs-2bit"}, tasks=["hellaswag"])

Log-likelihoods arrive in steps through the cache (`evaluate/perplexity.py`); lm-eval's own model takes each text in
one pass without a cache, and gives the same figures whatever the recipe. What is generated is read from the cache from
its second token on; its prompt is one pass, padded on the left where prompts of different lengths share a batch, which
moves where their blocks begin. A task of which no request read anything that was encoded is refused.

Finished batches are kept under KVQ_HOME: a command that was stopped repeats none of them.

`evaluate` has recipes answer tasks so, as `kvq eval --tasks gsm8k,ifeval` does: one record each. The figures are those
of lm-eval's own command line with the model `kvq` (`python -m kvq_calib.lm_eval`): the same prompts, metrics and seeds.
A record is in the form of `evaluate/tasks.py`; a task has lm-eval's metrics by their names ("acc,none",
"exact_match,strict-match"), or the reason why it has no figures.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from kvq_calib.evaluate.caches import attending, encoded_by_layer, in_use
from kvq_calib.evaluate.candidate import Candidate, find
from kvq_calib.evaluate.perplexity import REFERENCE, STEP
from kvq_calib.evaluate.record import load_model, of_candidate, setting
from kvq_calib.evaluate.saved_results import SavedResults, digest_of
from kvq_calib.evaluate.tasks import Continuation, loglikelihoods
from kvq_calib.model import find as models
from kvq_calib.model.files import ModelFiles
from kvq_calib.run.device import usable
from kvq_calib.run.plan import environment
from kvq_runtime.errors import NotFound
from kvq_runtime.hf import KVQCache
from kvq_runtime.hf.model import CACHE
from kvq_runtime.registry.evaluation_records import IN_USE
from kvq_runtime.registry.reference import home

NONE = "none"  # as recipe: the 16-bit model, in the same steps
AT_LENGTH = 4096  # tokens of the cache whose bits a record states
# of lm-eval's own model
OPTIONS = (
    "add_bos_token", "chat_template_args", "enable_thinking", "max_length", "prefix_token_id", "think_end_token",
    "truncation",
)  # fmt: skip


class NotThroughTheCache(RuntimeError):
    """No request of a task read anything that had been encoded: its figures would be the 16-bit model's."""


@register_model("kvq")
class CompressedLM(HFLM):
    """One model with one recipe or artifact.

    through   by task: its requests, how many of them read encoded tokens, and the mean share of encoded tokens
    """

    def __init__(
        self,
        pretrained: str,
        recipe: str | None = None,
        step: int = STEP,
        batch_size: int | str = 1,
        device: str | None = None,
        dtype: str | None = None,
        revision: str | None = None,
        registry: str | None = None,
        *,
        candidate: Candidate | None = None,
        loaded: PreTrainedModel | None = None,
        quiet: bool = False,
        **options: Any,
    ):
        """Load the model, and find the recipe.

        pretrained   as `kvq eval --model`: a name of the catalog, a folder, or a Hub id
        recipe       as `kvq eval` takes it, settings included: higgs-2bit, kivi-2bit+window.recent=0, or an artifact's
                     reference; "none": the 16-bit model, in the same steps
        step         tokens per pass of what is scored
        batch_size   requests side by side
        device       None or cuda: a GPU if there is one, else the CPU; dtype: None: float32 on a CPU, else as stored
        registry     of artifacts; None: $KVQ_REGISTRY, else $KVQ_HOME/registry
        candidate      the candidate that `recipe` names, and `loaded`, the model, if they are at hand
        quiet        no progress bars
        options      OPTIONS, of lm-eval's own model

        Raises ValueError, NotFound and ArtifactError as `kvq eval` does, TypeError for an option that there is not.
        """
        options.pop("max_batch_size", None)  # lm-eval's command line gives it to every model
        if unknown := sorted(set(options) - set(OPTIONS)):
            raise TypeError(f"model_args {', '.join(unknown)}; use recipe, step, registry or {', '.join(OPTIONS)}")
        if recipe is None:
            raise TypeError(f"model_args has no recipe; give recipe=higgs-2bit, say, or recipe={NONE} for the model")
        if not str(batch_size).isdecimal() or int(batch_size) < 1 or step < 1:
            raise ValueError(f"batch_size={batch_size}, step={step}; use whole numbers of at least 1")
        files = models.resolve(pretrained, revision)
        if candidate is None and recipe != NONE:
            candidate = find(recipe, files, registry)
        if loaded is None:
            # lm-eval's command line says cuda:0 where nobody has said anything, whatever there is
            missing = not torch.cuda.is_available() and (device or "cuda").startswith("cuda")
            device = "cpu" if missing else usable(device or "cuda")
            loaded = load_model(files, device, getattr(torch, dtype) if dtype else None)
        super().__init__(loaded, tokenizer=str(files.path), batch_size=int(batch_size), **options)
        self.candidate, self.step, self._quiet = candidate, step, quiet
        self.through: dict[str, dict[str, float]] = {}
        self._shares: list[float] = []
        about = candidate.identity if candidate else REFERENCE
        _, kept = setting(files, str(loaded.device), loaded.dtype, SavedResults(home() / "evaluated"))
        self._saved = kept.within(lm_eval=about)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._by_task(super().loglikelihood, requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        return self._by_task(super().loglikelihood_rolling, requests, disable_tqdm)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        return self._by_task(super().generate_until, requests, disable_tqdm)

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuse lm-eval's store of answers."""
        if cache_hook.dbdict is not None:
            raise ValueError(
                "--use_cache keeps answers by request alone, whatever recipe gave them; leave it out: finished batches "
                "are kept under KVQ_HOME anyway"
            )
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval writes beside its results."""
        name = self.candidate.recipe.name if self.candidate else REFERENCE
        artifact = self.candidate.sha256 if self.candidate else None
        return super().get_model_info() | {
            "kvq": {"recipe": name, "artifact": artifact, "step": self.step, "through_the_cache": self.through}
        }

    def _by_task(self, answer: Callable[..., list[Any]], requests: Sequence[Any], disable_tqdm: bool) -> list[Any]:
        """Answer the requests of each task apart; raise NotThroughTheCache for a task that read nothing encoded."""
        tasks: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            tasks.setdefault(str(request.task_name), []).append(number)
        answers: dict[int, Any] = {}
        for task, numbers in tasks.items():
            shares = self._shares = []
            own = answer([requests[number] for number in numbers], disable_tqdm=disable_tqdm or self._quiet)
            answers |= dict(zip(numbers, own, strict=True))
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
        """Answer (texts, context, continuation), the longest first, equal ones and those that differ in their last
        token alone by one row; noted in the order of the requests."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise ValueError(f"a continuation of {len(continuation)} tokens; the model takes {self.max_length}")
            given = tuple([*context, *continuation][-(self.max_length + 1) :][:-1])
            rows.setdefault(given, []).append(number)
        found: list[Any] = [None] * len(requests)
        hidden = disable_tqdm or self._quiet or "override_bs" in kwargs  # one window of a text
        longest_first = sorted(rows, key=lambda row: (-len(row), row))
        for batch in tqdm(list(_batches(longest_first, self.batch_size)), disable=hidden):
            numbers = [number for row in batch for number in rows[row]]
            places = [place for place, row in enumerate(batch) for _ in rows[row]]
            asked = [
                Continuation(place, tuple(requests[number][2])) for place, number in zip(places, numbers, strict=True)
            ]
            unit = {"rows": batch, "step": self.step, "continuations": [[one.row, one.tokens] for one in asked]}
            kept = self._saved.kept(lambda batch=batch, asked=asked: self._scored(batch, asked), **unit)
            for number, place, answer in zip(numbers, places, kept["answers"], strict=True):
                found[number] = (tuple(answer), kept["shares"][place])
        self._shares += [share for _, share in found]
        return [answer for answer, _ in found]

    def _scored(self, batch: Sequence[Sequence[int]], asked: Sequence[Continuation]) -> dict[str, Any]:
        answers, shares = loglikelihoods(self.model, self._cache(), batch, asked, self.step)
        return {"answers": answers, "shares": shares}

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        raise NotImplementedError("logits without a cache: kvq answers log-likelihoods in steps")

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        """Generate from a batch that is padded on the left, int64 [B, T]; its tokens with what follows them."""
        mask = generation_kwargs["attention_mask"].tolist()
        settings = {name: given for name, given in generation_kwargs.items() if name != "attention_mask"}
        asked = {"context": context.tolist(), "mask": mask, "max_length": max_length, "stop": stop}

        def generated() -> dict[str, Any]:
            cache = self._cache()
            with attending(self.model, cache), torch.inference_mode():
                given = {CACHE: cache, **generation_kwargs}
                tokens = HFLM._model_generate(self, context, max_length, stop, **given)
            # the first token comes of the prompt's own pass, which reads exact keys and values
            read = tokens.shape[1] > context.shape[1] + 1
            return {"tokens": tokens.tolist(), "shares": _encoded_shares(cache, mask) if read else [0.0] * len(mask)}

        sampled = bool(settings.get("do_sample"))
        kept = generated() if sampled else self._saved.kept(generated, **asked, settings=settings)
        self._shares += kept["shares"]
        return torch.tensor(kept["tokens"], device=context.device)


def _encoded_shares(cache: Cache, mask: list[list[int]]) -> list[float]:
    """Return the share of each prompt's tokens that is encoded in every layer.

    mask   1 for tokens, 0 for the padding before them
    """
    if not isinstance(cache, KVQCache):
        return [0.0] * len(mask)
    encoded, dropped = encoded_by_layer(cache)
    end, sinks = min(encoded.values(), default=0) + dropped, cache.blocks.recipe.window.sinks
    return [max(0, sum(row[:end]) - sinks) / sum(row) for row in mask]


def _batches(rows: Sequence[Any], count: int) -> Iterable[Sequence[Any]]:
    return (rows[start : start + count] for start in range(0, len(rows), count))


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
    manager = TaskManager(include_path=include_path)
    for task in asked.tasks:
        _check(manager, task)
    model = load_model(files, device, dtype)
    used = environment(device, str(model.dtype).removeprefix("torch."), torch.get_num_threads())
    about = {"name": "lm-eval", "version": 1, "lm_eval": version("lm_eval"), "protocols": [IN_USE]}
    about |= {"model": files.about, **asdict(asked)}
    records = []
    for candidate in (None, *candidates):
        lm = CompressedLM(str(files.path), NONE, candidate=candidate, loaded=model, quiet=quiet)
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
            found = simple_evaluate(
                lm, tasks=[task], task_manager=manager, limit=asked.limit,
                apply_chat_template=asked.apply_chat_template,
            )  # fmt: skip
    except NotThroughTheCache as error:
        return {task: {"reason": str(error)}}, {}
    assert found is not None, "this is the only process"
    counted = {name: one["effective"] for name, one in found["n-samples"].items()}
    figures = {name: _figures(row, counted.get(name)) for name, row in found["results"].items()}
    prompts = {
        name: digest_of([[one["prompt_hash"], one["target_hash"]] for one in samples])
        for name, samples in found["samples"].items()
    }
    return {name: one for name, one in figures.items() if one["metrics"]}, prompts


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
