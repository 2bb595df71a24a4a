"""Choose calibration sequences from a corpus: the same ones on every machine, whatever the number of workers.

A hash of its content puts a document into the fit part or the held-out part, whatever the seed; held-out documents that
repeat the fit part are passed over (`split.py`), and the overlap that is left is measured. Inside a part documents are
ranked by sha256(seed, id):

    crop    from each document of at least L tokens one run of L, at an offset from the same hash, without BOS
            (AQUA-KV's rule)
    pack    documents after each other, each with the tokenizer's BOS or else followed by EOS, cut every L tokens
    auto    crop if the part has enough long documents, else pack

A mixture, `demo + demo-code`, takes as many sequences of each corpus, in turns. A dataset of the Hub is
`org/name[:config][@revision]`, split `train`, column `text`; its revision is pinned to a commit. It is downloaded in
full, since a rank needs every document.

The test set of WikiText-2 is never fitted on: `wikitext-2`, or `wikitext-2:FILE`, a .parquet, or a .txt, line by line.
Its rows, an empty one for a blank line, are joined by two line ends, tokenized as one text, with what the tokenizer
itself puts at its beginning, and cut every L tokens: the windows of published figures.

Texts of other kinds are measured on beside the corpus, their held-out parts: NAME=SOURCE, or an embedded corpus or the
test set by its own name; `none` alone: no such text.

Source: of the test set, the evaluation of Frantar et al., 2022 (GPTQ), which later papers follow.
Differs: perplexity is over the L - 1 tokens of a window that have one before them; some implementations divide by L.
"""

import hashlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kvq_calib.text import documents as sources
from kvq_calib.text.documents import Documents
from kvq_calib.text.split import LIMIT, RUN, Split, Unseen, mark, part
from kvq_calib.text.tokenizer import Encoder
from kvq_runtime.disk import files as disk
from kvq_runtime.errors import counted

BATCH = 32  # documents given to the tokenizer at a time
MIX = " + "  # between the corpora of a mixture
TEST_SET = "wikitext-2"
NONE = "none"  # no text of another kind
LEAST = 2  # windows of a text of another kind: fewer give no standard error

Mode = Literal["auto", "crop", "pack"]
_HUB = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NAMED = re.compile(r"([\w.+-]+)=(.+)")


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

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {"tokens": self.tokens_BT.tolist(), "digest": self.digest, "description": self.description}

    @staticmethod
    def of_json(kept: Mapping[str, Any]) -> "Batch":
        """Read what `to_json` gave."""
        return Batch(torch.tensor(kept["tokens"], dtype=torch.int32), kept["digest"], kept["description"])


def digest_of(tokens_BT: Tensor) -> str:
    """sha256 of token ids, as little-endian int32."""
    return hashlib.sha256(tokens_BT.cpu().numpy().astype("<i4").tobytes()).hexdigest()


def select(
    source: str,
    tokenizer: str | Path,
    samples: int | None,
    seq_len: int,
    seed: int = 0,
    split: Split = "fit",
    mode: Mode = "auto",
    beside: Sequence[str] = (),
) -> Batch:
    """Choose `samples` sequences of `seq_len` tokens from one part of a corpus.

    tokenizer   the folder of the model
    samples     None: as many as there are
    beside      of held-out text: other corpora whose fit parts it must not repeat either

    Raises TooLittle, a ValueError, with the available number, if the part, or that of one corpus of a mixture, has too
    little text.
    """
    wanted = sys.maxsize if samples is None else samples
    if wanted < 1 or seq_len < 2:
        raise ValueError(f"samples={samples}, seq_len={seq_len}; use at least 1 sequence of at least 2 tokens")
    if len(corpora := sources_of(source)) > 1:
        common = (seq_len, seed, split, mode, [*corpora, *beside])
        return _mixed(source, samples, lambda corpus, share: select(corpus, tokenizer, share, *common))
    encoder = Encoder(Path(tokenizer))
    fits = _fits(source, beside) if split == "held-out" else []
    if _is_test_set(source):
        if split == "fit":
            raise ValueError(f"{source} is a test set; fit on another corpus, and measure on it with --also {source}")
        corpus, where, shown = load(source), "", "whole"
        chosen, unseen, used = corpus, Unseen(corpus.texts, fits), "contiguous"
        rows = _cut(encoder.whole(corpus.texts[0]), seq_len)[:wanted]
    else:
        corpus, where, shown = load(source), "" if split == "all" else f"the {split} part of ", split
        chosen = part(corpus, split)
        unseen = Unseen(chosen.texts, fits)
        rows, used = _rows(chosen, unseen, encoder, wanted, seq_len, seed, mode)
    if len(rows) < (samples or 1):
        less = f", {len(unseen.dropped)} documents that repeat the fit part left out," if unseen.dropped else ""
        made = f"{counted(len(rows), 'sequence')} of {counted(seq_len, 'token')} (mode {used}), not {samples or 1}"
        less = f"{where}{corpus.name}{less} gives {made}; ask for fewer or shorter ones, or give more text"
        raise TooLittle(less, len(rows))
    tokens_BT = torch.from_numpy(np.asarray(rows, dtype=np.int32))
    if encoder.size is not None and (most := int(tokens_BT.max())) >= encoder.size:
        raise ValueError(
            f"the tokenizer in {tokenizer} makes token {most}, and the model knows {encoder.size}; they are "
            "not of one model: download it again"
        )
    digest = digest_of(tokens_BT)
    description = {
        "source": corpus.name,
        "corpus_digest": corpus.digest,
        "documents": len(chosen.ids),
        "split": shown,
        "mode": used,
        "samples": len(rows),
        "seq_len": seq_len,
        "seed": seed,
        "boundary": encoder.boundary if used == "pack" else "none",
        "tokenizer_sha256": encoder.digest,
        "token_digest": digest,
    }
    if fits:
        description["overlap"] = _overlap(unseen, encoder, rows)
    return Batch(tokens_BT, digest, description)


