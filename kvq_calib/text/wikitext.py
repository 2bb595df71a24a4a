"""Read WikiText-2 as the field measures perplexity on it: the whole test set in order, cut into windows.

    wikitext-2           Salesforce/wikitext of the Hub, wikitext-2-raw-v1, split test
    wikitext-2:FILE      the same from a file: a .parquet of that dataset, or a .txt, line by line

The rows, an empty one for a blank line, are joined by two line ends, tokenized as one text, with what the tokenizer
itself puts at its beginning (BOS, of tokenizers that have one), and cut every L tokens; the rest is left out. Nothing
is chosen by a hash, and nothing is left out for what it shares with other text: these are the windows of published
figures.

Source: the evaluation of Frantar et al., 2022 (GPTQ), which later papers follow.
Differs: perplexity is over the L - 1 tokens of a window that have one before them; some implementations divide by L.
"""

from pathlib import Path

from kvq_calib.text import documents
from kvq_runtime.errors import NotFound

NAME = "wikitext-2"
DATASET = "Salesforce/wikitext:wikitext-2-raw-v1"


def file_of(source: str) -> Path | None:
    """The file of `wikitext-2:FILE`; None for the Hub's."""
    return Path(source[len(NAME) + 1 :]) if source.startswith(f"{NAME}:") else None


def is_named(source: str) -> bool:
    """True if a corpus is the test set."""
    return source == NAME or source.startswith(f"{NAME}:")


def joined(rows: list[str]) -> str:
    """The test set as one text."""
    return "\n\n".join(row if row.strip() else "" for row in rows)


def local(path: Path) -> list[str]:
    """The rows of a file. Raises NotFound, or ValueError for one that is of another kind, or cannot be read."""
    if not path.is_file():
        kind = ValueError if path.exists() else NotFound
        raise kind(f"{NAME}:{path} is not a file; give a .parquet with a column text, or a .txt")
    if path.suffix == ".parquet":
        return documents.parquet(path)
    if path.suffix in (".txt", ".raw"):
        return documents.utf8(path).splitlines(keepends=True)
    raise ValueError(f"{NAME}:{path.name} has no known suffix; give a .parquet with a column text, or a .txt")
