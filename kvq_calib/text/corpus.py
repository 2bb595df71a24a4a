"""Choose calibration sequences from a corpus: the same ones on every machine, whatever the number of workers.

Documents belong to the held-out part by a hash of their content, so that fit and held-out text share nothing, whatever
the seed. Inside a part they are ranked by sha256(seed, id) and read in that order:

    crop    from each document of at least L tokens one run of L, at an offset from the same hash: from the middle of
            a text, without BOS (AQUA-KV's rule)
    pack    documents after each other, each with the tokenizer's BOS or else followed by EOS, cut every L tokens
    auto    crop if the part has enough long documents, else pack

Besides what `sources` reads, a corpus may be a dataset of the Hub, `org/name[:config][@revision]`, split `train`,
column `text`. Its revision is pinned to a commit before it is read; the dataset is downloaded in full, since a rank
needs every document.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kvq_calib.text import documents as sources
from kvq_calib.text.documents import Documents
from kvq_calib.text.split import Split, mark, part
from kvq_calib.text.tokenizer import Encoder

BATCH = 32  # documents given to the tokenizer at a time

Mode = Literal["auto", "crop", "pack"]
_HUB = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class TooLittle(ValueError):
    """A part of a corpus gives only `found` of the sequences asked for."""

    def __init__(self, message: str, found: int):
        super().__init__(message)
        self.found = found


@dataclass(frozen=True)
class Batch:
    """Sequences of token ids, in rank order.

    tokens_BT     int32
    digest        sha256 of the ids as little-endian int32
    description   how they were chosen: what provenance and evaluation records hold; JSON, without paths
    """

    tokens_BT: Tensor
    digest: str
    description: dict[str, Any]


def select(
    source: str,
    tokenizer: str | Path,
    samples: int,
    seq_len: int,
    seed: int = 0,
    split: Split = "fit",
    mode: Mode = "auto",
) -> Batch:
    """Choose `samples` sequences of `seq_len` tokens from one part of a corpus.

    tokenizer   the folder of the model

    Raises TooLittle, a ValueError, with the number there is, if the part has too little text.
    """
    if samples < 1 or seq_len < 2:
        raise ValueError(f"samples={samples}, seq_len={seq_len}; use at least 1 sequence of at least 2 tokens")
    corpus = load(source)
    chosen = part(corpus, split)
    encoder = Encoder(Path(tokenizer))
    rows = _crop(chosen, encoder, samples, seq_len, seed) if mode != "pack" else []
    used = "crop"
    if len(rows) < samples and mode != "crop":
        rows, used = _pack(chosen, encoder, samples, seq_len, seed), "pack"
    if len(rows) < samples:
        where = corpus.name if split == "all" else f"the {split} part of {corpus.name}"
        raise TooLittle(f"{where} gives {len(rows)} sequences of {seq_len} tokens (mode {used}), not {samples}; ask "
                        "for fewer or shorter ones, or give more text", len(rows))  # fmt: skip
    tokens = np.asarray(rows, dtype="<i4")
    digest = hashlib.sha256(tokens.tobytes()).hexdigest()
    description = {
        "source": corpus.name,
        "corpus_digest": corpus.digest,
        "documents": len(chosen.ids),
        "split": split,
        "mode": used,
        "samples": samples,
        "seq_len": seq_len,
        "seed": seed,
        "boundary": "none" if used == "crop" else encoder.boundary,
        "tokenizer_sha256": encoder.digest,
        "token_digest": digest,
    }
    return Batch(torch.from_numpy(tokens.astype(np.int32)), digest, description)


def pin(source: str) -> str:
    """Write the commit of a Hub dataset into its name; the embedded corpus and files stay as they are."""
    found = _hub(source)
    if found is None or _COMMIT.fullmatch(found["revision"] or ""):
        return source
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(found["repo"], revision=found["revision"]).sha
    except Exception as error:  # whatever the HTTP client, the cause is in the message
        raise RuntimeError(f"could not ask the Hub for {source}: {error}. Give a commit, {found['repo']}@<40 hex "
                           "digits>, or a local file (.txt, .jsonl, .parquet)") from error  # fmt: skip
    config = f":{found['config']}" if found["config"] else ""
    return f"{found['repo']}{config}@{commit}"


def load(source: str) -> Documents:
    """All documents of a corpus."""
    if source == "demo":
        return sources.demo()
    source = pin(source)
    found = _hub(source)
    return sources.local(Path(source)) if found is None else _dataset(source, found)


def _hub(source: str) -> dict[str, Any] | None:
    """The parts of a Hub dataset's name; None for the embedded corpus and for files."""
    found = _HUB.fullmatch(source)
    if found is None or source.endswith(sources.SUFFIXES) or Path(source).exists():
        return None
    return found.groupdict()


def _dataset(source: str, found: dict[str, Any]) -> Documents:
    import datasets

    try:
        rows = datasets.load_dataset(found["repo"], found["config"], revision=found["revision"], split="train")
    except Exception as error:  # a missing config, a script, no network: datasets says which
        raise RuntimeError(
            f"could not load the dataset {source}: {error}. Give another corpus, or a local file"
        ) from error
    if "text" not in rows.column_names:
        raise ValueError(f"{source} has columns {', '.join(rows.column_names)}; documents are in a column 'text'")
    return sources.of(source, rows["text"])


def _ranked(chosen: Documents, seed: int) -> list[int]:
    return sorted(range(len(chosen.ids)), key=lambda place: mark(str(seed), chosen.ids[place]))


def _crop(chosen: Documents, encoder: Encoder, samples: int, seq_len: int, seed: int) -> list[list[int]]:
    rows: list[list[int]] = []
    # a token is at least a byte, but for one that a normalizer may put in front
    long = (place for place in _ranked(chosen, seed) if len(chosen.texts[place].encode()) + 1 >= seq_len)
    for places in _batches(long):
        for place, ids in zip(places, encoder.plain([chosen.texts[p] for p in places]), strict=True):
            if len(ids) >= seq_len and len(rows) < samples:
                start = mark(str(seed), chosen.ids[place], "offset") % (len(ids) - seq_len + 1)
                rows.append(ids[start : start + seq_len])
        if len(rows) == samples:
            break
    return rows


def _pack(chosen: Documents, encoder: Encoder, samples: int, seq_len: int, seed: int) -> list[list[int]]:
    stream: list[int] = []
    for places in _batches(_ranked(chosen, seed)):
        for ids in encoder.bounded([chosen.texts[p] for p in places]):
            stream += ids
        if len(stream) >= samples * seq_len:
            break
    count = min(samples, len(stream) // seq_len)
    return [stream[i * seq_len : (i + 1) * seq_len] for i in range(count)]


def _batches(places: Iterable[int]) -> Iterator[list[int]]:
    remaining = iter(places)
    while batch := list(islice(remaining, BATCH)):
        yield batch
