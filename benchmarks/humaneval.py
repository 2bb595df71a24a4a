"""Ask for HumanEval's functions, and run the programs that come of the answers.

The model is asked as by EvalPlus (Liu et al., 2023, github.com/evalplus/evalplus), which its makers use: the function's
head in a chat, and the beginning of an answer. An answer ends where EvalPlus ends it. Differs: the answer begins with
the head, too, which models repeat there, and ends before tests of its own, which EvalPlus cuts off afterwards.

Programs run as children without network, in an empty folder beside which nothing can be written, with limits of time,
memory and files (`unshare` of util-linux; without it in a temporary folder, with these limits alone).
"""

import resource
import subprocess
import sys
import tempfile
from functools import cache as once

ASK = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
    "\n```\n{}\n```\n"
)
BEGUN = (
    "Below is a Python script with a self-contained function that solves the problem and passes corresponding tests:"
    "\n```python\n"
)
STOPS = ("\n```", "\nif __name__", "\ndef main(", "\nprint(", "\nassert ", "\n# Test")
SECONDS, MEMORY, FILE, FILES = 10, 1 << 30, 1 << 20, 32  # of a program: processor time, bytes, bytes of a file, open
# no mount is written to but an empty folder
ALONE = """\
while read -r _ at _; do mount -o remount,bind,ro "$at"; done < /proc/self/mounts
mount -t tmpfs -o size=16m none "$PWD" && cd "$PWD" && exec "$@"
"""
UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child"]


def ask(problem: dict[str, str]) -> str:
    """Return the question about a problem."""
    return ASK.format(problem["prompt"].strip())


def begin(problem: dict[str, str]) -> str:
    """Return the beginning of an answer: up to the body of the function."""
    return f"{BEGUN}{_head(problem)}"


def solves(problem: dict[str, str], text: str) -> bool:
    """Return whether the function with what an answer adds to it passes the problem's test."""
    return passes(f"{_head(problem)}{text}\n{problem['test']}\ncheck({problem['entry_point']})\n")


def _head(problem: dict[str, str]) -> str:
    return f"{problem['prompt'].strip()}\n"


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
