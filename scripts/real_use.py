"""Measure a real language model in use, for scripts.measure_real: needles, a conversation, greedy text, speed.

Each writes one JSON file of benchmarks/results/real/ whenever a recipe is finished, and does not repeat it.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from kvq_calib.cli import commands
from kvq_calib.evaluate import decode, tasks
from kvq_calib.evaluate.caches import WitnessCache
from kvq_calib.evaluate.ledger import Ledger
from kvq_calib.evaluate.record import load_model
from kvq_calib.evaluate.subject import Subject, costs
from kvq_calib.model import find
from kvq_calib.model.files import ModelFiles
from kvq_calib.text import corpus
from kvq_calib.text.tokenizer import Encoder
from kvq_runtime import PrefixStore
from kvq_runtime.artifact import artifact
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.disk import files as disk
from kvq_runtime.hf.model import CACHE
from kvq_runtime.recipe import Recipe
from scripts import conversation, measure_real, real_page

TASKS = ("passkey", "niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2")
LENGTHS = (1024, 2048, 4096, 8192)
TEXTS = {1024: 4, 2048: 4, 4096: 2, 8192: 1}  # of each task, length and depth
ANSWER = 24  # tokens: a number, or five digits, is had by then
FOUND = 0.5  # right answers of the 16-bit model, of all depths of the shortest texts, from which a task is used
PASSAGE, TURN, TALKS = 700, 96, 3  # tokens of a passage, the most of an answer, conversations
PROMPT, GREEDY, PROMPTS = 4000, 1000, 2
CONTEXTS = (1024, 4096, 8000)
IN_USE = ("kivi-2bit", "kivi-4bit", "higgs-4bit", "aqua-2bit", "aqua-metric-2bit")  # of bench


def needles(args: argparse.Namespace, files: ModelFiles) -> int:
    """Find needles by recipe, depth and length; `--first`: by the 16-bit model, asked plainly and in a chat."""
    name = "needles-16bit" if args.first else "needles"
    kept = Kept(args.results / f"{name}.json", args)
    chosen = args.tasks or (TASKS if args.first else used(args.results, args.chat))
    essays = tasks.haystack(measure_real.source("book") or "demo")
    subjects = [None] if args.first else _subjects(args, files)
    for chat in _forms(files) if args.first else (args.chat,):
        for length in (length for length in _lengths(args, LENGTHS) if length <= files.context):
            plan = tasks.Plan(
                tuple(chosen), (length,), samples=args.windows or TEXTS.get(length, 2), protocols=("in-use",),
                haystack=essays, chat=chat, steps=ANSWER,
            )  # fmt: skip
            for subject in subjects:
                kept.measure(
                    [chat, length, subject and [subject.name, subject.sha256], plan.to_json()],
                    lambda subject=subject, plan=plan: tasks.evaluate(
                        files, [subject] if subject else [], plan, args.device, torch.float32, ledger=_ledger(files)
                    ),
                )
    print("\n\n".join(real_page.answered(kept.path)))
    return 0


def _forms(files: ModelFiles) -> list[bool]:
    """Plainly, and in a chat where the model has a form for it."""
    try:
        tasks.turn(files.path)
    except ValueError as error:
        print(f"asked plainly alone: {error}", file=sys.stderr)
        return [False]
    return [False, True]


def used(results: Path, chat: bool) -> list[str]:
    """The tasks that the 16-bit model answers in this form: at least FOUND of the shortest texts."""
    path = results / "needles-16bit.json"
    if not path.is_file():
        raise ValueError(f"{path} is not there: what the 16-bit model finds decides what is asked; use needles --first")
    right: dict[str, list[float]] = {}
    every = [one for row in json.loads(path.read_text()).values() for one in row["found"]]
    shortest = min(one["protocol"]["lengths"][0] for one in every)
    for one in every:
        if one["protocol"].get("chat", False) == chat and one["protocol"]["lengths"][0] == shortest:
            for task, part in one["result"]["protocols"]["in-use"]["tasks"].items():
                right.setdefault(task, []).append(part["accuracy"])
    found = [task for task, some in right.items() if sum(some) / len(some) >= FOUND]
    if not found:
        form = "in the chat form" if chat else "asked plainly"
        raise ValueError(f"{form} the 16-bit model finds less than {FOUND:.0%} of every task; see {path}")
    return found


def talk(model, files: ModelFiles, subject: Subject, passages: Sequence[Sequence[str]], most: int) -> dict[str, Any]:
    """Measure one recipe's caches in several conversations, each with one cache."""
    held = []
    for some in passages:
        cache = WitnessCache(subject.recipe, model, subject.tensors or None)
        (found,) = conversation.follow(model, conversation.turns(files.path, some), [cache], most)
        held.append(found)
    length = held[0][-1]["history"] + held[0][-1]["added"] + held[0][-1]["tokens"]
    bits = costs(subject.recipe, files.geometry, files.sliding, length)
    return {"recipe": subject.recipe.name, "artifact": subject.sha256, "bits": bits, "conversations": held}


