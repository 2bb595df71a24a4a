"""Read a file of torch.save from a stranger: tensors and plain containers alone, in time and memory that are bounded.

`torch.load(weights_only=True)` runs nothing that a pickle names. But it hashes keys of dictionaries, and a tuple of
three times the same tuple, 60 deep, takes 3^60 steps; and it unpacks as much as an archive holds. So the pickle's steps
are walked first, and the archive is packed again from what was read of it, so that torch reads no other.
"""

import io
import pickle
import pickletools
import warnings
import zipfile
import zlib
from typing import Any

import torch

from kvq_runtime.errors import ArtifactError

ZIP = b"PK\x03\x04"
PICKLE = 1 << 20  # bytes of the pickle, which holds no tensor's data
COST = 256  # steps that hashing one object of it may take


def load(data: bytes, limit: int, name: str) -> Any:
    """Load a file of torch.save; ArtifactError for any other file, or one that unpacks to more than `limit` bytes."""
    if not data.startswith(ZIP):
        raise ArtifactError(f"{name}: no file of torch.save, which is a zip archive; save its dictionary again")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in text, and of names that are there twice
            return torch.load(io.BytesIO(_packed(data, limit)), map_location="cpu", weights_only=True)
    except (ArithmeticError, AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError,
            pickle.UnpicklingError, zipfile.BadZipFile, zlib.error) as error:  # fmt: skip
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ArtifactError(f"{name}: no file of tensors and plain containers alone: {reason:.160}") from None


def _packed(data: bytes, limit: int) -> bytes:
    """The archive written anew; its pickle is checked."""
    out, names = io.BytesIO(), set()
    with zipfile.ZipFile(io.BytesIO(data)) as given, zipfile.ZipFile(out, "w") as made:
        for member in given.infolist():
            is_pickle = member.filename.endswith(".pkl")
            limit -= member.file_size
            if limit < 0 or (is_pickle and member.file_size > PICKLE) or member.filename in names:
                raise ValueError(f"{member.filename:.80} is there twice, or too large")
            names.add(member.filename)
            content = given.read(member)
            if is_pickle:
                _check(content)
            made.writestr(member.filename, content)
    return out.getvalue()


def _check(code: bytes) -> None:
    """Raise ValueError for a pickle that makes a tuple whose hash takes more than COST steps.

    The steps are those of the objects on the unpickler's stack: a tuple's are those of its items and one.
    """
    mark = -1
    stack: list[int] = []
    memo: dict[int, int] = {}
    for step, argument, _ in pickletools.genops(code):
        if step.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else int(str(argument))] = stack[-1]
            continue
        if step.name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[int(str(argument))])
            continue
        taken: list[int] = []
        wanted = len(step.stack_before)
        if pickletools.markobject in step.stack_before:
            while (item := stack.pop()) != mark:
                taken.append(item)
            wanted -= 2  # the mark, and what is above it
        taken += [stack.pop() for _ in range(wanted)]
        cost = 1 + sum(taken) if step.name.startswith("TUPLE") else 1
        if cost > COST or mark in taken:
            raise ValueError("tuples in tuples, which no tensor needs")
        stack += [mark if one is pickletools.markobject else max(cost, *taken, 1) for one in step.stack_after]
