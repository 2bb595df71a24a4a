"""Collect the text that every machine with Python has: documentation, and code, of the language and its library.

    documents   one topic of the reference (`pydoc_data.topics`), or all docstrings of one module in source order
    code        the source of one module without its docstrings: the other kind of text, and none of the first

Sources are parsed, no module is imported. The text depends on the Python version; a batch's digest records what it was.
"""

import ast
import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip",
           "encodings", "pydoc_data", "__pycache__"}  # fmt: skip
SHORTEST = 200  # characters; less is a header line, not a text
_Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@lru_cache(maxsize=1)
def documents() -> list[tuple[str, str]]:
    """All documents as (name, text), in a fixed order.

    Raises RuntimeError under `python -OO`, and where the standard library has no source files.
    """
    if sys.flags.optimize >= 2:
        raise RuntimeError(
            "python -OO drops docstrings, which are the demo's corpus; run without -OO, or pass --corpus FILE"
        )
    from pydoc_data.topics import topics

    found = [(f"topics/{name}", text) for name, text in sorted(topics.items())]
    found += [(name, _docstrings(path)) for name, path in _modules()]
    return [(name, text) for name, text in found if len(text) >= SHORTEST]


@lru_cache(maxsize=1)
def code() -> list[tuple[str, str]]:
    """The library's modules as (name, source without docstrings), in a fixed order; comments stay."""
    found = [(name, _without_docstrings(path)) for name, path in _modules()]
    return [(name, text) for name, text in found if len(text) >= SHORTEST]


def _without_docstrings(path: Path) -> str:
    """A module's source less the lines of its docstrings; "" for what is no module of Python in UTF-8."""
    try:
        source = path.read_bytes().decode("utf-8")
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    lines = source.splitlines(keepends=True)
    for node in _statements(tree):
        if not isinstance(node, _Documented) or ast.get_docstring(node, clean=False) is None:
            continue
        first = node.body[0]
        assert first.end_lineno is not None, "what was parsed has places"
        lines[first.lineno - 1 : first.end_lineno] = [""] * (first.end_lineno - first.lineno + 1)
    return "".join(lines)


def _modules() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    kept: dict[str, Path] = {}
    for folder, inner, files in os.walk(root):
        inner[:] = set(inner) - SKIPPED
        paths = (Path(folder, file) for file in files if file.endswith(".py"))
        kept |= {path.relative_to(root).as_posix(): path for path in paths}
    if "argparse.py" not in kept:
        raise RuntimeError(f"the standard library at {root} has no source files (zipped or stripped), and its "
                           "docstrings are the demo's corpus; pass --corpus FILE")  # fmt: skip
    return sorted(kept.items())


def _docstrings(path: Path) -> str:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # templates and deliberately broken files
        return ""
    return "\n\n".join(_walk(tree))


def _walk(node: ast.AST) -> Iterator[str]:
    """The docstrings under a statement, in source order."""
    for found in _statements(node):
        if isinstance(found, _Documented) and (text := ast.get_docstring(found)):
            yield text if isinstance(found, ast.Module) else f"{found.name}\n{text}"


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements under one, itself first, in source order; expressions, most of a tree, are none."""
    yield node
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        inner = getattr(node, field, ())
        for child in inner if isinstance(inner, list) else ():
            yield from _statements(child)
