"""Write what of docs/ follows from the code: api.md, and the tables that list families of recipes.

    python scripts/make_pages.py

api.md has the public names of kvq_runtime, their signatures, and what they do, read from the source with `ast`: it
needs nothing heavy. Of the tables every cell follows from the recipes, from the `FAMILY` and the docstring of their
files, and from the engines' own checks; a table stands between `<!-- NAME -->` and `<!-- end of NAME -->`.
"""

import ast
import itertools
import re
from pathlib import Path

import kvq_runtime

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGE = DOCS / "api.md"
SECTIONS = {
    "Serve a model": ["KVQCache", "PrefixStore", "CudaGraphs", "MemoryReport"],
    "Load an artifact": ["load_artifact", "Artifact", "save_pretrained", "push_to_hub"],
    "Choose a recipe": ["preset", "presets", "Recipe"],
    "Errors": ["ArtifactError", "NotFound", "Conflict"],
    "Version": ["__version__"],
}
# Methods without an underscore that a public object has for other rooms of kvq, and for transformers.
INTERNAL = {
    "Recipe": {"at", "fits", "needs", "pairs", "policy", "schemes", "sites", "widest", "with_schemes"},
}
LINKS = {"arXiv": "https://arxiv.org/abs/", "doi": "https://doi.org/"}
ARXIV = re.compile(r"arXiv (\d{4}\.\d{5})")
INTRODUCTION = """
# Public API

`python scripts/make_pages.py` writes this page from docstrings: signatures, first sentences and errors.
`help(kvq_runtime.KVQCache)` prints the rest.

```python
from kvq_runtime import KVQCache, load_artifact, preset
```

You may rely on these names, with the attributes and methods below, on the commands with their exit codes and `--json`
fields, and on the [artifact format](../artifacts/README.md) ([what may change](consume.md#what-may-change)). Everything
else is private. Objects reached through public ones (`Scheme`, `Window`, `Fingerprint`, stages and policies of a
recipe) can be read, compared and printed; do not construct them or import their classes.

`KVQCache`, `PrefixStore` and `CudaGraphs` need transformers, the extra `hf`; the others torch,
safetensors and huggingface-hub alone. Shapes: `B` rows, `H` KV heads, `T` tokens, `D` head size, `C` = H·D.
"""


def api() -> str:
    """The text of docs/api.md."""
    listed = [name for names in SECTIONS.values() for name in names]
    if sorted(listed) != sorted(kvq_runtime.__all__):
        raise ValueError(f"sections list {sorted(listed)}, kvq_runtime.__all__ is {sorted(kvq_runtime.__all__)}")
    parts = [INTRODUCTION.strip()]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}")
        for name in names:
            parts += _entry(name)
    return "\n\n".join(parts) + "\n"


def _entry(name: str) -> list[str]:
    if name == "__version__":
        return ["### `__version__`", 'Text: the installed version, such as "0.1.0"; "unknown" in a checkout.']
    node = _definition(f"kvq_runtime.{kvq_runtime._MODULES[name]}", name)
    if isinstance(node, ast.FunctionDef):
        return [f"### `{name}`", f"```python\n{_signature(name, node)}\n```", _markdown(node)]
    if _is_dataclass(node):
        settings = [line for line in node.body if isinstance(line, ast.AnnAssign)]
        arguments = [_setting(line) for line in settings if "ClassVar" not in ast.unparse(line.annotation)]
        parts = [f"### `{name}`", _code(f"@dataclass(frozen=True)\nclass {name}", arguments), _markdown(node)]
    else:
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        parts = [f"### `{name}({bases})`" if bases else f"### `{name}`", _markdown(node)]
    methods = [
        f"- `{_signature(name, method)}`: {_kept(_docstring(method), columns=False)}"
        for method in node.body
        if isinstance(method, ast.FunctionDef)
        and not method.name.startswith("_")
        and method.name not in INTERNAL.get(name, set())
    ]
    return [*parts, "\n".join(methods)] if methods else parts


