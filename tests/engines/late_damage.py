"""The connector, with a block that vanishes between the scheduler's check and the worker's load, once."""

from pathlib import Path
from typing import Any

from kvq_runtime.vllm.connector import KVQConnector


class LateDamage(KVQConnector):
    """Removes the third of the files that a load is to read."""

    done = False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._orders.loads and not LateDamage.done:
            files = sorted(Path(self._settings.path).rglob("*.safetensors"), key=lambda file: -file.stat().st_mtime_ns)
            files[2].write_bytes(b"no block at all")
            LateDamage.done = True
        super().start_load_kv(forward_context, **kwargs)
