"""Write an artifact as a folder: kvq.safetensors, a card for people, and kvq_config.json for programs and people.

kvq.safetensors is all that a load reads. The other two repeat what is in it, and add what follows from it: bits, bytes
at some lengths, and from how many tokens on a cache is smaller than one of 16 bit.
"""

import json
from hashlib import sha256 as hash_of
from html import escape
from pathlib import Path
from typing import Any

from kvq_runtime.artifact import artifact, header
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.artifact.header import ARTIFACT_FILE
from kvq_runtime.disk import files
from kvq_runtime.store.estimate import Sizes
from kvq_runtime.store.memory import asymptotic_bits, human

CONFIG, CARD = "kvq_config.json", "README.md"
LENGTHS = (4096, 32768, 131072)  # tokens of the one row whose bytes are told


def save_pretrained(made: Artifact, save_directory: Path | str) -> str:
    """Write a folder with kvq.safetensors, a card README.md and kvq_config.json; returns the artifact's sha256.

    made   what `load_artifact` returned, or a calibration
    `load_artifact` and `KVQCache.from_pretrained` take the folder, and give this artifact again. Files of these names
    are replaced, each whole or not at all, the artifact last.
    """
    folder, data = Path(save_directory), artifact.to_bytes(made)
    files.make_folder(folder)
    for name, content in (beside(made, data, str(folder)) | {ARTIFACT_FILE: data}).items():
        files.save(folder / name, content)
    return hash_of(data).hexdigest()


def beside(made: Artifact, data: bytes, place: str) -> dict[str, bytes]:
    """The files that stand beside an artifact's own, whose bytes are `data`; `place` is what loads it."""
    texts = {CARD: card(made, place), CONFIG: config(made, data)}
    # half a surrogate pair, which names of files and JSON may have, as JSON writes it
    return {name: text.encode(errors="backslashreplace") for name, text in texts.items()}


def config(made: Artifact, data: bytes) -> str:
    """The text of kvq_config.json."""
    geometry = made.fingerprint.to_json()["geometry"]
    stated = {
        "library": "kvq",
        "schema": made.schema,
        "sha256": hash_of(data).hexdigest(),
        "size": len(data),
        "geometry": geometry,
        **sizes(made),
        "papers": [f"arXiv:{number}" for number in made.recipe.papers],
        "recipe": made.recipe.to_json(),
        "fingerprint": made.fingerprint.to_json(),
        "provenance": dict(made.provenance),
    }
    return json.dumps(stated, indent=2, ensure_ascii=False) + "\n"


def sizes(made: Artifact) -> dict[str, Any]:
    """Bits per element; bytes of one row of some lengths, beside 16 bit's; from how many tokens on they are fewer."""
    counted = Sizes(made.recipe, made.fingerprint.geometry, sliding=made.fingerprint.sliding)
    held = [counted.at(tokens) for tokens in LENGTHS]
    return {
        "bits": round(asymptotic_bits(made.recipe, made.fingerprint.geometry), 4),
        "bytes": {str(one.tokens): one.total for one in held},
        "bytes_of_16bit": {str(one.tokens): one.exact for one in held},
        "smaller_than_16bit_from": counted.smaller_from(),
    }


def metadata(made: Artifact) -> dict[str, Any]:
    """Return a card's front matter, in the terms of the Hugging Face Hub; sizes under `kvq`."""
    tags = ["kvq", "kv-cache", "quantization", made.recipe.name, *(f"arxiv:{number}" for number in made.recipe.papers)]
    return {"library_name": "kvq", "pipeline_tag": "text-generation", "tags": tags, "kvq": sizes(made)}


def card(made: Artifact, place: str) -> str:
    """The text of README.md, from the file alone; results of evaluations are on cards of a registry."""
    from huggingface_hub import ModelCardData

    about = header.summary({"recipe": {"name": made.recipe.name}, "provenance": made.provenance})
    counted, recipe = sizes(made), made.recipe
    start = counted["smaller_than_16bit_from"]
    about = {name: value and _plain(value) for name, value in about.items()}
    rows = {
        "recipe": f"`{recipe.name}`{f': {_plain(recipe.summary)}' if recipe.summary else ''}",
        "model": f"`{about['model']}`" + (f" at `{about['revision']}`" if about["revision"] else ""),
        "text it was fitted to": about["corpus"] or "not stated",
        "bits per element": f"{counted['bits']:.4g}",
        **{
            f"all bytes at {int(tokens):,} tokens": f"{human(size)}; 16 bit: {human(counted['bytes_of_16bit'][tokens])}"
            for tokens, size in counted["bytes"].items()
        },
        "smaller than 16 bit": "never" if start is None else f"from {start:,} tokens on",
        "papers": ", ".join(f"[arXiv:{number}](https://arxiv.org/abs/{number})" for number in recipe.papers) or "none",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""\
---
{ModelCardData(**metadata(made)).to_yaml()}
---

# {recipe.name} for {about["model"]}

A fitted key/value-cache quantizer. It holds no model weights: load it beside the model that it was fitted to.

```python
from kvq_runtime import KVQCache

cache = KVQCache.from_pretrained("{place}", model=model)
output = model.generate(**inputs, cache=cache)  # past_key_values=cache before transformers 5.24
```

| | |
|---|---|
{table}
"""


def _plain(text: str) -> str:
    """A text of a stranger as Markdown: no markup, links or cells of its own, and no letters that are not seen."""
    shown = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
    return escape(shown.replace("`", "'"), quote=False).translate({ord(sign): f"\\{sign}" for sign in "|[]"})
