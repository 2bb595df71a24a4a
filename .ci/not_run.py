"""Say what a run of CI has skipped: `not_run.py LOGS [COMMAND ...]`, a line for each reason that pytest's logs give.

A reason ends with the command that runs what it skips; what one of the commands runs has been run.
"""

import re
import sys
from pathlib import Path

SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] (\S+?)(?::\d+)?: (.+)$", re.MULTILINE)


def not_run(logs: list[str], ran: list[str]) -> list[str]:
    """Lines: why, how many tests or whole files, and where."""
    found: dict[str, dict[str, int]] = {}
    for log in logs:
        for count, file, reason in SKIPPED.findall(log):
            if not any(reason.endswith(command) for command in ran):
                places = found.setdefault(reason, {})
                places[file] = places.get(file, 0) + int(count)
    return [f"{reason} ({sum(places.values())}: {', '.join(sorted(places))})" for reason, places in found.items()]


if __name__ == "__main__":
    lines = not_run([path.read_text() for path in sorted(Path(sys.argv[1]).glob("*.log"))], sys.argv[2:])
    print("\n=== not run here:", *(lines or ["nothing"]), sep="\n  ")
