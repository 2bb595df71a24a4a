"""Have the Hub's token while something is published, and at no other time: all else is read as its user reads it.

`make flows-up` keeps $HF_TOKEN in a file that its user alone can read, and starts the worker without it. What asks to
write to a registry, or writes, sets it for its length. Private models and artifacts are read with the token of `hf auth
login`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE = "KVQ_HF_TOKEN_FILE"  # names the file; where it is not set, or there is none, nothing is done
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # what huggingface_hub reads


@contextmanager
def publishing() -> Iterator[None]:
    """Set $HF_TOKEN from the file that $KVQ_HF_TOKEN_FILE names, and restore what was there."""
    path = Path(os.environ.get(FILE) or os.devnull)
    token = path.read_text().strip() if path.exists() else ""
    if not token:
        yield
        return
    before = os.environ.get(TOKENS[0])
    os.environ[TOKENS[0]] = token
    try:
        yield
    finally:
        del os.environ[TOKENS[0]]
        if before is not None:
            os.environ[TOKENS[0]] = before
