"""Write an artifact as a folder: kvq.safetensors, which is all that a load reads, and a card.

The card repeats what the artifact states, and adds what follows from it: bits, bytes at some lengths, and the number of
tokens beyond which a cache is smaller than a 16-bit one.
"""

from hashlib import sha256 as hash_of
from html import escape
from pathlib import Path
from typing import Any

from kvq_runtime.artifact import header
from kvq_runtime.artifact.artifact import Artifact, to_bytes
from kvq_runtime.artifact.header import ARTIFACT_FILE
from kvq_runtime.disk import files
from kvq_runtime.store.memory import Sizes, asymptotic_bits, human

CARD = "README.md"
LENGTHS = (4096, 32768, 131072)  # tokens of one row


def save_pretrained(artifact: Artifact, save_directory: Path | str) -> str:
    """Write a folder with kvq.safetensors and a card README.md; returns the artifact's sha256.

    artifact   what `load_artifact` returned, or a calibration
    `load_artifact` and `KVQCache.from_pretrained` load the folder. Files of these names are replaced, each whole or not
    at all, the artifact last.
    """
    folder, data = Path(save_directory), to_bytes(artifact)
    files.make_folder(folder)
    files.save(folder / CARD, card(artifact, str(folder)))
    files.save(folder / ARTIFACT_FILE, data)
    return hash_of(data).hexdigest()


def sizes(artifact: Artifact) -> dict[str, Any]:
    """Return bits per element, bytes of one row at some lengths, and from which length they are fewer than 16 bit's."""
    recipe, geometry = artifact.recipe, artifact.fingerprint.geometry
    estimate = Sizes(recipe, geometry, sliding=artifact.fingerprint.sliding)
    caches = [estimate.at(tokens) for tokens in LENGTHS]
    return {
        "bits": round(asymptotic_bits(recipe, geometry), 4),
        "bytes": {str(cache.tokens): cache.total_bytes for cache in caches},
        "bytes_of_16bit": {str(cache.tokens): cache.exact_bytes for cache in caches},
        "smaller_than_16bit_from": estimate.smaller_from(),
    }


def metadata(artifact: Artifact) -> dict[str, Any]:
    """Return a card's front matter, in the terms of the Hugging Face Hub; sizes under `kvq`."""
    tags = ["kvq", "kv-cache", "quantization", artifact.recipe.name]
    return {"library_name": "kvq", "pipeline_tag": "text-generation", "tags": tags, "kvq": sizes(artifact)}


def card(artifact: Artifact, reference: str) -> bytes:
    """Return README.md, from the artifact alone: results of evaluations are on cards of a registry.

    reference   what loads the artifact
    """
    from huggingface_hub import ModelCardData

    computed, recipe = sizes(artifact), artifact.recipe
    start, exact = computed["smaller_than_16bit_from"], computed["bytes_of_16bit"]
    about = header.summary(recipe.name, artifact.provenance)
    about = {name: value and _plain(value) for name, value in about.items()}
    rows = {
        "recipe": f"`{recipe.name}`{f': {_plain(recipe.summary)}' if recipe.summary else ''}",
        "model": f"`{about['model']}`" + (f" at `{about['revision']}`" if about["revision"] else ""),
        "text it was fitted to": about["corpus"] or "not stated",
        "bits per element": f"{computed['bits']:.4g}",
    }
    for tokens, size in computed["bytes"].items():
        rows[f"all bytes at {int(tokens):,} tokens"] = f"{human(size)}; 16 bit: {human(exact[tokens])}"
    rows["smaller than 16 bit"] = "never" if start is None else f"from {start:,} tokens on"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    text = f"""\
---
{ModelCardData(**metadata(artifact)).to_yaml()}
---

# {recipe.name} for {about["model"]}

A fitted key/value-cache quantizer. It holds no model weights: load it beside the model that it was fitted to.

```python
from kvq_runtime import KVQCache

cache = KVQCache.from_pretrained("{reference}", model=model)
output = model.generate(**inputs, cache=cache)  # past_key_values=cache before transformers 5.24
```

| | |
|---|---|
{table}
"""
    return text.encode(errors="backslashreplace")  # half a surrogate pair, which file names and JSON may have


def _plain(text: str) -> str:
    """Escape a stranger's text as Markdown: no markup, links or cells, and no invisible letters."""
    shown = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
    return escape(shown.replace("`", "'"), quote=False).translate({ord(sign): f"\\{sign}" for sign in "|[]"})
