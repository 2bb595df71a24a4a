"""docs/tour.ipynb runs from top to bottom without a network, and is stored with what its cells print."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = json.loads((ROOT / "docs" / "tour.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


PATH = r"(?<![\w.])[/~]/?\w[\w-]*/"  # from the root, or the user's own folder
SAID = ("the same tokens: True", "demo-aqua-2bit", "use an artifact fitted to this model", "kvq-calibrate")


def test_it_is_a_notebook_with_the_outputs_of_one_run():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    for source in CODE:
        compile(source, "tour.ipynb", "exec")
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run whole, in order"
    printed = ["".join(one["text"]) for cell in cells for one in cell["outputs"] if one["name"] == "stdout"]
    assert len(printed) == len([one for cell in cells for one in cell["outputs"]]) >= len(cells), "text, and no error"
    text = "\n".join(printed)
    assert all(said in text for said in SAID) and "$KVQ_HOME/registry" in text
    assert not re.search(PATH, text), "a path of a machine"


@pytest.mark.slow
def test_it_runs_from_top_to_bottom(tmp_path):
    """Cell by cell in one namespace, in the folder where a notebook's front end starts it."""
    end = "\nassert 0 < losses['higgs-4bit'] < losses['higgs-2bit'] and 0 < losses['aqua-2bit'] < losses['higgs-2bit']"
    environment = {**os.environ, "HOME": str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "\n".join(CODE) + end]
    done = subprocess.run(command, cwd=ROOT / "docs", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stderr.splitlines() if "of those in calibration" not in line]  # by processor
    assert not told, "it would be stored in the notebook, as what went wrong"
    assert all(said in done.stdout for said in SAID)
