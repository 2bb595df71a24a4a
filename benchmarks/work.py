"""Do with a chat model on a CPU what people do with one, through compressed caches: code, search, a chat, sums.

    python -m benchmarks.work humaneval build/qwen2.5-coder-0.5b HumanEval.jsonl.gz OUT.jsonl --every 2 \\
        --recipes kivi-4bit qwen2.5-coder-0.5b-fisher-3bit --registry artifacts/zoo

    humaneval   complete a function; pass@1 (`benchmarks/humaneval.py`). DATA: HumanEval.jsonl.gz
    needles     return the numbers of NEEDLES keys, each asked apart, in contexts of up to LENGTHS tokens. DATA: a text
    chat        return what a comment in a file says, in turns of one chat. DATA: a Python file
    gsm8k       solve a problem; the last number of the answer counts. DATA: test.jsonl of GSM8K

`benchmarks/answers.py` answers them. `decoded`: the share of what is read behind the pass over a prompt or context that
was decoded.

Results are appended to OUT, a line a task; a task that is there is not done again.
"""

import argparse
import gzip
import json
import random
import re
import sys
import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks import humaneval
from benchmarks.answers import BATCH, Answers, Prompts, Sheet, Task, pack, through
from kvq_calib.evaluate import needles
from kvq_calib.evaluate.record import load_model
from kvq_calib.model import find as models
from kvq_calib.run.plan import environment

REFERENCE = "16 bit"
LENGTHS, NEEDLES, TURNS = (4096, 8192, 16384), 8, 6
SUM = "\nPlease reason step by step, and put your final answer within \\boxed{}."
FILE = "This is {}:\n```python\n{}\n```\n"
TICKET = "Which ticket number is given in the comment above the definition of `{}`?"


def contains(value: str, text: str) -> bool:
    """Return whether a text has a value."""
    return value in text


# ---- tasks -----------------------------------------------------------------------------------------------------------


