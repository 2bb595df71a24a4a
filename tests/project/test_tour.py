"""docs/tour.ipynb runs from top to bottom without a network, and is stored without outputs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = json.loads((ROOT / "docs" / "tour.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_it_is_a_notebook_without_outputs():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    for cell in NOTEBOOK["cells"]:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None
    for source in CODE:
        compile(source, "tour.ipynb", "exec")


@pytest.mark.slow
def test_it_runs_from_top_to_bottom(tmp_path):
    """Cell by cell in one namespace, in the folder where a notebook's front end starts it."""
    end = "\nassert 0 < losses['higgs-4bit'] < losses['higgs-2bit'] and 0 < losses['aqua-2bit'] < losses['higgs-2bit']"
    environment = {**os.environ, "HOME": str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "\n".join(CODE) + end]
    done = subprocess.run(command, cwd=ROOT / "docs", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("the same tokens: True", "demo-aqua-2bit", "use an artifact fitted to this model", "kvq-calibrate"):
        assert said in done.stdout