def talks(args: argparse.Namespace, files: ModelFiles) -> int:
    """Turn by turn, how far each recipe's cache is from 16 bit."""
    kept = Kept(args.results / "conversation.json", args)
    text = corpus.load(measure_real.source("book") or "demo").texts[0]
    encoder = Encoder(files.path)
    (ids,) = encoder.plain([text])
    count = args.windows or TALKS
    gap = len(ids) // (2 * count + 1)
    given = encoder.text([ids[gap * place : gap * place + PASSAGE] for place in range(1, 2 * count + 1)])
    passages = [given[place : place + 2] for place in range(0, len(given), 2)]
    model = load_model(files, args.device, torch.float32)
    for subject in _subjects(args, files):
        unit = [subject.name, subject.sha256, given, TURN]
        kept.measure(unit, lambda subject=subject: talk(model, files, subject, passages, TURN))
    print("\n\n".join(real_page.talk(args.results)))
    return 0


def greedy(args: argparse.Namespace, files: ModelFiles) -> int:
    """Find each recipe's first other choice along the 16-bit model's greedy text after long prompts."""
    kept = Kept(args.results / "greedy.json", args)
    prompt, count = (PROMPT, GREEDY) if files.context > PROMPT + GREEDY else (files.context // 2, files.context // 8)
    batch = measure_real._whole("book", files, prompt, args.windows or PROMPTS)
    plan = decode.Plan(prompt + count)
    for subject in _subjects(args, files):
        unit = [subject.name, subject.sha256, batch.digest, count]
        kept.measure(
            unit,
            lambda subject=subject: decode.evaluate(
                files, batch, [subject], plan, args.device, torch.float32, ledger=_ledger(files)
            )[0],
        )
    print("\n\n".join(real_page.greedy(args.results)))
    return 0


def prefix(args: argparse.Namespace, files: ModelFiles) -> int:
    """The first token after a long prompt: computed, and from blocks in a folder; and what keeping them takes."""
    kept, model = Kept(args.results / "prefix.json", args), load_model(files, args.device, torch.float32)
    model.set_attn_implementation("kvq")
    batch = measure_real._whole("book", files, PROMPT, 1)
    ids = batch.tokens_BT.to(args.device).long()

    def first(cache) -> tuple[float, int]:
        begun = time.perf_counter()
        with torch.no_grad():
            logits = model(ids[:, cache.get_seq_length() :], **{CACHE: cache}, logits_to_keep=1).logits
        return time.perf_counter() - begun, int(logits.argmax())

    def fitted(subject: Subject) -> Artifact | Recipe:
        home = measure_real.Home(files, args)
        return artifact.load(home.artifact(subject.name, measure_real.ON[0])) if subject.sha256 else subject.recipe

    def measured(subject: Subject) -> dict[str, Any]:
        exact = DynamicCache(config=model.config)
        computed, token = first(exact)
        with tempfile.TemporaryDirectory() as folder:
            store, times = PrefixStore(folder, fitted(subject), model=model), []
            begun = time.perf_counter()
            store.put(exact, ids)
            put = time.perf_counter() - begun
            size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
            for _ in range(2):  # the second has the codebooks in memory
                begun = time.perf_counter()
                cache = store.load(ids)
                times.append((time.perf_counter() - begun, cache.get_seq_length(), *first(cache)))
        loaded, tokens, rest, again = times[-1]
        return {
            "recipe": subject.name, "prompt": ids.shape[1], "kept_tokens": tokens, "bytes": size,
            "computed_s": computed, "put_s": put, "load_s": loaded, "rest_s": rest, "same_token": token == again,
        }  # fmt: skip

    for subject in _subjects(args, files):
        kept.measure([subject.name, subject.sha256, batch.digest], lambda subject=subject: measured(subject))
    for row in kept.found.values():
        one = row["found"]
        put = f"kept {one['kept_tokens']} tokens in {one['put_s']:.1f} s, {one['bytes'] / 1e6:.1f} MB"
        loaded = f"loaded {one['load_s']:.1f} s, then {one['rest_s']:.1f} s to the first token"
        print(f"{one['recipe']}: computed {one['computed_s']:.1f} s; {put}; {loaded}")
    return 0


def bench(args: argparse.Namespace, files: ModelFiles) -> int:
    """`kvq bench`: time to the first token, tokens per second and memory, beside 16 bit and transformers' own."""
    top = argparse.ArgumentParser()
    commands.add_bench(top.add_subparsers())
    lengths = [length for length in _lengths(args, CONTEXTS) if length + 40 < files.context]
    args.results.mkdir(parents=True, exist_ok=True)
    given = ["bench", *(args.recipes or IN_USE), "--model", args.model, "--context", ",".join(map(str, lengths))]
    given += ["--dtype", "float32", "--device", args.device, "--out", args.results / "bench.jsonl", "--json"]
    given += ["--plot", args.results / "bench.png"]
    asked = top.parse_args(list(map(str, given)))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            asked.run(asked)
        except RuntimeError as error:  # of a cache that is not installed: the others were measured
            print(f"kvq bench: {error}", file=sys.stderr)
    found = json.loads(printed.getvalue())
    found["about"]["model"]["id"] = files.id
    found["machine"] = real_page.machine()
    disk.save(args.results / "bench.json", (json.dumps(found, indent=1) + "\n").encode())
    for row in found["rows"]:
        if row["measured"]:
            print(f"{row['context']} {row['cache']}: {row['first_token_s']:.2f} s, {row['tokens_per_s']:.2f} tokens/s")
    return 0


class Kept:
    """Findings in one JSON file, each with how long it took and on what, saved as soon as it is there."""

    def __init__(self, path: Path, args: argparse.Namespace):
        self.path, self.again, self.device = path, args.again, args.device
        self.found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}

    def measure(self, unit: Any, work: Callable[[], Any]) -> None:
        """Do what is not there yet."""
        key = real_page.digest(unit)
        if key in self.found and not self.again:
            return
        found, took = real_page.timed(work, self.device)
        self.found[key] = {"found": found, **took}
        disk.make_folder(self.path.parent)
        disk.save(self.path, (json.dumps(self.found, indent=1) + "\n").encode())
        print(f"{self.path.name}: {self.found[key]['seconds']} s", file=sys.stderr, flush=True)


def _subjects(args: argparse.Namespace, files: ModelFiles) -> list[Subject]:
    """The recipes that are asked for; fitted ones on the first text of `--on`, where they are fitted."""
    home, found = measure_real.Home(files, args), []
    for name in args.recipes or measure_real.SOME:
        on = args.on[0] if measure_real.is_fitted(name) else None
        one = home.subject(name, on)
        if one is None:
            print(f"{name} on {on} is left out: it is not fitted; `fit` does that", file=sys.stderr)
        else:
            found.append(one)
    return found


def _ledger(files: ModelFiles) -> Ledger:
    return Ledger(Path(os.environ["KVQ_HOME"]) / "real" / find.digest(files)[:16] / "answers")


def _lengths(args: argparse.Namespace, usual: Sequence[int]) -> Sequence[int]:
    """The lengths that are asked for; the usual ones, if none are."""
    return usual if list(args.lengths) == [*measure_real.WINDOWS] else args.lengths
