"""Tell how many processor seconds each stage takes of keeping a prefix, or of loading it: for `measure_rest.py`.

Functions of the product are replaced by ones that read their thread's clock, so that what threads do side by side is
added up, and waiting is not counted. What one stage calls of another is the other's. What no stage is, "other", is the
rest of the process's time: of a process that does nothing else meanwhile.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from kvq_runtime.codec import codec
from kvq_runtime.ops import entropy, lossless
from kvq_runtime.prefix import block_file, coder, shelf
from kvq_runtime.stages import latent

STAGES = (  # (where, which function, what it is)
    (codec.Codec, "predicted", "prediction"), (codec.Codec, "unpacked", "prediction"), (latent, "rotate", "transform"),
    (codec.Codec, "_turned_back", "transform"), (coder, "block_input", "transform"),
    (codec.Codec, "encode", "quantize"), (codec.Codec, "decode", "quantize"),
    (entropy, "encode", "coding"), (entropy, "decode", "coding"),
    (lossless, "encode", "coding"), (lossless, "decode", "coding"),
    (block_file, "_content", "sha256"), (shelf.Folder, "put", "files"), (shelf.Folder, "get", "files"),
)  # fmt: skip


@contextmanager
def timed(way: str, elements: int) -> Iterator[dict[str, float]]:
    """Processor seconds of all threads by stage, and MB of 16-bit cache a second of one, when it is left."""
    spent, lock, here = defaultdict[str, float](float), threading.Lock(), threading.local()
    told: dict[str, float] = {}

    def counted(function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def inner(*given: Any, **named: Any) -> Any:
            within: list[float] = here.__dict__.setdefault("within", [])
            within.append(0.0)
            begun = time.thread_time()
            try:
                return function(*given, **named)
            finally:
                took = time.thread_time() - begun
                with lock:
                    spent[stage] += took - within.pop()
                if within:
                    within[-1] += took

        return inner

    with ExitStack() as patches:
        for owner, name, stage in STAGES:
            patches.enter_context(mock.patch.object(owner, name, counted(getattr(owner, name), stage)))
        begun = time.process_time()
        yield told
        whole = time.process_time() - begun
    spent["other"] = whole - sum(spent.values())
    told |= {f"{way}_cpu_{stage}": took for stage, took in spent.items()}
    told[f"{way}_MB_s_core"] = 2 * elements / whole / 1e6
