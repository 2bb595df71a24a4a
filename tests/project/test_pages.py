"""What the pages state beside prose: commands that parse, papers with links, tests and variables that exist."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from kvq_calib.cli import calibrate
from kvq_runtime.cli import main
from kvq_runtime.recipe import facts, families, presets
from scripts import make_pages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
MEASURED = {"results.md"}  # commands there may stand for several
GENERATED = {"api.md"}
PAPERS = (DOCS / "papers.md").read_text()


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def fenced(text: str) -> list[tuple[str, str, str]]:
    """(language, block, the paragraph before it) of every fenced block."""
    found = re.finditer(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(one[1], one[2], text[: one.start()].rstrip().rsplit("\n\n", 1)[-1]) for one in found]


def commands(text: str) -> list[list[str]]:
    """The commands kvq and kvq-calibrate in blocks of a shell: continued lines joined, no comments or redirections."""
    blocks = "".join(re.sub(r"\\\n", "", block) for language, block, _ in fenced(text) if language == "sh")
    parts = [part.partition(" > ")[0] for line in blocks.splitlines() for part in line.split(" && ")]
    words = [shlex.split(part, comments=True) for part in parts]
    return [line for line in words if line and line[0].removeprefix(".venv/bin/") in ("kvq", "kvq-calibrate")]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in MEASURED], ids=name)
def test_commands_that_a_page_shows_parse_and_name_recipes_that_exist(page):
    for program, *arguments in commands(page.read_text()):
        parser = (calibrate if program.endswith("calibrate") else main).parser()
        try:
            given = vars(parser.parse_args(arguments))
        except SystemExit:
            pytest.fail(f"{page.name}: {shlex.join([program, *arguments])} is no command")
        named = [one for key in ("recipe", "recipes", "baseline") for one in _list(given.get(key))]
        for one in named:
            plain = one.partition("+")[0]
            assert plain in ("auto", "auto-vocab") or plain.endswith(".json") or plain in presets(), (
                f"{page.name}: no recipe {one}"
            )


def _list(value) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def test_wrong_commands_would_be_found():
    found = commands(
        "```sh\nkvq list   # all\nls\nkvq compare --model M \\\n    --recipes a b\n```\n```text\nkvq x\n```\n"
    )
    assert found == [["kvq", "list"], ["kvq", "compare", "--model", "M", "--recipes", "a", "b"]]


# README and consume are run by tests of their own, the excerpts of adding-a-method compared; others are not a user's.
RUN = {
    "README.md",
    "consume.md",
    "adding-a-method.md",
    "results.md",
    "schedule.md",
    "api.md",
    "CONTRIBUTING.md",
}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in RUN], ids=name)
def test_blocks_that_no_test_runs_are_called_examples(page):
    for language, block, before in fenced(page.read_text()):
        if language in ("sh", "python"):
            assert "example" in (before + block).lower(), f"{page.name} shows as runnable:\n{block}"


def links() -> dict[str, str]:
    """{name of a paper: address} of the table of papers."""
    return dict(
        re.findall(
            r"(?:^\| |: |and |steps: |\); )([A-Z][\w-]+)(?:: [^|]*?,|,) \[[^]]+\]\((https?://[^)]+)\)",
            PAPERS,
            re.MULTILINE,
        )
    )


def test_papers_that_a_page_names_are_linked_there():
    """Directly, or by a link to the page of papers; pages of measurements and generated ones aside."""
    found = links()
    assert {"KIVI", "SQuat", "AQUA-KV", "PolarQuant", "OSCAR", "ShadowKV", "DRIVE", "EDEN", "WUSH"} <= found.keys()
    assert all(re.fullmatch(r"https://(arxiv\.org/abs/\d{4}\.\d{5}|doi\.org/\S+)", link) for link in found.values())
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        if page.name in MEASURED | GENERATED | {"schedule.md"}:
            continue
        text = page.read_text()
        prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
        for paper, link in found.items():
            if re.search(rf"(?<![\w-]){paper}(?![\w-])", prose):
                assert link in text or "(papers.md)" in text, (
                    f"{page.name} names {paper}, and links neither it nor papers.md"
                )


@pytest.mark.parametrize("name", make_pages.TABLES)
def test_the_tables_of_families_are_this_versions(name):
    told = f"docs/{name} is old: run python scripts/make_pages.py"
    assert (DOCS / name).read_text() == make_pages.page(name), told


def test_the_tables_of_families_have_every_family_and_link_what_its_stages_come_from():
    served, cited = make_pages.served(), make_pages.cited()
    assert [row[0] for row in served[1:]] == [f"`{name.replace('_', '-')}`" for name in families()]
    assert {row[1] for row in cited[1:]} == {row[0] for row in served[1:]}
    (kvquant,) = [row for row in cited if row[1] == "`kvquant`"]
    assert kvquant[0] == "KVQuant: Hooper et al., 2024, [arXiv 2401.18079](https://arxiv.org/abs/2401.18079)"
    assert kvquant[2] == "`recipes/kvquant.py`, `stages/correct.py`, `stages/fitted_codebook.py`"
    (svdq,) = [row for row in served if row[0] == "`svdq`"]
    assert svdq[-3:] == ["some", "7", "7"]
    for name, one in facts().items():
        stated = {number for by in one.papers.values() for number in make_pages.ARXIV.findall(by)}
        own = {number for recipe in families()[name] for number in recipe.papers}
        missing = f"{name} names papers {stated}; none of its stages or policies has one among its `papers`: {own}"
        assert stated & own or not stated, missing


def test_a_paper_has_the_same_link_everywhere():
    seen: dict[str, set[str]] = {}
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        for paper, link in re.findall(r"\[([A-Z][\w-]+)\]\((https://(?:arxiv|doi)\.org/[^)]+)\)", page.read_text()):
            seen.setdefault(paper, set()).add(link)
    assert len(seen) > 10 and all(len(found) == 1 for found in seen.values())
    assert all(links()[paper] in found for paper, found in seen.items() if paper != "RULER")  # tasks, not a method


def test_what_works_in_generate_is_tested():
    rows = re.findall(r"^\| .*? \| .*? \| `(test_\w+)` \|$", (DOCS / "generate.md").read_text(), re.MULTILINE)
    there = set(
        re.findall(r"^def (test_\w+)", "".join(p.read_text() for p in (ROOT / "tests/hf").glob("*.py")), re.MULTILINE)
    )
    assert len(rows) >= 15 and set(rows) <= there, set(rows) - there


def test_every_variable_that_the_code_reads_is_in_the_table():
    rooms = ("kvq_runtime", "kvq_calib", "pipelines", "tests")
    sources = [
        ROOT / "flows.yaml",
        ROOT / "Makefile",
        *(path for room in rooms for path in (ROOT / room).rglob("*.py")),
    ]
    read = {found for path in sources for found in re.findall(r"\bKVQ_[A-Z_]*[A-Z]\b", path.read_text())}
    told = set(re.findall(r"`(KVQ_[A-Z_]+)`", (DOCS / "commands.md").read_text()))
    assert {"KVQ_HOME", "KVQ_REGISTRY", "KVQ_TEST_DATA"} <= told
    assert read == told


def test_the_citation_and_the_changelog_know_the_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    sections = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased"
    kinds = set(re.findall(r"^### (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
