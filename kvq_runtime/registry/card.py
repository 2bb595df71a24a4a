"""Adapt a version's card (its README.md) to where it is published: tags, results, links, and a snippet that loads it.

A card is Markdown with YAML front matter; huggingface_hub reads and writes that.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from kvq_runtime.registry.evaluation_records import SPOKEN, Record, TasksRecord, task_records, text_records

UNMEASURED = "Not evaluated yet: `kvq eval` does that."  # what a card says until there are results
TASKS = "## Tasks"  # the section of a card that has answers to tasks
_METRICS = {  # {field of an evaluation's result: (the Hub's identifier, title)}
    "perplexity": ("perplexity", "perplexity with the compressed cache"),
    "relative": ("relative_perplexity", "perplexity against 16 bit, relative"),
    "kl": ("kl_divergence", "KL divergence from the 16-bit model, nats"),
    "top1": ("accuracy", "top-1 agreement with the 16-bit model"),
}


def for_repository(text: str, files: Iterable[str], folder: str) -> str:
    """A version's card as the card of its repository.

    files    attachments: links to them become links into `folder`
    Library name and tag kvq are added, which HubRegistry.names() searches for.
    """
    for file in files:
        text = text.replace(f"]({file})", f"]({folder}/{file})")
    card = _parsed(text)
    card.data.library_name = "kvq"
    card.data.tags = list(dict.fromkeys([*(card.data.tags or []), "kvq"]))
    return str(card)


def addressed(text: str, url: str, name: str, version: str | None = None) -> str:
    """The card with a snippet that loads the artifact, or one version of it, from the registry at `url`."""
    reference = (f"{url}/{name}" if url.startswith("hf://") else name) + (f"@{version}" if version else "")
    call = rf'KVQCache\.from_pretrained\("(?:hf://[^/"]+/)?{re.escape(name)}(?:@[^"]*)?"'
    return re.sub(call, f'KVQCache.from_pretrained("{reference}"', text)


def with_results(text: str, name: str, records: Sequence[Record]) -> str:
    """The card with evaluation records: as the Hub's model-index, and as a table in place of UNMEASURED, or at its end
    of answers to tasks that it does not have."""
    results = eval_results(records)
    if not results:
        return text
    card = _parsed(text)
    card.data.model_name, card.data.eval_results = name, results
    whole = str(card).replace(UNMEASURED, _table(results))
    answers = eval_results(task_records(records))
    if not answers or TASKS in whole or UNMEASURED in text:
        return whole
    return f"{whole.rstrip()}\n\n{TASKS}\n\n{_table(answers)}\n"


def _table(results: Sequence[Any]) -> str:
    rows = [f"| {result.dataset_name} | {result.metric_name} | {result.metric_value:.5g} |" for result in results]
    return "\n".join(["| text or task | measure | |", "|---|---|---:|", *rows])


def eval_results(records: Sequence[Record]) -> list[Any]:
    """A huggingface_hub EvalResult for every metric in evaluation records."""
    from huggingface_hub import EvalResult

    results = [result for record in task_records(records) for result in _answers(record, EvalResult)]
    for record in (one for own in text_records(records) for one in (own, *own.elsewhere().values())):
        given = record.protocol
        source = given.text.source[:200]
        args = {"corpus": record.corpus, "model": given.model.id, "length": given.length}
        for protocol, part in record.result.protocols.items():
            about: dict[str, Any] = {"task_type": "text-generation", "dataset_type": _dataset(source)}
            about |= {"dataset_name": source, "dataset_config": source}  # by which the Hub tells texts apart
            about |= {"dataset_split": given.text.split, "metric_args": args | {"protocol": protocol}}
            for field, (kind, title) in _METRICS.items():
                value = getattr(part, field, None)
                if value is not None:
                    name = f"{title}, {SPOKEN[protocol]}"
                    results.append(EvalResult(**about, metric_name=name, metric_type=kind, metric_value=value))
    return results


def _answers(record: TasksRecord, kind: Any) -> list[Any]:
    """An EvalResult for every figure of a record of tasks: a task stands where a data set would."""
    args = {"corpus": record.corpus, "model": record.protocol.model.id, "by": record.protocol.name}
    found = []
    for answer in (one for one in record.answers() if one.value is not None):
        metric, _, chosen = answer.metric.partition(",")
        title = metric if chosen in ("", "none") else f"{metric} ({chosen})"
        found.append(kind(
            task_type="text-generation", dataset_type=answer.task, dataset_name=answer.task,
            metric_type=metric, metric_name=f"{title}, {SPOKEN[answer.protocol]}",
            metric_value=answer.value, metric_args=args | {"texts": answer.texts, "protocol": answer.protocol},
        ))  # fmt: skip
    return found


def _dataset(source: str) -> str:
    """A dataset of the Hub by its id; "text" for a file or an embedded corpus, which has none."""
    found = re.match(r"[\w-][\w.-]*/[\w.-]+", source)
    return found[0] if found else "text"


def _parsed(text: str) -> Any:
    from huggingface_hub import ModelCard

    return ModelCard(text if text.startswith("---\n") else f"---\nlibrary_name: kvq\n---\n{text}")
