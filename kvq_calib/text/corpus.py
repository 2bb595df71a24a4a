"""Choose calibration sequences from a corpus: the same ones on every machine, whatever the number of workers.

A hash of its content puts a document into the fit part or the held-out part, whatever the seed. Held-out documents that
repeat the fit part are passed over (`split.py`), and the overlap that is left is measured. Inside a part documents are
ranked by sha256(seed, id):

    crop    from each document of at least L tokens one run of L, at an offset from the same hash, without BOS
            (AQUA-KV's rule); if the part has enough such documents, else
    pack    documents after each other, each with the tokenizer's BOS or else followed by EOS, cut every L tokens

A mixture, `demo + demo-code`, takes as many sequences of each corpus, in turns. A dataset of the Hub is
`org/name[:config][@revision]`, split `train`, column `text`; its revision is pinned to a commit. It is downloaded in
full, since a rank needs every document.

The test set of WikiText-2, `wikitext-2`, is never fitted on. Its rows, an empty one for a blank line, are joined by two
line ends, tokenized as one text, with the tokens that the tokenizer itself begins a text with, and cut every L tokens:
the windows of published figures.

Source: of the test set, the evaluation of Frantar et al., 2022 (GPTQ), which later papers follow.
Differs: perplexity is over the L - 1 tokens of a window that have one before them; some implementations divide by L.
"""

import hashlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvq_calib.text import documents as sources
from kvq_calib.text.documents import Documents
from kvq_calib.text.split import LIMIT, RUN, Split, Unseen, mark, part
from kvq_calib.text.tokenizer import Encoder
from kvq_runtime.disk import files as disk
from kvq_runtime.errors import NotFound, counted
from kvq_runtime.registry.hub_client import disable_telemetry

BATCH = 32  # documents given to the tokenizer at a time
MIX = " + "  # between the corpora of a mixture
TEST_SET = "wikitext-2"

_HUB = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class TooLittle(ValueError):
    """A part of a corpus gives only `available` of the requested sequences."""

    def __init__(self, message: str, available: int):
        super().__init__(message)
        self.available = available


