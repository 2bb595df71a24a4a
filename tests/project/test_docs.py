"""The documentation names what exists: paths, modules, links and their anchors."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
NAMED = ("README.md", "CONTRIBUTING.md", "artifacts/README.md")
RECORDS = sorted((ROOT / "benchmarks" / "records").glob("*.md"))
PAGES = [*(ROOT / name for name in NAMED), *sorted((ROOT / "docs").glob("*.md")), *RECORDS]
PACKAGES = ("kvq_runtime", "kvq_calib", "pipelines", "tests", "scripts", "benchmarks", "artifacts", "docs")
# Where a path may begin if it is written in short: `store/layer.py`, `flow/`.
ROOMS = [ROOT / room for room in ("", "kvq_runtime", "kvq_runtime/registry", "kvq_runtime/kernels", "kvq_calib")]
TABLES = re.compile(r"<!-- (papers|families) -->.*?<!-- end of \1 -->", re.DOTALL)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
MODULE = re.compile(r"(?:kvq_runtime|kvq_calib|pipelines|scripts|benchmarks)(?:\.\w+)+")


def named_paths(text: str) -> set[str]:
    """Paths in backticks, with a slash or the name of a Python file; not of what commands make (`build/...`)."""
    quoted = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    paths = {name for name in quoted if PATH.fullmatch(name) and ("/" in name or name.endswith(".py"))}
    return {name for name in paths if not name.startswith(("build/", "dist/", "tmp/"))}


def exists(name: str, page: Path) -> bool:
    """Whether a path is in the repository, written from its root or in short.

    A bare name of a file may be that of any file in the folders of sources.
    """
    if "/" not in name:
        return any(path for package in PACKAGES for path in (ROOT / package).rglob(name))
    if name.startswith(PACKAGES):
        return (ROOT / name).exists()
    return any((room / name).exists() for room in [page.parent, *ROOMS])


def anchors(text: str) -> set[str]:
    """The anchors GitHub gives the headings of a page."""
    headings = re.findall(r"^#{1,6} (.+)$", FENCE.sub("", text), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_paths_and_modules_that_a_page_names_exist(page):
    text = page.read_text()
    missing = {name for name in named_paths(text) if not exists(name, page)}
    assert not missing, f"{page.name} names {sorted(missing)}"
    for dotted in set(MODULE.findall(text)):
        parts = dotted.split(".")
        # the longest beginning that is a module; what follows must be a name inside it
        while parts and not any((ROOT / Path(*parts)).with_suffix(end).exists() for end in ("", ".py")):
            parts.pop()
        rest = dotted.split(".")[len(parts) :]
        module = ROOT / Path(*parts)
        source = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
        inside = source.read_text() if source.exists() else ""
        assert not rest or re.search(rf"\b{rest[0]}\b", inside), f"{page.name} names {dotted}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked.read_text()), f"{page.name} links to {target}; no such heading"


def test_every_page_can_be_reached_from_the_readme():
    texts = (ROOT / "README.md").read_text() + (ROOT / "docs" / "architecture.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f"{page.name})" in texts or f"{page.name}#" in texts, f"nothing links to {page.name}"


def test_every_record_can_be_reached_from_their_list():
    listed = (ROOT / "benchmarks" / "records" / "README.md").read_text()
    assert all(f"({page.name})" in listed for page in RECORDS if page.name != "README.md")
