"""Adapt a version's card (its README.md) to where it is published: tags, results, links, and a snippet that loads it.

A card is Markdown with YAML front matter; huggingface_hub reads and writes that.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from kvq_runtime.registry.evaluation_records import SPOKEN, Record, text_records

UNMEASURED = "Not evaluated yet: `kvq eval` does that."  # what a card says until there are results
_METRICS = {  # {field of an evaluation's result: (the Hub's identifier, title)}
    "perplexity": ("perplexity", "perplexity with the compressed cache"),
    "relative": ("relative_perplexity", "perplexity against 16 bit, relative"),
    "kl": ("kl_divergence", "KL divergence from the 16-bit model, nats"),
    "top1": ("accuracy", "top-1 agreement with the 16-bit model"),
}


def for_repository(text: str, files: Iterable[str], folder: str) -> str:
    """Adapt a version's card to be the card of its repository.

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
    """Return the card with a snippet that loads the artifact, or one version of it, from the registry at `url`."""
    reference = (f"{url}/{name}" if url.startswith("hf://") else name) + (f"@{version}" if version else "")
    call = rf'KVQCache\.from_pretrained\("(?:hf://[^/"]+/)?{re.escape(name)}(?:@[^"]*)?"'
    return re.sub(call, f'KVQCache.from_pretrained("{reference}"', text)


def with_results(text: str, name: str, records: Sequence[Record]) -> str:
    """Return the card with evaluation records: as the Hub's model-index, and as a table in place of UNMEASURED."""
    results = eval_results(records)
    if not results:
        return text
    card = _parsed(text)
    card.data.model_name, card.data.eval_results = name, results
    return str(card).replace(UNMEASURED, _table(results))


def _table(results: Sequence[Any]) -> str:
    rows = [f"| {result.dataset_name} | {result.metric_name} | {result.metric_value:.5g} |" for result in results]
    return "\n".join(["| text | measure | |", "|---|---|---:|", *rows])


def eval_results(records: Sequence[Record]) -> list[Any]:
    """Return a huggingface_hub EvalResult for every metric of predicted text."""
    from huggingface_hub import EvalResult

    results = []
    for record in text_records(records):
        about = record.protocol
        source = about.text.source[:200]
        args = {"corpus": record.corpus, "model": about.model.id, "length": about.length}
        for protocol, part in record.result.protocols.items():
            fields: dict[str, Any] = {"task_type": "text-generation", "dataset_type": _dataset(source)}
            fields |= {"dataset_name": source, "dataset_config": source}  # by which the Hub distinguishes texts
            fields |= {"dataset_split": about.text.split, "metric_args": args | {"protocol": protocol}}
            for field, (kind, title) in _METRICS.items():
                value = getattr(part, field, None)
                if value is not None:
                    name = f"{title}, {SPOKEN[protocol]}"
                    results.append(EvalResult(**fields, metric_name=name, metric_type=kind, metric_value=value))
    return results


def _dataset(source: str) -> str:
    """Return the id of a dataset of the Hub; "text" for a file or an embedded corpus, which has none."""
    match = re.match(r"[\w-][\w.-]*/[\w.-]+", source)
    return match[0] if match else "text"


def _parsed(text: str) -> Any:
    from huggingface_hub import ModelCard

    return ModelCard(text if text.startswith("---\n") else f"---\nlibrary_name: kvq\n---\n{text}")