def select_fewer(
    source: str, tokenizer: str | Path, samples: int | None, seq_len: int, seed: int, least: int,
    beside: Sequence[str] = (),
) -> Batch:  # fmt: skip
    """`select` of the held-out part: as many sequences as there are, at most `samples`. TooLittle of fewer than
    `least`."""
    try:
        return select(source, tokenizer, samples, seq_len, seed, "held-out", beside=beside)
    except TooLittle as error:
        if error.found < least:
            raise
        return select_fewer(source, tokenizer, error.found, seq_len, seed, least, beside)


def sources_of(source: str) -> list[str]:
    """The corpora of a mixture; of any other corpus, itself. Raises ValueError for a mixture that names one twice."""
    corpora = [source] if os.path.exists(source) else source.split(MIX)  # which no length of a name stops
    if len(set(corpora)) < len(corpora) or not all(corpora):
        raise ValueError(f"corpus {source!r} names one twice, or nothing; give each once, as in demo + demo-code")
    return corpora


def _mixed(source: str, samples: int | None, select_one: Callable[[str, int | None], Batch]) -> Batch:
    """Sequences of each corpus in turns; of a number that does not divide, the first ones have one more."""
    corpora, batches = sources_of(source), []
    for number, corpus in enumerate(corpora):
        share = samples if samples is None else len(range(number, samples, len(corpora)))
        try:
            if share != 0:
                batches.append(select_one(corpus, share))
        except TooLittle as error:
            raise TooLittle(f"of {source}: {error}", error.found * len(corpora)) from None
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


def others(given: Sequence[str]) -> dict[str, str]:
    """Sources of texts of other kinds by name. Raises ValueError for what names none, or two alike."""
    found: dict[str, str] = {}
    if NONE in given and len(given) > 1:
        raise ValueError(f"texts {' '.join(given)}; give {NONE} alone, or leave it out")
    for one in given if list(given) != [NONE] else ():
        named = _NAMED.fullmatch(one)
        name, source = named.groups() if named else (TEST_SET if _is_test_set(one) else one, one)
        if not named and one not in sources.EMBEDDED and not _is_test_set(one):
            known = ", ".join((*sources.EMBEDDED, TEST_SET, NONE))
            raise ValueError(f"text {one!r} has no name; give NAME=SOURCE, or one of {known}")
        if name in found:
            raise ValueError(f"text {name} is given twice; use another name for one of them")
        found[name] = source
    return found


def select_others(
    given: Sequence[str], fitted: str, tokenizer: Path, windows: int | None, seq_len: int, seed: int = 0
) -> dict[str, Batch]:
    """Windows of each text of another kind by name, as many as there are where there are fewer, but `LEAST`.

    fitted   the corpus whose fit part recipes are fitted on
    """
    found = {}
    for name, source in others(given).items():
        try:
            found[name] = select_fewer(source, tokenizer, windows, seq_len, seed, LEAST, beside=[fitted])
        except TooLittle as error:
            raise ValueError(f"text {name}: {error}") from None
    return found


def pin(source: str) -> str:
    """Write the commit of a Hub dataset into its name; the embedded corpus and files stay as they are."""
    corpora = sources_of(source)
    if len(corpora) > 1:
        return MIX.join(map(pin, corpora))
    found = _hub(source)
    if found is None or _COMMIT.fullmatch(found["revision"] or ""):
        return source
    from huggingface_hub import HfApi, constants

    limit = constants.HF_HUB_ETAG_TIMEOUT  # seconds
    try:
        commit = HfApi().dataset_info(found["repo"], revision=found["revision"], timeout=limit).sha
    except Exception as error:  # whatever the HTTP client, the cause is in the message
        said = " ".join(str(error).split()).rstrip(".")
        raise RuntimeError(f"could not ask the Hub for {source}: {said}. Give a commit, {found['repo']}@<40 hex "
                           "digits>, or a local file (.txt, .jsonl, .parquet); demo, Python's documentation, is in "
                           "every installation") from error  # fmt: skip
    config = f":{found['config']}" if found["config"] else ""
    return f"{found['repo']}{config}@{commit}"


