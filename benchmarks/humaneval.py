"""Solve HumanEval through a compressed cache: pass@1, greedily, of a chat model on a CPU.

    python -m benchmarks.humaneval build/qwen2.5-coder-0.5b HumanEval.jsonl.gz OUT.jsonl --every 4 \\
        --recipes kivi-4bit+window.block=32 kivi-2bit+window.block=32

The model is asked as by EvalPlus (Liu et al., 2023, github.com/evalplus/evalplus), which its makers use: the function's
head in a chat, and the beginning of an answer, up to the fence of its code. The answer ends at the closing fence. A
prompt is one pass, which reads exact keys and values; no newest token stays exact but those of an unfinished block, and
`decoded` is the share of the reads of generated tokens that were of decoded ones.

Programs run as children without network, in an empty folder beside which nothing can be written, with limits of time,
memory and files (`unshare` of util-linux; without it in a temporary folder, with these limits alone).

Results are appended to OUT, a line a problem; a problem that is there is not solved again.
"""

import argparse
import gzip
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache as once
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, StoppingCriteria
from transformers.cache_utils import DynamicCache

from kvq_calib.evaluate.caches import Reads, attending, count_reads, encoded_by_layer, in_use
from kvq_calib.evaluate.candidate import Candidate, find
from kvq_calib.evaluate.record import Protocol, load_model
from kvq_calib.model import find as models
from kvq_calib.run.plan import environment
from kvq_runtime.hf import KVQCache
from kvq_runtime.hf.model import CACHE

REFERENCE, FENCE = "16 bit", "\n```"
ASK = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
    "\n```\n{}\n```\n"
)
BEGUN = (
    "Below is a Python script with a self-contained function that solves the problem and passes corresponding tests:"
    "\n```python\n"
)
NEW_TOKENS, BATCH = 384, 8
SECONDS, MEMORY, FILE, FILES = 10, 1 << 30, 1 << 20, 32  # of a program: processor time, bytes, bytes of a file, open
# no mount is written to but an empty folder
ALONE = """\
while read -r _ at _; do mount -o remount,bind,ro "$at"; done < /proc/self/mounts
mount -t tmpfs -o size=16m none "$PWD" && cd "$PWD" && exec "$@"
"""
UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child"]


# ---- programs --------------------------------------------------------------------------------------------------------


def program(problem: dict[str, str], answer: str) -> str:
    """Return an answer's code, after what precedes the function in the problem, with the problem's test."""
    name, code = problem["entry_point"], answer.removeprefix("```python\n").split(FENCE)[0]
    return f"{problem['prompt'].partition(f'def {name}')[0]}\n{code}\n{problem['test']}\ncheck({name})\n"


@once
def isolation() -> list[str]:
    """Return the command that keeps a program from network and files; none where the system has no such command."""
    command = [*UNSHARE, "sh", "-c", ALONE, "sh"]
    try:
        with tempfile.TemporaryDirectory() as empty:
            ran = subprocess.run([*command, "true"], cwd=empty, capture_output=True).returncode == 0
    except FileNotFoundError:
        ran = False
    if not ran:
        print("humaneval: no unshare: programs have limits, but may reach network and files", file=sys.stderr)
    return command if ran else []


def _limit() -> None:
    for kind, most in ((resource.RLIMIT_CPU, SECONDS), (resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_FSIZE, FILE),
                       (resource.RLIMIT_NOFILE, FILES), (resource.RLIMIT_CORE, 0)):  # fmt: skip
        resource.setrlimit(kind, (most, most))


