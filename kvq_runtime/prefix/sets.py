"""Say what the blocks of a set are of, in its about.json; list, check and clean the sets of a folder, of any model."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from kvq_runtime.artifact.artifact import MAX_LAYERS, MAX_WIDTH
from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.geometry import Geometry
from kvq_runtime.prefix import chain, shelf
from kvq_runtime.prefix.block_file import DTYPES, BlockFormat
from kvq_runtime.prefix.shelf import GRACE, SUFFIX, Kept
from kvq_runtime.recipe import Recipe

FORMAT = 3  # of names, folders and files; another one finds nothing of it
MORE = ("promised", "coded_sinks")  # of a `BlockFormat`, stated where they are so


def of(form: BlockFormat, model: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return all that decides how tokens become bytes, as JSON; its digest is the name of a set of blocks."""
    fit = None
    if tensors:
        hashed = sha256()
        chain.add_tensors(hashed, tensors)
        fit = hashed.hexdigest()
    return {
        "format": FORMAT,
        "model": model,
        "recipe": form.recipe.to_json(),
        "fit": fit,
        "geometry": form.geometry.shape,
        "layers": list(range(form.geometry.layers)),
        "dtype": str(form.dtype).removeprefix("torch."),
    } | {name: True for name in MORE if getattr(form, name)}


def digest(about: Mapping[str, Any]) -> str:
    """sha256 of the JSON of `of`."""
    return sha256(strict_json.dumps(dict(about)).encode()).hexdigest()


def read(folder: Path) -> tuple[dict[str, Any], BlockFormat]:
    """The description of a set of blocks in its folder, and their format. ArtifactError for what `of` does not give."""
    path = folder / "about.json"
    about = strict_json.loads(files.read(path, 1 << 22), str(path))
    if not isinstance(about, dict):
        raise ArtifactError(f"{path}: expected an object; remove the folder {folder}")
    return about, _format_of(about)


def _format_of(about: dict[str, Any]) -> BlockFormat:
    names = {"format", "model", "recipe", "fit", "geometry", "layers", "dtype"}
    more = {name for name in MORE if about.get(name) is True}
    strict_json.keys(about, names | more, "about")
    if about["format"] != FORMAT:
        raise ArtifactError(f"about: format {about['format']!r:.40}; this version reads {FORMAT}")
    try:
        geometry = Geometry(**strict_json.keys(about["geometry"], {"layers", "kv_heads", "head_size"}, "about"))
        if geometry.layers > MAX_LAYERS or geometry.width > MAX_WIDTH:
            raise ValueError(f"{geometry}; at most {MAX_LAYERS} layers and {MAX_WIDTH} channels are read")
        recipe = Recipe.from_json(about["recipe"]).check(geometry)
        dtype = DTYPES[about["dtype"]]
        if about["layers"] != list(range(geometry.layers)):
            raise ValueError(f"layers {about['layers']!r:.80}; a set holds all {geometry.layers}")
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(f"about: {error}") from None
    return BlockFormat(recipe, geometry, dtype, promised="promised" in more, coded_sinks="coded_sinks" in more)


@dataclass(frozen=True)
class Damage:
    """A file, and what is wrong with it."""

    path: Path
    fault: str


def existing(root: Path) -> Path:
    """The root, if it is a folder of this user alone; NotFound if there is none, else ArtifactError."""
    if not root.is_dir():
        raise NotFound(f"no folder {root}; a PrefixStore makes it")
    shelf.check_owner(root)
    return root


def listed(root: Path) -> list[dict[str, Any]]:
    """A record a set: what its blocks are of, how many there are, their bytes, and how long ago one was last used."""
    rows = []
    for place in shelf.sets(existing(root)):
        kept = [*shelf.blocks(place)]
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
    for place in shelf.sets(existing(root)):
        try:
            described, form = read(place)
            if digest(described) != place.name:
                raise ArtifactError("about: its digest is not the folder's name")
        except ArtifactError as error:
            yield Damage(place / "about.json", str(error))
            continue
        for one in shelf.blocks(place):
            try:
                link, _ = form.read(files.read(one.path, form.largest()))
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
    found = [one for place in shelf.sets(existing(root)) for one in shelf.old_drafts(place, grace)]
    if remove_damaged:
        faulty = {one.path for one in damaged(root)}
        found += [one for place in shelf.sets(root) for one in shelf.blocks(place) if one.path in faulty]
    if budget is not None:
        gone = {one.path for one in found}
        found += shelf.oldest([one for one in shelf.all_blocks(root) if one.path not in gone], budget)
    for one in () if dry_run else found:
        shelf.remove(one)
    return found
