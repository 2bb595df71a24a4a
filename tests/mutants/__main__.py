"""Break the code in known ways, one at a time, and see which tests notice: `python -m tests.mutants --suite short`.

Each mutant is tried in a copy of the tree, against the tests that ought to see it, until the first that fails. `short`
is what `make test` takes, `all` what `make test-all` takes. A mutant that survives is a fault that could come back
unseen.

    python -m tests.mutants --suite short                 every mutant
    python -m tests.mutants --suite all --only gptq rope  those whose names contain a word
    python -m tests.mutants --list

What torch and transformers take to start is paid once: each mutant is a process forked from this one.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]
SUITES = {"short": ["-m", "not slow and not all_recipes"], "all": []}
REWRITTEN = "ignore::pytest.PytestAssertRewriteWarning"  # of plugins that transformers has imported
LIMIT = 900  # seconds for a mutant; one that hangs is noticed, too


def copied(root: Path, folder: Path) -> Path:
    """The files of a checkout that git knows or would take, in a folder."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, folder / name)
    return folder


def forked(root: Path, arguments: list[str]) -> tuple[int, str]:
    """pytest's exit code and the end of its output, in a child of this process; 124: it took too long."""
    with tempfile.TemporaryFile() as out:
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
                os.chdir(root)
                sys.path[:] = [str(root), *(path for path in sys.path if path and Path(path) != ROOT)]
                os.environ["PYTHONPATH"] = str(root)
                import pytest

                code = int(pytest.main(arguments))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        end, ended = time.monotonic() + LIMIT, 0
        while not ended and time.monotonic() < end:
            time.sleep(0.05)
            ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        out.seek(0)
        said = out.read().decode(errors="replace")
    return (os.waitstatus_to_exitcode(status) if ended else 124), said


def tried(mutant: Mutant, root: Path, marks: list[str]) -> tuple[str, float, str]:
    """(killed, survived or broken; seconds; the test that noticed)."""
    file = mutant.place(root)
    text, begun = file.read_text(), time.monotonic()
    file.write_text(text.replace(mutant.before, mutant.after))
    try:
        options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "-rfE", "-W", REWRITTEN, *marks]
        code, said = forked(root, [*options, *(f"tests/{name}" for name in mutant.tests)])
    finally:
        file.write_text(text)
    spent = time.monotonic() - begun
    noticed = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if code == 1 and noticed:
        return "killed", spent, noticed[0].split(" - ")[0].partition(" ")[2]
    if code == 124:
        return "killed", spent, f"nothing ended in {LIMIT} s"
    return ("survived" if code == 0 else f"broken ({code})"), spent, "" if code == 0 else said[-300:].replace("\n", " ")


def main() -> int:
    """Try the mutants that are asked for, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--suite", choices=SUITES, default="short")
    parser.add_argument("--only", nargs="*", default=[], help="those whose names contain one of these")
    parser.add_argument("--list", action="store_true", help="print them, and try nothing")
    given = parser.parse_args()
    chosen = [one for one in MUTANTS if not given.only or any(word in one.name for word in given.only)]
    if given.list:
        print(*(f"{one.name:<20} {one.file}: {one.breaks}" for one in chosen), sep="\n")
        return 0
    import scipy.integrate  # noqa: F401
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before transformers imports triton
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.dont_write_bytecode = True
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        root = copied(ROOT, Path(folder))
        print("| mutant | breaks | result | s | noticed by |\n|---|---|---|---|---|", flush=True)
        for one in chosen:
            result, spent, by = tried(one, root, SUITES[given.suite])
            survived += result != "killed"
            print(f"| {one.name} | {one.breaks} | {result} | {spent:.0f} | {by} |", flush=True)
    print(f"\n{len(chosen) - survived} of {len(chosen)} killed")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
