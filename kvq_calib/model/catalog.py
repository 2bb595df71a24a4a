"""List the models that kvq knows by name, with the calibration that suits them.

A revision of None means: whatever commit the Hub's main branch names at the first download. `models.resolve` returns
that commit; a run writes it into its plan and provenance, and from then on asks for it by its hash.
"""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from kvq_runtime.errors import NotFound

# The papers' corpus. Its main branch holds a loading script, which datasets 5 refuses; this is the Hub's own parquet
# conversion of it. That it exists has not been checked against the Hub: if it does not, the error says so, and
# --corpus takes any other source.
REDPAJAMA = "togethercomputer/RedPajama-Data-1T-Sample@refs/convert/parquet"


@dataclass(frozen=True)
class Entry:
    """A model that kvq knows: its place, and the calibration that suits it (the papers' by default).

    hub    its id on the Hub; None: an embedded model
    """

    name: str
    hub: str | None
    revision: str | None = None
    corpus: str = REDPAJAMA
    samples: int = 256
    seq_len: int = 8192


def _entries() -> list[Entry]:
    embedded = [
        Entry("demo", None, corpus="demo", samples=96, seq_len=1024),
    ]
    # real models for small machines, fitted on what every machine has
    small = {
        "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "qwen2.5-coder-0.5b": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "qwen2.5-coder-1.5b": "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    }
    families = {
        "Qwen/Qwen2.5": ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B"),
        "Qwen/Qwen3": ("0.6B", "1.7B", "4B", "8B", "14B", "32B"),
        "meta-llama/Llama-3.1": ("8B", "70B"),
        "meta-llama/Llama-3.2": ("1B", "3B"),
        "mistralai/Mistral": ("7B-v0.3",),  # v0.1 has sliding windows
    }
    hub_ids = [f"{family}-{size}" for family, sizes in families.items() for size in sizes]
    return [
        *embedded,
        *(Entry(name, hub, corpus="demo", samples=24, seq_len=1024) for name, hub in small.items()),
        *(Entry(hub.split("/")[1].lower(), hub) for hub in hub_ids),
    ]


CATALOG: dict[str, Entry] = {entry.name: entry for entry in _entries()}


def entry(name: str) -> Entry:
    """The catalog's entry, or the defaults for a folder or Hub id that it does not list."""
    hub_ids = {known.hub: known for known in CATALOG.values() if known.hub}
    return CATALOG.get(name) or hub_ids.get(name) or Entry(name, None)


def hub_id(name: str) -> str:
    """The id on the Hub that a name means. NotFound for one that means none."""
    known = CATALOG.get(name)
    hub = known.hub if known else name
    if hub is None or not re.fullmatch(r"[\w.-]+/[\w.-]+", hub) or hub.startswith((".", "/")):
        near = [] if name.endswith(".gguf") else difflib.get_close_matches(name, CATALOG, n=3, cutoff=0.5)
        instead = f"did you mean {' or '.join(near)}?" if near else "kvq-calibrate --list-models lists the catalog"
        raise NotFound(f"model {name!r}: no such folder, .gguf file, Hub id (org/name) or catalog name; {instead}")
    return hub


def check(name: str) -> None:
    """Refuse a name that can mean no model, before anything is imported that takes long. Raises NotFound."""
    known = CATALOG.get(name)
    if not Path(name).exists() and (known is None or known.hub is not None):
        hub_id(name)
