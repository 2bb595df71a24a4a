"""Say which tests of a failed run may be tried again, alone: `try_again.py LOG` prints their ids, and exits with 0.

It exits with 1, and says why, unless pytest ran every test to its end and all that failed are tests of a server of
Prefect, whose clocks a busy machine can outrun. A test that kills, or lets processes race, never gets another try: a
torn state found once in twenty runs is a fault.
"""

import re
import sys
from pathlib import Path

STEADY_ALONE = ("tests/calib/flow/",)  # where the tests are that wait for another program's clock
MOST = 2


def tests_to_try(log: str) -> list[str]:
    """The ids of the tests that failed; a ValueError where no second try may help."""
    code = re.findall(r"^make.*\*\*\* .*\] Error (\d+)$", log, re.MULTILINE)
    if code[-1:] != ["1"]:
        raise ValueError(f"pytest did not end with failed tests alone (exit code {', '.join(code) or 'unknown'})")
    if "crashed while running" in log or "worker restarting disabled" in log:
        raise ValueError("a worker died")
    collected = re.findall(r"^\d+ workers? \[(\d+) items?\]$", log, re.MULTILINE)
    closing = re.findall(r"^=+ (\d+ \w+.*) in [\d.]+s.*=+$", log, re.MULTILINE)
    if not (collected and closing):
        raise ValueError("pytest's own count of the tests is not in the log")
    counted = {word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) (\w+)", closing[-1])}
    ran = sum(counted.get(word, 0) for word in ("passed", "failed", "skipped", "xfailed", "xpassed", "error"))
    if ran < int(collected[-1]):
        raise ValueError(f"{ran} of {collected[-1]} tests ran")
    lines = re.findall(r"^(?:FAILED|ERROR) (.+)$", log, re.MULTILINE)
    names = list(dict.fromkeys(re.sub(r"@\S+", "", line.split(" - ")[0]).strip() for line in lines))
    if len(lines) != counted.get("failed", 0) + counted.get("error", 0):
        raise ValueError("not every failure is named")
    if len(names) > MOST:
        raise ValueError(f"{len(names)} tests failed; at most {MOST} may be tried again")
    for name in names:
        if not name.startswith(STEADY_ALONE) or not re.fullmatch(r"[\w/.:-]+", name):
            raise ValueError(f"{name} has no second try")
    return names


if __name__ == "__main__":
    try:
        print(*tests_to_try(Path(sys.argv[1]).read_text()))
    except ValueError as refusal:
        sys.exit(f"no second try: {refusal}")
