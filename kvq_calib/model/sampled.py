"""Tell models of one name apart: a digest of settings, tokenizer and some bytes of each tensor.

Of a model in a folder the name is that of the folder, to which a training writes as often as it likes. All bytes would
take as long as a download; a training changes most matrices nearly everywhere.
"""

import hashlib
import json

from kvq_calib.model.files import ModelFiles

PIECES, BYTES = 4, 64  # of each tensor, evenly spaced from its first bytes to its last


def digest(files: ModelFiles) -> str:
    """sha256 of these: the same wherever the files are, and whenever they were written."""
    found = hashlib.sha256(json.dumps(dict(files.config), sort_keys=True, default=str).encode())
    if (tokenizer := files.path / "tokenizer.json").is_file():
        found.update(tokenizer.read_bytes())
    for name in sorted(files.names):
        path, start, stop = files.place(name)
        found.update(f"\0{name} {stop - start}\0".encode())
        with path.open("rb") as file:
            for piece in range(PIECES):
                file.seek(start + max(0, stop - start - BYTES) * piece // (PIECES - 1))
                found.update(file.read(min(BYTES, stop - start)))
    return found.hexdigest()
