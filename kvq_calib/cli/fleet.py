"""Calibrate the models of a list, one after the other or one a job: `kvq-calibrate --models list.yaml`.

    - qwen2.5-7b
    - model: ./my-model
      recipe: [aqua-2bit, aqua-fisher-2bit]
      corpus: text.jsonl
      no-publish: true

An entry is a model, or options of `kvq-calibrate` by their long names; what stands on the command line holds for all
entries that do not have the same option.
Each entry is a command of its own, which goes on where it stopped, and does nothing twice.
"""

import argparse
import difflib
import shlex
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from kvq_runtime.cli.table import print_table
from kvq_runtime.disk import files

OWN = ("--models", "--only", "--price", "--commands", "--dry-run")  # which an entry has not
_HOURS = 3600.0


def commands(path: Path, common: Sequence[str], known: Collection[str] = ()) -> list[list[str]]:
    """The arguments of each entry's command, after those that hold for all. ValueError for a file of another form.

    known   all options: an entry names them in full, and the command line may shorten them
    """
    import yaml

    try:
        found = yaml.safe_load(files.read(path.resolve(), 1 << 22).decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"--models {path}: no text in UTF-8: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"--models {path}: no YAML: {' '.join(str(error).split()):.200}") from None
    if not isinstance(found, list) or not found:
        raise ValueError(f"--models {path}: a list of models, each a name or options by name, is expected")
    each = [_words(path, number, entry, known) for number, entry in enumerate(found, 1)]
    return [[*without(common, [word for word in own if word.startswith("--")], known), *own] for own in each]


def _words(path: Path, number: int, entry: Any, known: Collection[str]) -> list[str]:
    given = {"model": entry} if isinstance(entry, str) else entry
    if not isinstance(given, dict) or not isinstance(given.get("model"), str):
        raise ValueError(f"--models {path}: entry {number} names no model: {entry!r:.120}")
    words: list[str] = []
    for name, value in given.items():
        option = f"--{str(name).replace('_', '-')}"
        if option in OWN:
            raise ValueError(f"--models {path}: entry {number}: {option} is for the whole list; leave it out")
        if known and option not in known:  # also one that is off: `publish: false` is not `no-publish: true`
            near = difflib.get_close_matches(option, known, 1, 0.7)
            hint = f"; did you mean {near[0].removeprefix('--')}" if near else ""
            raise ValueError(f"--models {path}: entry {number}: there is no option {option}{hint}")
        if value is True:
            words.append(option)
        elif isinstance(value, list) and option == "--also":  # one option of several words
            words += [option, *map(str, value)]
        elif value is not False and value is not None:
            for one in value if isinstance(value, list) else [value]:
                words += [option, str(one)]
    return words


def without(words: Sequence[str], options: Sequence[str], known: Collection[str] = ()) -> list[str]:
    """A command line without these options, and what stands after each up to the next.

    known   all options: one of these may be shortened
    """
    found, left_out = list[str](), False
    for word in words:
        name = word.partition("=")[0]
        longer = [one for one in known if one.startswith(name)]
        name = longer[0] if name not in known and len(longer) == 1 else name
        left_out = name in options if word.startswith("--") else left_out
        found += [] if left_out else [word]
    return found


def chosen(args: argparse.Namespace, every: list[list[str]]) -> list[tuple[int, list[str]]]:
    """(number, arguments) of the entries that are asked for: all, or that of --only."""
    if args.only is None:
        return list(enumerate(every, 1))
    if args.only > len(every):
        raise ValueError(f"--only {args.only}; {args.models} has {len(every)} entries")
    return [(args.only, every[args.only - 1])]


def print_commands(every: Sequence[tuple[int, list[str]]]) -> None:
    """A command a line, as a shell reads it."""
    for _, words in every:
        print(shlex.join(["kvq-calibrate", *words]))


def run(every: Sequence[tuple[int, list[str]]], one: Callable[[int], int], say: Callable[[str], None]) -> int:
    """Do each entry, whatever comes of the others; the first exit code that is not 0. Ctrl-C ends the list."""
    codes: dict[int, int] = {}
    for place, (number, words) in enumerate(every, 1):
        say(f"entry {number}, {place} of {len(every)}: {shlex.join(words)}")
        try:
            codes[number] = one(number)
        except Exception as error:  # of which no exit code is known: its traceback is told, and the list goes on
            traceback.print_exception(error)
            codes[number] = 1
        if codes[number] == 130:
            break
    failed = {number: code for number, code in codes.items() if code}
    if failed:
        what = ", ".join(f"{number} (exit code {code})" for number, code in failed.items())
        say(f"not done: entries {what}; the same command does these again, and goes on where they stopped")
    return next(iter(failed.values()), 0)


def plan(rows: Sequence[dict[str, Any]], price: float | None, as_json: bool, refused: int = 0) -> None:
    """Print what `--dry-run` found of each model, and of all together.

    price     of an hour of the machine, in any currency; hours are the forward passes' alone, the least that it takes
    refused   how many entries have no plan
    """
    if as_json:
        print_table([*rows], True)
        return
    if not rows:
        return
    table = [_row(row, price) for row in rows]
    missing = f" of {len(rows) + refused}" if refused else ""
    total = {"model": f"all {len(rows)}{missing}", "hours, at least": sum(row["hours, at least"] or 0 for row in table)}
    total |= {"memory, GB": max(row["memory, GB"] for row in table)}
    total |= {name: sum(row[name] for row in table) for name in ("disk, GB", "download, GB")}
    total |= {"cost": sum(row["cost"] or 0 for row in table)} if price is not None else {}
    if any(row["hours, at least"] is None for row in table):
        total["model"] += ", without hours of models whose weights are not here"
    print_table([_rounded(row) for row in [*table, total]], False)


def _row(found: dict[str, Any], price: float | None) -> dict[str, Any]:
    """Of several runs one after the other memory is the largest one's, disk of all, as run folders stay."""
    hours = None
    if "forward_seconds" in found:
        hours = found["forward_seconds"] * found["forward_passes"] / _HOURS
    memory = max(
        found["layer_bytes"] + found["chunk_bytes"], found["evaluation_bytes"] * (not found["evaluation_by_layer"])
    )
    memory += 0 if found["activations_in"] == "files" else found["held_bytes"]
    row: dict[str, Any] = {"model": found["model"], "recipes": ", ".join(found["recipes"]), "hours, at least": hours}
    row |= {"memory, GB": memory / 1e9, "disk, GB": found["disk_bytes"] / 1e9}
    row |= {"download, GB": found["download_bytes"] / 1e9}
    return row | ({} if price is None else {"cost": None if hours is None else hours * price})


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.3g}") if isinstance(value, float) else value for name, value in row.items()}