def is_remote(source: str) -> bool:
    """True if a corpus is read from the Hub: neither embedded nor a file."""
    if source in sources.EMBEDDED:
        return False
    if len(corpora := sources_of(source)) > 1:
        return any(map(is_remote, corpora))
    return source == TEST_SET or (not _is_test_set(source) and _hub(source) is not None)


def in_files(source: str) -> dict[str, str]:
    """{corpus: sha256} of a corpus, or of those of a mixture, that are files here: what a name does not say of them."""
    paths = {one: one.removeprefix(f"{TEST_SET}:") for one in sources_of(source) if one not in sources.EMBEDDED}
    return {one: disk.digest(Path(path).resolve())[0] for one, path in paths.items() if os.path.isfile(path)}


def load(source: str) -> Documents:
    """All documents of a corpus."""
    if source in sources.EMBEDDED:
        return sources.embedded(source)
    if _is_test_set(source):
        return _test_set(source)
    source = pin(source)
    found = _hub(source)
    return sources.local(Path(source)) if found is None else sources.of(source, _dataset(source, found))


def _is_test_set(source: str) -> bool:
    return source == TEST_SET or source.startswith(f"{TEST_SET}:")


def _test_set(source: str) -> Documents:
    """The test set as one document."""
    if source == TEST_SET:
        name = pin("Salesforce/wikitext:wikitext-2-raw-v1")
        rows = _dataset(name, _hub(name) or {}, "test")
    else:
        path = Path(source[len(TEST_SET) + 1 :])
        name, rows = f"{TEST_SET}:{path.name}", sources.rows(path, TEST_SET)
    return sources.of(name, ["\n\n".join(row if row.strip() else "" for row in rows)])


def _fits(source: str, beside: Sequence[str]) -> list[Documents]:
    """The parts that are fitted on, of a corpus and of others beside it; of a test set there is none."""
    names = [one for name in (source, *beside) for one in sources_of(name)]
    return [part(load(name), "fit") for name in dict.fromkeys(names) if not _is_test_set(name)]


def _hub(source: str) -> dict[str, Any] | None:
    """The parts of a Hub dataset's name; None for the embedded corpus and for files."""
    found = _HUB.fullmatch(source)
    if found is None or source.endswith(sources.SUFFIXES) or Path(source).exists():
        return None
    return found.groupdict()


def _dataset(source: str, found: dict[str, Any], split: str = "train") -> Sequence[str]:
    """The texts of a dataset of the Hub."""
    import datasets

    try:
        rows = datasets.load_dataset(found["repo"], found["config"], revision=found["revision"], split=split)
    except Exception as error:  # a missing config, a script, no network: datasets says which
        said = str(error).rstrip(".")
        raise RuntimeError(
            f"could not load the dataset {source}: {said}. Give another corpus, or a local file"
        ) from error
    if "text" not in rows.column_names:
        raise ValueError(f"{source} has columns {', '.join(rows.column_names)}; documents are in a column 'text'")
    kind = rows.features["text"]
    if getattr(kind, "dtype", None) not in ("string", "large_string", "string_view"):
        raise ValueError(f"{source} has {kind} in its column 'text'; documents are strings")
    return rows["text"]


def _overlap(unseen: Unseen, encoder: Encoder, rows: list[list[int]]) -> dict[str, Any]:
    """Describe held-out text: what was left out, and what the sequences still share with fit parts.

    against             the corpora whose fit parts were looked through
    run_bytes, limit    how long a run is, and the share of runs above which a document is left out
    dropped_documents   of those that were reached in rank order; dropped_tokens: how long they are
    left                of the runs of the sequences, the share that is in the fit parts
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
    chosen: Documents, unseen: Unseen, encoder: Encoder, samples: int, seq_len: int, seed: int, mode: Mode
) -> tuple[list[list[int]], str]:
    """The token ids of sequences, and whether they are cropped or packed."""
    ranked = sorted(range(len(chosen.ids)), key=lambda number: mark(str(seed), chosen.ids[number]))
    rows: list[list[int]] = []
    if mode != "pack":
        # a token is at least a byte, but for one that a normalizer may put in front
        long = unseen.among(number for number in ranked if len(chosen.texts[number].encode()) + 1 >= seq_len)
        while len(rows) < samples and (numbers := list(islice(long, BATCH))):
            for number, ids in zip(numbers, encoder.plain([chosen.texts[n] for n in numbers]), strict=True):
                if len(ids) >= seq_len and len(rows) < samples:
                    start = mark(str(seed), chosen.ids[number], "offset") % (len(ids) - seq_len + 1)
                    rows.append(ids[start : start + seq_len])
    if len(rows) >= samples or mode == "crop":
        return rows, "crop"
    stream: list[int] = []
    left = unseen.among(ranked)
    while len(stream) < samples * seq_len and (numbers := list(islice(left, BATCH))):
        for ids in encoder.bounded([chosen.texts[number] for number in numbers]):
            stream += ids
    return _cut(stream, seq_len)[:samples], "pack"


def _cut(ids: list[int], seq_len: int) -> list[list[int]]:
    return [ids[start : start + seq_len] for start in range(0, len(ids) - seq_len + 1, seq_len)]
