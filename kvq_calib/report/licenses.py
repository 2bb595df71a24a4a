"""Find the licences of model and corpus, where they are known; nothing is guessed from a name.

A model's is in the front matter of its README.md, or in its GGUF file. Of corpora, only those of embedded ones are
known here: a dataset of the Hub states its own on its card, which ours names.
"""

from pathlib import Path

from kvq_runtime.disk import gguf

FIELDS = ("license", "license_name", "license_link")


def of_model(folder: Path) -> dict[str, str]:
    """The licence fields of a model folder's README.md, or of a GGUF file; empty if it has none."""
    if gguf.is_gguf(folder):
        said = gguf.read(folder).values
        given = {field: said.get(f"general.{field.replace('_', '.')}") for field in FIELDS}
        return {field: value for field, value in given.items() if isinstance(value, str)}
    from huggingface_hub.repocard import metadata_load

    readme = folder / "README.md"
    found = metadata_load(readme) if readme.is_file() else None
    return {field: str(found[field]) for field in FIELDS if found and found.get(field)}


def of_corpus(source: str) -> str:
    """The licence of a corpus, for people."""
    known = {
        "demo": "PSF-2.0 (the documentation of Python)",
        "demo-code": "PSF-2.0 (the library of Python)",
        "recall": "Apache-2.0 (made by kvq)",
    }
    return known.get(source, "not known here; see the corpus")