@dataclass(frozen=True)
class Batch:
    """Sequences of token ids, in rank order.

    tokens_BT     int32
    digest        sha256 of the ids as little-endian int32
    description   the choice, as provenance and evaluation records hold it: JSON, without paths
    """

    tokens_BT: Tensor
    digest: str
    description: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the whole batch as JSON."""
        return {"tokens": self.tokens_BT.tolist(), "digest": self.digest, "description": self.description}

    def first(self, count: int) -> "Batch":
        """Return the first `count` sequences."""
        if count == len(self.tokens_BT):
            return self
        digest = digest_of(self.tokens_BT[:count])
        return Batch(self.tokens_BT[:count], digest, self.description | {"samples": count, "token_digest": digest})

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> "Batch":
        """Read the output of `to_json`."""
        return Batch(torch.tensor(saved["tokens"], dtype=torch.int32), saved["digest"], saved["description"])


def digest_of(tokens_BT: Tensor) -> str:
    """Return the sha256 of token ids, as little-endian int32."""
    return hashlib.sha256(tokens_BT.cpu().numpy().astype("<i4").tobytes()).hexdigest()


@dataclass(frozen=True)
class _Choice:
    """The settings of `select`."""

    tokenizer: Path
    seq_len: int
    seed: int
    split: Split


def select(
    source: str, tokenizer: str | Path, samples: int | None, seq_len: int, seed: int = 0, split: Split = "fit"
) -> Batch:
    """Choose `samples` sequences of `seq_len` tokens from one part of a corpus.

    tokenizer   the folder of the model
    samples     None: all

    Raises TooLittle, a ValueError, with the available number, if the part, or that of one corpus of a mixture, has too
    little text.
    """
    if (samples is not None and samples < 1) or seq_len < 2:
        raise ValueError(f"samples={samples}, seq_len={seq_len}; use at least 1 sequence of at least 2 tokens")
    choice = _Choice(Path(tokenizer), seq_len, seed, split)
    corpora = sources_of(source)
    return _of_mixture(source, samples, choice) if len(corpora) > 1 else _of_corpus(source, samples, choice, corpora)


def select_at_most(
    source: str, tokenizer: str | Path, samples: int, seq_len: int, seed: int = 0, least: int = 1
) -> Batch:
    """Choose up to `samples` held-out sequences. Raises TooLittle for fewer than `least`."""
    try:
        return select(source, tokenizer, samples, seq_len, seed, "held-out")
    except TooLittle as error:
        if error.available < least:
            raise
        return select_at_most(source, tokenizer, error.available, seq_len, seed, least)


def _of_corpus(source: str, samples: int | None, choice: _Choice, corpora: Sequence[str]) -> Batch:
    """Choose from one corpus of the mixture `corpora`; held-out text repeats the fit part of none of them."""
    wanted, encoder, seq_len = samples or sys.maxsize, Encoder(choice.tokenizer), choice.seq_len
    fits = _fit_parts(corpora) if choice.split == "held-out" else []
    corpus = load(source)
    if source == TEST_SET:
        if choice.split == "fit":
            raise ValueError(f"{source} is a test set; fit on another corpus, and use kvq eval --corpus {source}")
        chosen, unseen, mode, where, split = corpus, Unseen(corpus.texts, fits), "contiguous", "", "whole"
        rows = _cut(encoder.whole(corpus.texts[0]), seq_len)[:wanted]
    else:
        chosen, where, split = part(corpus, choice.split), f"the {choice.split} part of ", choice.split
        unseen = Unseen(chosen.texts, fits)
        rows, mode = _rows(chosen, unseen, encoder, wanted, seq_len, choice.seed)
    if len(rows) < (samples or 1):
        less = f", {len(unseen.dropped)} documents that repeat the fit part left out," if unseen.dropped else ""
        made = f"{counted(len(rows), 'sequence')} of {counted(seq_len, 'token')} (mode {mode}), not {samples or 1}"
        less = f"{where}{corpus.name}{less} gives {made}; ask for fewer or shorter ones, or give more text"
        raise TooLittle(less, len(rows))
    tokens_BT = torch.from_numpy(np.asarray(rows, dtype=np.int32))
    if encoder.size is not None and (largest := int(tokens_BT.max())) >= encoder.size:
        raise ValueError(
            f"the tokenizer in {choice.tokenizer} makes token {largest}, and the model has {encoder.size}; they are "
            "not of one model: download it again"
        )
    digest = digest_of(tokens_BT)
    description = {
        "source": corpus.name,
        "corpus_digest": corpus.digest,
        "documents": len(chosen.ids),
        "split": split,
        "mode": mode,
        "samples": len(rows),
        "seq_len": seq_len,
        "seed": choice.seed,
        "boundary": encoder.boundary if mode == "pack" else "none",
        "tokenizer_sha256": encoder.digest,
        "token_digest": digest,
    }
    if fits:
        description["overlap"] = _overlap(unseen, encoder, rows)
    return Batch(tokens_BT, digest, description)


def sources_of(source: str) -> list[str]:
    """Split a mixture into its corpora. Raises ValueError for a mixture that names one twice."""
    corpora = [source] if os.path.exists(source) else source.split(MIX)  # os: names of any length
    if len(set(corpora)) < len(corpora) or not all(corpora):
        raise ValueError(f"corpus {source!r} names one twice, or nothing; give each once, as in demo + demo-code")
    return corpora


def _of_mixture(source: str, samples: int | None, choice: _Choice) -> Batch:
    """Choose sequences of each corpus in turns; of a number that does not divide, the first ones give one more."""
    corpora, batches = sources_of(source), []
    for number, corpus in enumerate(corpora):
        share = samples if samples is None else len(range(number, samples, len(corpora)))
        try:
            if share != 0:
                batches.append(_of_corpus(corpus, share, choice, corpora))
        except TooLittle as error:
            raise TooLittle(f"of {source}: {error}", error.available * len(corpora)) from None
    turns = zip_longest(*(batch.tokens_BT for batch in batches))
    tokens_BT = torch.stack([row for turn in turns for row in turn if row is not None])
    parts = [batch.description for batch in batches]
    digest = digest_of(tokens_BT)
    description = parts[0] | {
        "source": MIX.join(part["source"] for part in parts),
        "corpus_digest": hashlib.sha256("".join(part["corpus_digest"] for part in parts).encode()).hexdigest(),
        "documents": sum(part["documents"] for part in parts),
        "mode": MIX.join(dict.fromkeys(part["mode"] for part in parts)),
        "boundary": MIX.join(dict.fromkeys(part["boundary"] for part in parts)),
        "samples": len(tokens_BT),
        "token_digest": digest,
    }
    if "overlap" in parts[0]:
        overlaps = [part["overlap"] for part in parts]
        left = sum(part["overlap"]["left"] * part["samples"] for part in parts) / len(tokens_BT)
        totals = {name: sum(one[name] for one in overlaps) for name in ("dropped_documents", "dropped_tokens")}
        description["overlap"] = overlaps[0] | totals | {"left": left}
    return Batch(tokens_BT, digest, description)


def pin(source: str) -> str:
    """Write the commit of a Hub dataset into its name; return other names as they are."""
    corpora = sources_of(source)
    if len(corpora) > 1:
        return MIX.join(map(pin, corpora))
    name = _hub_name(source)
    if name is None or _COMMIT.fullmatch(name["revision"] or ""):
        return source
    from huggingface_hub import HfApi, constants

    disable_telemetry()
    limit = constants.HF_HUB_ETAG_TIMEOUT  # seconds
    try:
        commit = HfApi().dataset_info(name["repo"], revision=name["revision"], timeout=limit).sha
    except Exception as error:  # whatever the HTTP client, the cause is in the message
        reason = " ".join(str(error).split()).rstrip(".")
        raise RuntimeError(f"could not ask the Hub for {source}: {reason}. Give a commit, {name['repo']}@<40 hex "
                           "digits>, or a local file (.txt, .jsonl, .parquet); demo, Python's documentation, is in "
                           "every installation") from error  # fmt: skip
    config = f":{name['config']}" if name["config"] else ""
    return f"{name['repo']}{config}@{commit}"


def is_remote(source: str) -> bool:
    """Return whether any part of a corpus is read from the Hub."""
    return any(one == TEST_SET or _hub_name(one) is not None for one in sources_of(source))


def check(source: str) -> None:
    """Raise NotFound if a part of a corpus is no embedded text, no file and no name of a Hub dataset."""
    for one in sources_of(source):
        if one not in (*sources.EMBEDDED, TEST_SET) and _hub_name(one) is None and not os.path.exists(one):
            raise NotFound(f"corpus {one}: no such file; use {', '.join(sources.EMBEDDED)}, a file or a Hub dataset")


def file_digests(source: str) -> dict[str, str]:
    """Return {corpus: sha256} of the corpora that are local files, whose content their name does not determine."""
    return {one: disk.digest(Path(one).resolve())[0] for one in sources_of(source) if os.path.isfile(one)}


def load(source: str) -> Documents:
    """Load all documents of a corpus."""
    if source in sources.EMBEDDED:
        return sources.embedded(source)
    if source == TEST_SET:
        name = pin("Salesforce/wikitext:wikitext-2-raw-v1")
        rows = _dataset(name, _hub_name(name) or {}, "test")
        return sources.of(name, ["\n\n".join(row if row.strip() else "" for row in rows)])
    source = pin(source)
    name = _hub_name(source)
    return sources.local(Path(source)) if name is None else sources.of(source, _dataset(source, name))


def _fit_parts(corpora: Sequence[str]) -> list[Documents]:
    """Load the fit part of each corpus; a test set has none."""
    return [part(load(name), "fit") for name in corpora if name != TEST_SET]


def _hub_name(source: str) -> dict[str, Any] | None:
    """Split the name of a Hub dataset; return None for an embedded corpus or a file."""
    match = _HUB.fullmatch(source)
    if match is None or source.endswith(sources.SUFFIXES) or Path(source).exists():
        return None
    return match.groupdict()


def _dataset(source: str, name: dict[str, Any], split: str = "train") -> Sequence[str]:
    """Load the texts of a Hub dataset."""
    import datasets

    disable_telemetry()
    try:
        rows = datasets.load_dataset(name["repo"], name["config"], revision=name["revision"], split=split)
    except Exception as error:  # a missing config, a script, no network: datasets says which
        reason = str(error).rstrip(".")
        raise RuntimeError(
            f"could not load the dataset {source}: {reason}. Give another corpus, or a local file"
        ) from error
    if "text" not in rows.column_names:
        raise ValueError(f"{source} has columns {', '.join(rows.column_names)}; documents are in a column 'text'")
    kind = rows.features["text"]
    if getattr(kind, "dtype", None) not in ("string", "large_string", "string_view"):
        raise ValueError(f"{source} has {kind} in its column 'text'; documents are strings")
    return rows["text"]


def _overlap(unseen: Unseen, encoder: Encoder, rows: list[list[int]]) -> dict[str, Any]:
    """Describe what held-out text shares with fit parts.

    against             the corpora of the fit parts
    run_bytes, limit    length of a run, and the share of runs above which a document is dropped
    dropped_documents   documents dropped in rank order; dropped_tokens: their length
    left                share of the sequences' runs that the fit parts contain
    """
    return {
        "against": [fit.name for fit in unseen.fits],
        "run_bytes": RUN,
        "limit": LIMIT,
        "dropped_documents": len(unseen.dropped),
        "dropped_tokens": sum(map(len, encoder.plain([unseen.texts[place] for place in unseen.dropped]))),
        "left": unseen.left(encoder.text(rows)),
    }


def _rows(
    chosen: Documents, unseen: Unseen, encoder: Encoder, samples: int, seq_len: int, seed: int
) -> tuple[list[list[int]], str]:
    """Return the token ids of sequences, and "crop" or "pack"."""
    ranked = sorted(range(len(chosen.ids)), key=lambda number: mark(str(seed), chosen.ids[number]))
    rows: list[list[int]] = []
    # a token is at least a byte, but for one that a normalizer may put in front
    long = unseen.among(number for number in ranked if len(chosen.texts[number].encode()) + 1 >= seq_len)
    while len(rows) < samples and (numbers := list(islice(long, BATCH))):
        for number, ids in zip(numbers, encoder.plain([chosen.texts[n] for n in numbers]), strict=True):
            if len(ids) >= seq_len and len(rows) < samples:
                start = mark(str(seed), chosen.ids[number], "offset") % (len(ids) - seq_len + 1)
                rows.append(ids[start : start + seq_len])
    if len(rows) >= samples:
        return rows, "crop"
    stream: list[int] = []
    left = unseen.among(ranked)
    while len(stream) < samples * seq_len and (numbers := list(islice(left, BATCH))):
        for ids in encoder.bounded([chosen.texts[number] for number in numbers]):
            stream += ids
    return _cut(stream, seq_len)[:samples], "pack"


def _cut(ids: list[int], seq_len: int) -> list[list[int]]:
    return [ids[start : start + seq_len] for start in range(0, len(ids) - seq_len + 1, seq_len)]
