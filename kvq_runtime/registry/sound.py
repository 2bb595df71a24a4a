"""Check that evaluation records have the form of kvq's own: whoever may write to a registry may add one.

What is stated here may be left out of a record unless `needs` names it, and must be of its form where it is there;
anything else may stand beside it. Everyone who reads a field reads it of sound records alone.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvq_runtime.registry import measured

Form = Callable[[Any], bool]
LARGEST = 1e15  # of a number, either way: larger ones overflow where they are drawn


def number(value: Any) -> bool:
    """A number that can be drawn; no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def text(value: Any) -> bool:
    """Text."""
    return isinstance(value, str)


def maybe(form: Form) -> Form:
    """Null, or of a form."""
    return lambda value: value is None or form(value)


def rows(form: Form) -> Form:
    """A list of a form."""
    return lambda value: isinstance(value, list) and all(map(form, value))


def each(form: Form) -> Form:
    """An object, every field of a form."""
    return lambda value: isinstance(value, dict) and all(map(form, value.values()))


def fields(needs: tuple[str, ...] = (), /, **forms: Form) -> Form:
    """An object, its fields of these forms where they are there; `needs` are."""

    def fits(value: Any) -> bool:
        if not isinstance(value, dict) or not set(needs) <= value.keys():
            return False
        return all(form(value[name]) for name, form in forms.items() if name in value)

    return fits


def _list(value: Any) -> bool:
    return isinstance(value, list)


def _dict(value: Any) -> bool:
    return isinstance(value, dict)


_METRIC = fields(("value",), value=maybe(number), se=maybe(number))
_TASK = fields(reason=text, accuracy=number, se=maybe(number), texts=maybe(number), metrics=each(_METRIC))
_CELL = fields(("task", "length", "depth", "accuracy"), task=text, length=number, depth=number, accuracy=number)
_FIGURES = {
    **dict.fromkeys(("perplexity", "reference_perplexity", "relative"), number),
    **dict.fromkeys(("relative_se", "kl", "kl_se", "top1"), maybe(number)),
    "reason": text,
    "fitted_on": number,
    "windows": lambda value: isinstance(value, list) or fields(loss=_list, kl=rows(number))(value),
    "decoded": maybe(each(maybe(number))),
    "tasks": each(_TASK),
    "reference": each(_TASK),
    "cells": rows(_CELL),
    "bins": rows(each(maybe(number))),
}
_LAYER = fields(**dict.fromkeys(("key_error", "value_error", "attention_error", "attention_error_encoded"),
                                maybe(number)))  # fmt: skip
_PART = fields(**_FIGURES)
_OVERLAP = fields(("left", "run_bytes", "against", "dropped_documents", "dropped_tokens"), left=number,
                  run_bytes=number, against=rows(text), dropped_documents=number, dropped_tokens=number)  # fmt: skip
_TEXT = fields(source=text, split=maybe(text), corpus_digest=text, overlap=maybe(_OVERLAP))
_ABOUT = {"text": maybe(_TEXT), "length": number, "windows": number, "model": maybe(fields(id=maybe(text)))}
_PROTOCOL = fields(name=text, texts=maybe(each(fields(**_ABOUT))), error_windows=maybe(number), **_ABOUT)
_GATE = fields(bounds=_dict, failed=maybe(rows(text)), protocol=maybe(text))
_RESULT = fields(
    recipe=text, bits=maybe(each(maybe(number))), layers=maybe(rows(_LAYER)), gate=maybe(_GATE),
    protocols=each(_PART), texts=maybe(each(fields(("protocols",), protocols=each(_PART)))), **_FIGURES,
)  # fmt: skip
_RECORD = fields(("protocol", "result", "corpus"), protocol=_PROTOCOL, result=_RESULT, corpus=text)


def is_sound(record: Any) -> bool:
    """True if every reader of records can read this one."""
    if not _RECORD(record) or not _plain(record):
        return False
    about, result = record["protocol"], record["result"]
    if not (result.get("texts") or {}).keys() <= (about.get("texts") or {}).keys():
        return False
    if measured.of_tasks(record):
        if "protocols" not in result or not isinstance((about.get("model") or {}).get("id"), str):
            return False
        tasks = [task for part in result["protocols"].values() for name in ("tasks", "reference")
                 for task in (part.get(name) or {}).values()]  # fmt: skip
        return result["protocols"].keys() <= measured.SPOKEN.keys() and all(
            "se" in task for task in tasks if "accuracy" in task
        )
    return True


def _plain(value: Any) -> bool:
    """True if all numbers below a value can be drawn."""
    if isinstance(value, (int, float)):
        return isinstance(value, bool) or number(value)
    return all(map(_plain, value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()))


def sound(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records that are."""
    return [record for record in records if is_sound(record)]


def of_text(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records of predicted text that are, and on each text name windows, and figures or why there are none."""
    return [
        record
        for record in sound(records)
        if measured.of_text(record)
        and "recipe" in record["result"]
        and all(map(_is_whole, (record, *measured.elsewhere(record).values())))
    ]


def _is_whole(record: Mapping[str, Any]) -> bool:
    given = record["protocol"]
    named = "source" in (given.get("text") or {}) and min(given.get("windows", 0), given.get("length", 0)) > 0
    told = [
        "reason" in part or ({"perplexity", "relative"} <= part.keys() and not isinstance(part.get("windows"), list))
        for part in measured.parts(record).values()
    ]
    return named and told != [] and all(told)