def chat(tokenizer: Any, *said: str) -> list[str]:
    """Return the texts before, between and after what is said in turns, by a user first; the model answers last."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": f"\0{n}\0"} for n in range(len(said))]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return re.split("\0[0-9]+\0", text)


def in_batches(texts: list[tuple[str, Task]], most: int, stops: Sequence[str] = ()) -> Iterator[Sheet]:
    """Sort prompts by length, so that rows of a batch end together, and divide them into batches of about one size."""
    count, whole = -(-len(texts) // BATCH), sorted(texts, key=lambda pair: len(pair[0]))
    for n in range(count):
        part = whole[len(whole) * n // count : len(whole) * (n + 1) // count]
        yield Sheet([text for text, _ in part], [task for _, task in part], most, stops)


def humaneval_sheets(tokenizer: Any, data: Path, every: int) -> Iterator[Sheet]:
    """Complete functions."""
    with gzip.open(data, "rt", encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines][::every]
    (before, after), texts = chat(tokenizer, ""), []
    for problem in problems:
        prompt = before + humaneval.ask(problem) + after + humaneval.begin(problem)
        texts.append((prompt, Task(problem["task_id"], partial(humaneval.solves, problem))))
    yield from in_batches(texts, most=256, stops=humaneval.STOPS)


def gsm8k_sheets(tokenizer: Any, data: Path, every: int) -> Iterator[Sheet]:
    """Solve problems of arithmetic."""

    def same(reference: str, text: str) -> bool:
        numbers = re.findall(r"-?[0-9][0-9,]*(?:\.[0-9]+)?", text)
        return bool(numbers) and float(numbers[-1].replace(",", "")) == float(reference.replace(",", ""))

    before, after = chat(tokenizer, "")
    texts = []
    for n, line in list(enumerate(data.read_text(encoding="utf-8").splitlines()))[::every]:
        problem = json.loads(line)
        right = partial(same, problem["answer"].rpartition("#### ")[2])
        texts.append((before + problem["question"] + SUM + after, Task(f"gsm8k/{n}", right)))
    yield from in_batches(texts, most=320)


def needle_sheets(tokenizer: Any, data: Path, every: int) -> Iterator[Sheet]:
    """Hide the numbers of keys in a text, at even distances; of lengths each `every`-th."""
    keys = [f"{one}-{other}" for one, other in zip(needles.ADJECTIVES.split(), needles.NOUNS.split(), strict=False)]
    values = {key: str(random.Random(key).randint(1_000_000, 9_999_999)) for key in keys[:NEEDLES]}
    before, after = chat(tokenizer, "")
    text = needles.Haystack.of_texts(data.name, "", [data.read_text(encoding="utf-8")[: 8 * max(LENGTHS)]])
    sizes = list(accumulate(len(ids) + 1 for ids in tokenizer(list(text.sentences)).input_ids))
    for length in LENGTHS[::every]:
        lines = list(text.sentences[: bisect(sizes, length - 64 * NEEDLES)])
        for n, (key, value) in reversed(list(enumerate(values.items()))):
            place = (2 * n + 1) * len(lines) // (2 * NEEDLES)
            lines.insert(place, needles.NEEDLE.format(key=key, value=value))
        tasks = []
        for key, value in values.items():
            question = needles.ASKED.format(key=key) + after + needles.BEGUN.format(key=key).strip()
            tasks.append(Task(f"needle/{length}/{key}", partial(contains, value), question))
        yield Sheet([before + needles.ABOUT.format(context=" ".join(lines))], tasks, needles.STEPS)


def chat_sheets(tokenizer: Any, data: Path, every: int) -> Iterator[Sheet]:
    """Ask for comments in a file: a number stands above each of TURNS functions."""
    code = data.read_text(encoding="utf-8")
    names = re.findall(r"^def (\w+)\(", code, re.MULTILINE)
    names = [names[len(names) * n // TURNS] for n in range(TURNS)]
    tickets = {name: str(random.Random(name).randint(10_000, 99_999)) for name in names}
    for name, ticket in tickets.items():
        code = re.sub(rf"^def {name}\(", f"# Ticket {ticket}\n\\g<0>", code, count=1, flags=re.MULTILINE)
    before, *_, between, after = chat(tokenizer, "", "", "")
    order = random.Random(data.name).sample(names, TURNS)
    tasks = [
        Task(f"chat/{n}", partial(contains, tickets[name]), ("" if n == 0 else between) + TICKET.format(name) + after)
        for n, name in enumerate(order)
    ]
    yield Sheet([before + FILE.format(data.name, code)], tasks, most=48, turns=True)


SHEETS = {"humaneval": humaneval_sheets, "needles": needle_sheets, "chat": chat_sheets, "gsm8k": gsm8k_sheets}


# ---- results ---------------------------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lay out results as Markdown: a row a recipe, over the tasks that all of them have."""
    by_recipe: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_recipe.setdefault(row["recipe"], {})[row["task"]] = row
    common = set.intersection(*(set(own) for own in by_recipe.values()))
    yield "| recipe | right | as 16 bit | decoded | seconds a task |\n|---|---|---|---|---|"
    for name, own in by_recipe.items():
        right = sum(own[task]["passed"] for task in common)
        same = sum(own[task]["passed"] == by_recipe.get(REFERENCE, own)[task]["passed"] for task in common)
        shares = [own[task]["decoded"] for task in common if own[task]["decoded"] is not None]
        decoded = f"{sum(shares) / len(shares):.0%}" if shares else ""
        cost = sum(own[task]["seconds"] for task in common) / len(common)
        yield f"| `{name}` | {right} of {len(common)}, {right / len(common):.1%} | {same} | {decoded} | {cost:.1f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.work", description="work through compressed caches")
    parser.add_argument("task", choices=SHEETS)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path, help="results, JSON lines")
    parser.add_argument("--recipes", nargs="*", default=[], help="presets, or artifacts by reference")
    parser.add_argument("--registry", help="of fitted recipes' artifacts")
    parser.add_argument("--every", type=int, default=1, help="take each N-th task, or length of needles")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args(arguments)
    files, out = models.resolve(args.model), args.out
    tokenizer = AutoTokenizer.from_pretrained(files.path, padding_side="left")
    candidates = [None, *(through(text, files, args.registry) for text in args.recipes)]
    model = load_model(files, dtype=getattr(torch, args.dtype))
    pack(model)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    used = environment("cpu", args.dtype, torch.get_num_threads())
    for sheet in SHEETS[args.task](tokenizer, args.data, args.every):
        prompts = None
        for candidate in candidates:
            about = {"model": files.id, "recipe": candidate.recipe.name if candidate else REFERENCE}
            about["artifact"] = candidate.sha256 if candidate else None
            done = {row["task"] for row in rows if all(row[name] == value for name, value in about.items())}
            left = [n for n, task in enumerate(sheet.tasks) if task.name not in done]
            if not left:
                continue
            prompts = prompts or Prompts.read(model, tokenizer, sheet.contexts)
            own = replace(sheet, tasks=[sheet.tasks[n] for n in left])
            begun, run = time.process_time(), Answers(model, tokenizer, own)
            answers = run.to(prompts.select(left) if len(sheet.contexts) > 1 else prompts, candidate)
            about["seconds"] = round((time.process_time() - begun) / len(left), 2)
            about["decoded"] = round(run.reads.decoded / run.reads.pairs, 4) if run.reads.pairs else None
            new = []
            for task, answer in zip(own.tasks, answers, strict=True):
                text = run.text(answer)
                result = {"task": task.name, "passed": task.right(text), "tokens": len(answer), "answer": text}
                new.append(about | result | {"environment": used})
            rows += new
            with out.open("a") as file:
                file.write("".join(f"{json.dumps(row)}\n" for row in new))
            solved = sum(row["passed"] for row in new)
            print(f"{about['recipe']}: {solved} of {len(left)} right", file=sys.stderr, flush=True)
    print(*table([row for row in rows if row["model"] == files.id]), sep="\n")


if __name__ == "__main__":
    main()
