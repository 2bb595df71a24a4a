"""Tokenize texts with the tokenizer of a model's folder."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvq_runtime.disk import files

LIMIT = 1 << 27  # bytes of a tokenizer.json


class Encoder:
    """The tokenizer of a model.

    digest     sha256 of its file
    boundary   separator of packed documents: "bos", the tokenizer's own start of a text, or "eos" after each
    size       vocabulary size in the model's config.json; None: not given
    """

    def __init__(self, folder: Path):
        self._tokenizer, self.digest = load(folder)
        if self._tokenizer.get_vocab_size() < 2:
            raise ValueError(f"{folder} has no tokenizer.json with a vocabulary; give the folder of a whole model")
        self.size = _object(folder / "config.json").get("vocab_size")
        starts = self._tokenizer.num_special_tokens_to_add(False) > 0
        self.boundary = "bos" if starts else "eos"
        self._end = [] if starts else [_eos(folder, self._tokenizer)]

    def plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text alone."""
        return [found.ids for found in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def bounded(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text with its separator."""
        return [found.ids + self._end for found in self._tokenizer.encode_batch(list(texts), add_special_tokens=True)]

    def whole(self, text: str) -> list[int]:
        """Return the tokens of a text with the tokenizer's own start and end."""
        return self._tokenizer.encode(text, add_special_tokens=True).ids

    def text(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Decode token ids into text, without special tokens."""
        return self._tokenizer.decode_batch([list(row) for row in rows], skip_special_tokens=True)


def load(folder: Path) -> tuple[Tokenizer, str]:
    """Load a model's tokenizer without truncation and padding; return it with the sha256 of its file."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no tokenizer.json; put the model's tokenizer.json into that folder")
    data = files.read(file.resolve(), LIMIT)
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # what the library raises has no other class
        raise ValueError(f"{file} is no tokenizer: {error}; download the model again") from None
    tokenizer.no_truncation()  # which a training leaves there
    tokenizer.no_padding()
    return tokenizer, hashlib.sha256(data).hexdigest()


def whole(folder: Path) -> Any:
    """Load a model's tokenizer as transformers' own object."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _eos(folder: Path, tokenizer: Tokenizer) -> int:
    """Find the end-of-text token in tokenizer_config.json, else config.json."""
    named = _object(folder / "tokenizer_config.json").get("eos_token")
    named = named.get("content") if isinstance(named, dict) else named
    found = tokenizer.token_to_id(named) if isinstance(named, str) else None
    if found is None:
        found = _object(folder / "config.json").get("eos_token_id")
        found = found[0] if isinstance(found, list) and found else found
    if type(found) is not int:
        raise ValueError(
            f"{folder} names no end-of-text token (eos_token), which separates packed documents; add it to "
            "tokenizer_config.json"
        )
    return found


def _object(path: Path) -> dict[str, Any]:
    return files.json_object(path) if path.is_file() else {}
