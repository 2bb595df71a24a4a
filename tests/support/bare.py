"""Hide from a Python process what a machine with a GPU need not have: put where Python finds it as sitecustomize.

Modules are absent as if they were not installed, to whoever looks for them, not only to who imports them.
"""

from importlib.machinery import PathFinder

ABSENT = ("prefect", "datasets", "matplotlib", "ray", "sklearn", "hypothesis", "scipy", "psutil", "pandas")
_find = PathFinder.find_spec


def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in ABSENT else _find(name, path, target)


PathFinder.find_spec = classmethod(find_spec)
