"""A registry of many names in a moment: events written as files, a few artifacts that all share, made-up records.

The records have the form that `kvq eval` gives them; their figures are invented, and differ from version to version.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import tiny_artifact as tiny

from kvq_runtime.registry.events import ABOUT, Event, Promote, Publish
from kvq_runtime.registry.local import LocalRegistry

MODEL = "my-org/tiny-model"
TEXT = "a" * 64  # what the tiny artifact says that it was fitted to


def record(
    digest: str, kl: float, recipe: str = "tiny", bits: float = 6.0, seed: int = 0, windows: int = 4, **result: Any
) -> dict[str, Any]:
    """A record of perplexity by both protocols."""
    spread = [kl * (0.8 + 0.4 * place / (windows - 1)) for place in range(windows)]

    def figures(share: float) -> dict[str, Any]:
        return {
            "perplexity": 14.0 * (1 + share * kl), "reference_perplexity": 14.0, "relative": share * kl,
            "relative_se": 0.1 * share * kl, "kl": share * kl, "top1": 1 - share * kl, "tokens": windows * 63,
            "decoded": {"attention": 0.99 * share, "reads": 0.99 * share, "unread": 0.0},
            "windows": {"loss": [[100.0, 50]] * windows, "kl": [share * one for one in spread]},
        }  # fmt: skip

    text = {"source": TEXT, "split": "held-out", "seed": seed, "token_digest": f"{seed:064}", "corpus_digest": "c" * 64}
    given = {"recipe": recipe, "protocols": {"full": figures(1.0), "in-use": figures(0.1)}}
    given |= {"bits": {"asymptotic": bits, "at_length": bits + 2, "at_4096": bits + 0.1}, "window": {"block": 8}}
    about = {
        "name": "perplexity", "version": 2, "protocols": ["full", "in-use"], "step": 32, "recent": None,
        "model": {"id": MODEL, "revision": None, "parameters": 4_071_168}, "windows": windows,
        "length": 64, "text": text,
    }  # fmt: skip
    return {"artifact": digest, "corpus": "c" * 64, "protocol": about, "environment": {}, "result": given | result}


def of_parts(digest: str = "a" * 64, **parts: Mapping[str, Any]) -> dict[str, Any]:
    """A record of such parts, by protocol."""
    text = {"source": "book.txt"}
    about = {"model": {"id": MODEL, "parameters": 4_071_168}, "windows": 4, "length": 64, "text": text}
    result = {"recipe": "tiny", "protocols": {name.replace("_", "-"): part for name, part in parts.items()}}
    return {"artifact": digest, "corpus": "c" * 64, "protocol": about, "environment": {}, "result": result}


def registry(root: Path, names: int, versions: int = 2, artifacts: int = 4) -> LocalRegistry:
    """A registry of so many names, each with a version in production; the last version of every tenth drifted."""
    store = LocalRegistry(root)
    digests = []
    for number in range(max(artifacts, versions)):
        data = tiny.data(number)
        digests.append((store.put_blob(data), len(data)))
        store.add_evaluation(record(digests[-1][0], 0.001 * 1.5**number, bits=2 + number), "any")
    drifted, _ = digests[0]
    store.add_evaluation(record(drifted, 0.002, bits=2, seed=202614), "any")
    for number in range(names):
        chosen = [digests[(number + place) % len(digests)] for place in range(versions)]
        write(store, f"model-{number:03}-tiny-2bit", chosen, production=f"1.{versions - 1 - number % 2}.0")
    return store


def write(store: LocalRegistry, name: str, files: Sequence[tuple[str, int]], production: str) -> None:
    """The events of a name as files: a version each of (digest, size), and one promotion."""
    about = dict.fromkeys(ABOUT) | {"recipe": "tiny", "model": MODEL, "corpus": TEXT}
    changes: list[Any] = [Publish(f"1.{n}.0", digest, size, {}, about) for n, (digest, size) in enumerate(files)]
    folder = store.events_folder(name)
    folder.mkdir(parents=True)
    for number, change in enumerate([*changes, Promote("production", production)], 1):
        at = f"2026-{1 + number % 9:02}-01T12:00:00Z"
        (folder / f"{number:08}.json").write_bytes(Event(number, name, at, "me@here", change).to_bytes())


def published(store: LocalRegistry, name: str = "tiny-2bit", files: Mapping[str, bytes] | None = None) -> list[str]:
    """Two versions of a name, both measured, the second with tasks and bounds; returns their digests."""
    digests = []
    for seed, bits in ((0, 2), (1, 3)):
        data = tiny.data(seed, bits=bits)
        digests.append(sha256(data).hexdigest())
        store.publish(name, data, attachments=files)
    first, second = digests
    store.add_evaluation(record(first, 0.04), name)
    verdict = {"bounds": {"kl": 0.01}, "protocol": "full", "failed": ["KL divergence, nats, full encode: 0.02"]}
    store.add_evaluation(record(second, 0.02, gate=verdict), name)
    part = {"tasks": {"needle": {"accuracy": 0.9, "se": 0.04, "texts": 30}}}
    asked = {"name": "tasks", "model": {"id": MODEL, "revision": None, "parameters": 4_071_168}}
    result = {"recipe": "tiny", "protocols": {"in-use": part}}
    store.add_evaluation(record(second, 0.02) | {"protocol": asked, "result": result}, name)
    store.promote(name, "1.0.0")
    return digests
