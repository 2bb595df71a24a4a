"""Read where a version left the 16-bit model's greedy text out of records of `kvq eval --protocol decode`.

Records of a registry may be by anybody: what has another form is left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvq_calib.report import decode_table
from kvq_calib.report.captions import where
from kvq_runtime.registry.measured import DECODE

Record = Mapping[str, Any]
_FIGURES = ("reason", "kl", "kl_se", "top1", "trend", "windows", "bins")


def greedy(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the results of each record, as `evaluate/decode.py` writes them, with "about", a sentence on the text."""
    return [found for record in records if (found := _of(record)) is not None]


def _of(record: Record) -> dict[str, Any] | None:
    try:
        if record["protocol"].get("name") != DECODE:
            return None
        part = record["result"]["protocols"][DECODE]
        found = {name: part[name] for name in _FIGURES if name in part}
        decode_table.row(found), decode_table.positions(found)  # what cannot be laid out is left out
        return {"about": f"{where(record)}. {decode_table.about([record])}", **found}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None
