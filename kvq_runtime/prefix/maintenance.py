"""List, check and clean the sets of blocks in a folder of kept prefixes, of any model."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.prefix import block_folder, chain
from kvq_runtime.prefix.block_file import BlockFormat, digest
from kvq_runtime.prefix.block_folder import GRACE, SUFFIX, Kept


def read(folder: Path) -> tuple[dict[str, Any], BlockFormat]:
    """Read the description of a set of blocks, and their format. Raises ArtifactError if there is none."""
    path = folder / "about.json"
    about = strict_json.loads(files.read(path, 1 << 22), str(path))
    if not isinstance(about, dict):
        raise ArtifactError(f"{path}: expected an object; remove the folder {folder}")
    return about, BlockFormat.of_description(about)


@dataclass(frozen=True)
class Damage:
    """A file, and what is wrong with it."""

    path: Path
    fault: str


def existing(root: Path) -> Path:
    """The root, if it is a folder of this user alone; NotFound if there is none, else ArtifactError."""
    if not root.is_dir():
        raise NotFound(f"no folder {root}; a PrefixStore makes it")
    block_folder.check_owner(root)
    return root


def listed(root: Path) -> list[dict[str, Any]]:
    """A record a set: what its blocks are of, how many there are, their bytes, and how long ago one was last used."""
    rows = []
    for place in block_folder.sets(existing(root)):
        kept = [*block_folder.blocks(place)]
        row: dict[str, Any] = {"set": place.name[:12]}
        try:
            described, form = read(place)
            row |= {"recipe": form.recipe.name, "model": str(described["model"])[:12], "dtype": described["dtype"]}
            row |= {"blocks": len(kept), "tokens": len(kept) * form.recipe.window.block}
        except ArtifactError as error:
            row |= {"recipe": f"cannot be read: {error}", "blocks": len(kept)}
        newest = max((one.used for one in kept), default=None)
        idle = None if newest is None else round(max(0.0, time.time() - newest), 1)
        rows.append(row | {"bytes": sum(one.size for one in kept), "idle_seconds": idle})
    return rows


def damaged(root: Path) -> Iterator[Damage]:
    """Read every block of every set with every check that a load makes; yields those that fail one."""
    for place in block_folder.sets(existing(root)):
        try:
            described, form = read(place)
            if digest(described) != place.name:
                raise ArtifactError("about: its digest is not the folder's name")
        except ArtifactError as error:
            yield Damage(place / "about.json", str(error))
            continue
        for one in block_folder.blocks(place):
            try:
                link, _ = form.read(files.read(one.path, form.largest))
                if chain.name(link.previous, link.tokens) != one.path.name.removesuffix(SUFFIX):
                    raise ArtifactError("chain: the file's name is not that of its tokens")
                if (link.number == 0) != (link.previous == link.root):
                    raise ArtifactError("chain: the first block, and no other, follows the root")
            except NotFound:  # another process has removed it
                continue
            except ArtifactError as error:
                yield Damage(one.path, str(error))


def collect(
    root: Path, budget: int | None = None, grace: float = GRACE, remove_damaged: bool = False, dry_run: bool = False
) -> list[Kept]:
    """Remove drafts of dead processes; damaged blocks, if asked; then the least recently used, down to a budget.

    grace     seconds that a draft of another machine has to be old
    dry_run   remove nothing; what would be is returned either way
    """
    found = [one for place in block_folder.sets(existing(root)) for one in block_folder.old_drafts(place, grace)]
    if remove_damaged:
        faulty = {one.path for one in damaged(root)}
        found += [one for place in block_folder.sets(root) for one in block_folder.blocks(place) if one.path in faulty]
    if budget is not None:
        gone = {one.path for one in found}
        found += block_folder.oldest([one for one in block_folder.all_blocks(root) if one.path not in gone], budget)
    for one in () if dry_run else found:
        block_folder.remove(one)
    return found
