"""Have recipes answer lm-eval's tasks through the cache, as `kvq eval --tasks gsm8k,ifeval` does: one record each.

The figures are those of lm-eval's own command line with the model `kvq` (`python -m kvq_calib.lm_eval`): the same
prompts, metrics and seeds. A record is in the form of `evaluate/tasks.py`; a task has lm-eval's metrics by their names
("acc,none", "exact_match,strict-match"), or the reason why it has no figures.
"""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from kvq_calib.evaluate.ledger import digest_of
from kvq_calib.evaluate.perplexity import STEP
from kvq_calib.evaluate.record import load_model, of_subject
from kvq_calib.evaluate.subject import Subject
from kvq_calib.lm_eval.model import NONE, CompressedLM, NotThroughTheCache
from kvq_calib.model.files import ModelFiles
from kvq_calib.run.plan import environment
from kvq_runtime.errors import NotFound
from kvq_runtime.registry.measured import IN_USE

AT_LENGTH = 4096  # tokens of the cache whose bits a record states


@dataclass(frozen=True)
class Asked:
    """The arguments of lm-eval's evaluation.

    limit      examples of each task, the first ones; None: all
    num_fewshot, batch_size, apply_chat_template   as lm-eval takes them
    step       tokens per pass of what is scored
    """

    tasks: tuple[str, ...]
    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int = 1
    apply_chat_template: bool = False
    step: int = STEP


def evaluate(
    files: ModelFiles,
    subjects: Sequence[Subject],
    asked: Asked,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    include_path: str | None = None,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """One record for the 16-bit model, then one per subject.

    include_path   a folder of task files beside lm-eval's own

    Raises NotFound for a task that there is not, RuntimeError for one whose data or packages are not here.
    """
    manager = TaskManager(include_path=include_path)
    for task in asked.tasks:
        _check(manager, task)
    model = load_model(files, device, dtype)
    used = environment(device, str(model.dtype).removeprefix("torch."), torch.get_num_threads())
    about = {"name": "lm-eval", "version": 1, "lm_eval": version("lm_eval"), "protocols": [IN_USE]}
    about |= {"model": files.about, **asdict(asked)}
    records = []
    for subject in (None, *subjects):
        lm = CompressedLM(str(files.path), NONE, asked.step, asked.batch_size, subject=subject, loaded=model,
                          quiet=quiet)  # fmt: skip
        part: dict[str, Any] = {"tasks": {}}
        prompts: dict[str, str] = {}
        for task in asked.tasks:
            found, digest = _answered(lm, manager, task, asked)
            part["tasks"] |= found
            prompts |= digest
        if subject is not None:
            part["through_the_cache"] = lm.through
            part["reference"] = records[0]["result"]["protocols"][IN_USE]["tasks"]
        # prompts do not depend on the recipe, and the 16-bit model, asked first, is never refused
        corpus = records[0]["corpus"] if records else digest_of(prompts)
        records.append(of_subject(files, subject, {IN_USE: part}, AT_LENGTH, corpus, about, used))
    return records


def _answered(lm: CompressedLM, manager: Any, task: str, asked: Asked) -> tuple[dict[str, Any], dict[str, str]]:
    """Figures by task, of a group also those of its parts, and a digest of each part's prompts."""
    try:
        with redirect_stdout(sys.stderr):  # it says there what it computes, where our own output is JSON
            found = simple_evaluate(
                lm, tasks=[task], task_manager=manager, limit=asked.limit, num_fewshot=asked.num_fewshot,
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
    """Load a task once, before the model: what is missing is found before the work."""
    entry = manager.task_index.get(task)
    if entry is None and not task.endswith(".yaml"):
        near = ", ".join([name for name in manager.all_tasks if name.startswith(task[:4])][:5])
        known = f"there are {near}" if near else "`lm-eval ls tasks` lists them"
        raise NotFound(f"task {task} is neither kvq's (docs/measure.md) nor lm-eval's; {known}")
    config = (entry.cfg if entry is not None else None) or {}
    source = " ".join(str(config[key]) for key in ("dataset_path", "dataset_name") if config.get(key))
    try:
        manager.load([task])
    except ModuleNotFoundError as error:
        raise RuntimeError(f"task {task} needs {error.name}: pip install 'lm-eval[{task}]', or {error.name}") from error
    except (OSError, ValueError) as error:  # what datasets raises where a data set is not here
        where = f"the data set {source} of the Hugging Face Hub" if source else "data sets of the Hugging Face Hub"
        why = " ".join(str(error).split())[:300]
        raise RuntimeError(
            f"task {task} asks about {where}, which could not be loaded: {why}. Go online once: then they are in "
            "the cache, or name task files with data of your own: --include-path DIR"
        ) from error
