"""A fit leaves its tensors where it computes, and asks there for nothing that has no deterministic form on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this PyTorch takes no device written in Python", allow_module_level=True)
SUPPORT = Path(__file__).parents[2] / "support"
RECIPES = ["aqua-2bit", "aqua-2bit+all.predict.fit=clean+key.predict.below=2+value.predict.below=", "kvquant-3bit"]
RECIPES += [
    "svdq-2bit-v4",
    "squat-2bit",
    "oscar-2bit",
    "polar-paper-fitted+all.quantize.levels=0+all.quantize.points=mean",
]
RECIPES += ["aqua-fisher-1bit"]


def fitted_elsewhere(model: Path, recipes: list[str]) -> list[str]:
    """What was said of each; a process of its own, since the device stays in it."""
    paths = [str(SUPPORT), str(SUPPORT.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "elsewhere.py"), str(model), *recipes],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_recipes_of_every_kind_of_fit(model):
    assert fitted_elsewhere(model, RECIPES) == [f"{name}: ok" for name in RECIPES]
