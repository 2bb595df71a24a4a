"""Counts of the connector, in vLLM's log and among its Prometheus metrics."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTS = {
    "lookups": "requests that were looked up among kept prefixes",
    "hits": "requests of which a prefix was found",
    "loads": "loads of prefixes, summed over workers",
    "loads_failed": "loads that ended early, whose rest was computed",
    "tokens_loaded": "tokens decoded into pages, summed over workers",
    "bytes_loaded": "bytes of encoded blocks that were read",
    "tokens_kept": "tokens whose blocks were encoded and written, summed over workers",
    "bytes_kept": "bytes of encoded blocks that were written",
    "blocks_beyond": "blocks of keys or values kept exact, as their error is beyond what calibration promised",
    "tokens_dropped": "tokens not kept because too much waited to be encoded",
    "blocks_damaged": "blocks that failed a check, and were removed",
    "blocks_unreadable": "blocks that could not be read",
    "blocks_refused": "blocks that could not be encoded or written",
    "seconds_loading": "seconds in which workers decoded",
    "seconds_keeping": "seconds in which workers encoded and wrote",
}


@dataclass
class Stats(KVConnectorStats):
    """Counts since the last report: {name: number}."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        names = {*self.data, *other.data}
        self.data = {name: self.data.get(name, 0) + other.data.get(name, 0) for name in names}
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"kvq {name}": round(self.data[name], 3) for name in COUNTS if self.data.get(name)}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class Metrics(KVConnectorPromMetrics):
    """A Prometheus counter for each count: kvq_prefix_hits_total and so on."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        made = {name: self._counter_cls(f"kvq_prefix_{name}", text, labelnames=labelnames)
                for name, text in COUNTS.items()}  # fmt: skip
        self._counters = {
            engine: {name: counter.labels(*values) for name, counter in made.items()}
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            if name in COUNTS and count:
                self._counters[engine_idx][name].inc(count)
