"""Hide from a Python process what the base install does not bring."""

ABSENT = [
    "prefect",
    "datasets",
    "sklearn",
    "pandas",
    "pydantic",
    "kvq_calib",
    "transformers",
    "triton",
    "matplotlib",
    "pyarrow",
    "scipy",
    "psutil",
    "fastapi",
    "model_signing",
]

BLOCKED = f"""
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)

sys.meta_path.insert(0, Absent())
"""