def passes(code: str, patience: float = 6 * SECONDS) -> bool:
    """Return whether a program ends without an error within its limits; `patience`: seconds of wall time."""
    with tempfile.TemporaryDirectory() as empty:
        command = [*isolation(), sys.executable, "-I", "-c", code]
        with subprocess.Popen(command, cwd=empty, env={}, preexec_fn=_limit, stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:  # fmt: skip
            try:
                return child.wait(patience) == 0
            except subprocess.TimeoutExpired:
                child.kill()
                return False


# ---- answers ---------------------------------------------------------------------------------------------------------


class Ends(StoppingCriteria):
    """End each row at the closing fence, and count what later passes read."""

    def __init__(self, tokenizer: Any, cache: Any, prompt: int):
        self.tokenizer, self.cache, self.prompt = tokenizer, cache, prompt
        self.reads, self.next = Reads(), Reads()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.reads.add(self.next)
        length = input_ids.shape[1]
        if isinstance(self.cache, KVQCache):
            self.next = count_reads(self.cache, encoded_by_layer(self.cache), range(length - 1, length)) or Reads()
        tails = self.tokenizer.batch_decode(input_ids[:, max(self.prompt, length - 4) :])
        return torch.tensor([FENCE in tail for tail in tails], device=input_ids.device)


@torch.inference_mode()
def answers(model: Any, tokenizer: Any, candidate: Candidate | None, problems: Sequence[dict[str, str]]):
    """Return the answer to each problem of a batch, its number of tokens, and the share of reads that were decoded."""
    asked = [[{"role": "user", "content": ASK.format(problem["prompt"].strip())}] for problem in problems]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in asked]
    inputs = tokenizer([text + BEGUN for text in texts], return_tensors="pt", padding=True)
    cache: Any = DynamicCache(config=model.config)
    if candidate is not None:
        cache = in_use(candidate.recipe, model, candidate.tensors)
    prompt = inputs.input_ids.shape[1]
    ends = Ends(tokenizer, cache, prompt)
    with attending(model, cache):
        tokens_BT = model.generate(
            **inputs, **{CACHE: cache}, do_sample=False, max_new_tokens=NEW_TOKENS, stopping_criteria=[ends]
        )
    new = [row[row != tokenizer.pad_token_id] for row in tokens_BT[:, prompt:]]
    decoded = ends.reads.decoded / ends.reads.pairs if ends.reads.pairs else None
    return [(tokenizer.decode(row, skip_special_tokens=True), len(row), decoded) for row in new]


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lay out results as Markdown: a row a recipe, over the problems that all of them have."""
    by_recipe: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_recipe.setdefault(row["recipe"], {})[row["task"]] = row
    common = set.intersection(*(set(own) for own in by_recipe.values()))
    yield "| recipe | solved | as 16 bit | decoded | seconds a problem |\n|---|---|---|---|---|"
    for name, own in by_recipe.items():
        solved = sum(own[task]["passed"] for task in common)
        same = sum(own[task]["passed"] == by_recipe.get(REFERENCE, own)[task]["passed"] for task in common)
        shares = [own[task]["decoded"] for task in common if own[task]["decoded"] is not None]
        decoded = f"{sum(shares) / len(shares):.0%}" if shares else ""
        cost = sum(own[task]["seconds"] for task in common) / len(common)
        yield f"| `{name}` | {solved} of {len(common)}, {solved / len(common):.1%} | {same} | {decoded} | {cost:.0f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.humaneval", description="pass@1 through a cache")
    parser.add_argument("model")
    parser.add_argument("data", help="HumanEval.jsonl.gz")
    parser.add_argument("out", type=Path, help="results, JSON lines")
    parser.add_argument("--recipes", nargs="*", default=[], help="as kvq eval takes them")
    parser.add_argument("--every", type=int, default=1, help="take each N-th problem")
    args = parser.parse_args(arguments)
    files, out = models.resolve(args.model), args.out
    with gzip.open(args.data, "rt", encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines][:: args.every]
    tokenizer = AutoTokenizer.from_pretrained(files.path, padding_side="left")
    candidates = [None, *(Protocol(recent=0).candidate(find(text, files)) for text in args.recipes)]
    model = load_model(files)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    used = environment("cpu", "float32", torch.get_num_threads())
    for start in range(0, len(problems), BATCH):
        for candidate in candidates:
            name = candidate.name if candidate else REFERENCE
            done = {row["task"] for row in rows if row["recipe"] == name}
            batch = [problem for problem in problems[start : start + BATCH] if problem["task_id"] not in done]
            if not batch:
                continue
            begun = time.process_time()
            answered = answers(model, tokenizer, candidate, batch)
            about = {"model": files.id, "recipe": name, "environment": used}
            about["seconds"] = round((time.process_time() - begun) / len(batch), 2)
            new = [
                about | {"task": problem["task_id"], "passed": passes(program(problem, text)), "tokens": tokens,
                         "decoded": decoded, "answer": text}
                for problem, (text, tokens, decoded) in zip(batch, answered, strict=True)
            ]  # fmt: skip
            rows += new
            with out.open("a") as file:
                file.write("".join(f"{json.dumps(row)}\n" for row in new))
            print(f"{name}: {sum(row['passed'] for row in new)} of {len(batch)} solved", file=sys.stderr, flush=True)
    print(*table(rows), sep="\n")


if __name__ == "__main__":
    main()