def _definition(module: str, name: str) -> ast.ClassDef | ast.FunctionDef:
    """Find the definition of a name: in this module, or in the one that it is imported from."""
    path = ROOT / Path(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(source.read_text()).body
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            return _definition(str(node.module), name)
    raise ValueError(f"{source} does not define {name}")


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _setting(line: ast.AnnAssign) -> str:
    """A field of a dataclass as an argument, with its default."""
    default = line.value
    if isinstance(default, ast.Call) and ast.unparse(default.func) == "field":
        named = {keyword.arg: ast.unparse(keyword.value) for keyword in default.keywords}
        shown = named["default"] if "default" in named else f"{named['default_factory']}()"
    else:
        shown = None if default is None else ast.unparse(default)
    return f"{ast.unparse(line.target)}: {ast.unparse(line.annotation)}" + ("" if shown is None else f" = {shown}")


def _signature(owner: str, node: ast.FunctionDef) -> str:
    """A call with annotations and defaults; a property as `name: type`."""
    kinds = [ast.unparse(decorator) for decorator in node.decorator_list]
    annotation = "" if node.returns is None else ast.unparse(node.returns).strip("'")
    if {"property", "cached_property"} & set(kinds):
        return f"{node.name}: {annotation}"
    arguments = _arguments(node)
    if "classmethod" in kinds or (arguments and arguments[0] == "self"):
        arguments = arguments[1:]
    prefix = f"{owner}." if {"classmethod", "staticmethod"} & set(kinds) else ""
    return f"{prefix}{node.name}({', '.join(arguments)}) -> {annotation}"


def _arguments(node: ast.FunctionDef) -> list[str]:
    """Parameters with annotations and defaults, as in the source."""
    known = node.args
    plain = [*known.posonlyargs, *known.args]
    defaults = [None] * (len(plain) - len(known.defaults)) + list(known.defaults)
    texts = [_argument(*pair) for pair in zip(plain, defaults, strict=True)]
    if known.vararg is not None:
        texts.append(f"*{ast.unparse(known.vararg)}")
    elif known.kwonlyargs:
        texts.append("*")
    texts += [_argument(*pair) for pair in zip(known.kwonlyargs, known.kw_defaults, strict=True)]
    return texts + ([f"**{ast.unparse(known.kwarg)}"] if known.kwarg is not None else [])


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + ("" if default is None else f" = {ast.unparse(default)}")


def _code(start: str, arguments: list[str]) -> str:
    line = f"{start}({', '.join(arguments)})"
    if len(line.splitlines()[-1]) > 100:
        line = f"{start}(\n    " + ",\n    ".join(arguments) + ",\n)"
    return f"```python\n{line}\n```"


def _markdown(node: ast.ClassDef | ast.FunctionDef) -> str:
    """A docstring as Markdown: columns of names and descriptions become lists, indented lines stay code."""
    text = _kept(_docstring(node), columns=isinstance(node, ast.ClassDef) and _is_dataclass(node))
    lines: list[str] = []
    listing = 0  # the column where descriptions begin
    for line in text.splitlines():
        line = line if line.startswith("    ") and not listing else line.replace("<", "\\<")
        column = re.match(r"(\S+(?:, \S+)*)\s{2,}(?=\S)", line)
        if column:
            lines += [""] if not listing else []
            names = ", ".join(f"`{name}`" for name in column[1].split(", "))
            lines.append(f"- {names}: {line[column.end() :]}")
            listing = column.end()
        elif listing and line.startswith(" " * listing):
            lines.append(f"  {line.strip()}")
        else:
            lines += [""] if listing and line else []
            listing = 0
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _docstring(node: ast.ClassDef | ast.FunctionDef) -> str:
    text = ast.get_docstring(node)
    if not text:
        raise ValueError(f"{node.name} is public and has no docstring")
    return text


def _kept(text: str, columns: bool) -> str:
    """The first sentence of a docstring, if asked its columns of names and descriptions, and what it raises."""
    first, *others = text.split("\n\n")
    sentence = re.split(r"(?<=[.:])\s+(?=[A-Z])", " ".join(first.split()), maxsplit=1)[0].rstrip(":")
    named = [_columns(one) for one in others] if columns else []
    raised = re.findall(r"Raises .*?\.(?=\s|$)", " ".join(text.split()))
    return "\n\n".join([" ".join([sentence, *(one for one in raised if one != sentence)]), *filter(None, named)])


def _columns(paragraph: str) -> str:
    """Its lines from the first on that are a name and a description, or go on with one."""
    return "\n".join(itertools.takewhile(re.compile(r"\s|\S+(?:, \S+)*\s{2,}\S").match, paragraph.splitlines()))


def served() -> list[list[str]]:
    """A row a family: what it is, its recipes, bits and fit, and how many of the recipes each engine serves."""
    from kvq_runtime.cli.recipes import by_family
    from kvq_runtime.lmcache.chunk import LMCACHE
    from kvq_runtime.recipe import families
    from kvq_runtime.vllm.plugin import VLLM

    engines = {"vLLM": VLLM, "LMCache": LMCACHE}
    rows: list[list[str]] = [["family", "method", "recipes", "bits", "fitted", *engines]]
    known = {name.replace("_", "-"): found for name, found in families().items()}
    for row in sorted(by_family(), key=lambda row: row["family"]):
        least, most = f"{row['least bits']:.3g}", f"{row['most']:.3g}"
        bits = least if least == most else f"{least} to {most}"
        fitted = {True: "yes", False: "no"}.get(row["fitted"], "some")
        recipes = known[row["family"]]
        kept = [sum(one.refusal(recipe) is None for recipe in recipes) for one in engines.values()]
        shares = ["all" if count == len(recipes) else str(count or "no") for count in kept]
        rows.append([f"`{row['family']}`", row["what"], str(row["recipes"]), bits, fitted, *shares])
    return rows


def cited() -> list[list[str]]:
    """A row a paper, and one for each family that is of several or none: its family, and where it is in the code."""
    from kvq_runtime.recipe import facts, families

    rows = []
    short = {n: name for one in facts().values() for name, by in one.papers.items() for n in ARXIV.findall(by)}
    for file, one in facts().items():
        family, here = f"`{file.replace('_', '-')}`", [f"`recipes/{file}.py`"]
        for name, by in one.papers.items():
            linked = re.sub(r"(arXiv|doi) ([\w./-]+)", lambda found: f"[{found[0]}]({LINKS[found[1]]}{found[2]})", by)
            code = sorted({place for number in ARXIV.findall(by) for place in _places(number)})
            rows.append([f"{name}: {linked}", family, ", ".join(dict.fromkeys(here + code))])
        if not one.papers:
            numbers = {number for recipe in families()[file] for number in recipe.papers}
            names = sorted(short[number] for number in numbers)
            rows.append([" and ".join(names) if names else "none", family, *here])
    return [["paper", "family", "in the code"], *sorted(rows, key=lambda row: ("[" not in row[0], row[0].lower()))]


def _places(paper: str) -> set[str]:
    """The files of stages and policies that come from a paper, as the recipes use them."""
    from kvq_runtime.policy_setting import policy_kinds
    from kvq_runtime.recipe import families
    from kvq_runtime.stages.kinds import kinds

    stages = {
        stage
        for recipes in families().values()
        for recipe in recipes
        for scheme in recipe.schemes
        for _, stage in scheme.stages
        if paper in stage.papers_in(scheme)
    }
    classes = {type(stage) for stage in stages} & {cls for slot in kinds().values() for cls in slot.values()}
    classes |= {cls for slot in policy_kinds().values() for cls in slot.values() if paper in cls.papers}
    return {f"`{'/'.join(cls.__module__.split('.')[1:])}.py`" for cls in classes}


TABLES = {"recipes.md": ("families", served), "papers.md": ("papers", cited)}


def page(name: str) -> str:
    """The text of a page with its table as it should be."""
    title, made = TABLES[name]
    head, *rows = made()
    table = "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))
    before, rest = (DOCS / name).read_text().split(f"<!-- {title} -->\n")
    return f"{before}<!-- {title} -->\n{table}\n{rest[rest.index(f'<!-- end of {title} -->') :]}"


def main() -> None:
    """Write every page and table."""
    for path, text in ((PAGE, api()), *((DOCS / name, page(name)) for name in TABLES)):
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
