"""Say which tests of a failed run may be tried again, alone: `try_again.py LOG` prints their ids, and exits with 0.

It exits with 1, and says why, unless pytest ran every test to its end and all that failed stand in `STEADY_ALONE`:
tests that wait for a server of Prefect, whose clocks a busy machine can outrun. A test that kills, or lets processes
race, is not among them: a torn state found once in twenty runs is a fault.
"""

import re
import sys
from pathlib import Path

FLOWS, AUTOMATIONS = "tests/calib/flow/test_flows.py::", "tests/calib/flow/test_automations.py::"
STEADY_ALONE = frozenset([
    f"{FLOWS}test_a_run_shows_progress_table_plots_and_version",
    f"{FLOWS}test_a_failed_gate_is_in_the_state_the_record_and_the_exit_code",
    f"{FLOWS}test_a_failed_gate_is_known_when_an_answer_is_lost",
    f"{FLOWS}test_what_a_run_made_is_known_when_answers_are_lost",
    f"{FLOWS}test_a_model_that_fails_does_not_stop_the_night",
    f"{FLOWS}test_drift_is_told_and_what_is_worse_is_not_promoted",
    f"{AUTOMATIONS}test_failed_gates_and_drift_are_told_and_nothing_else",
    f"{AUTOMATIONS}test_silence_is_told_and_a_success_is_no_silence",
])  # fmt: skip
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
        if name.partition("[")[0] not in STEADY_ALONE or not re.fullmatch(r"[\w/.:\[\]-]+", name):
            raise ValueError(f"{name} has no second try")
    return names


if __name__ == "__main__":
    try:
        print(*tests_to_try(Path(sys.argv[1]).read_text()))
    except ValueError as refusal:
        sys.exit(f"no second try: {refusal}")
