"""Give what was measured to every place that it is for: one that fails takes nothing from the others."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvq_runtime.cli import exit_codes, options
from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError, spoken

Give = Callable[..., None]


@contextmanager
def everywhere() -> Iterator[Give]:
    """Yield `give(step, *arguments)`, which does a step. What a step ends in is raised at the end, after all others; it
    is said before what ends the block itself.

    with everywhere() as give:
        give(save, {path: data})
        print_table(...)
    """
    failed: list[Exception] = []

    def give(step: Callable[..., object], *given: object) -> None:
        try:
            step(*given)
        except (ArtifactError, OSError, RuntimeError) as error:
            failed.append(error)

    try:
        yield give
    except BaseException:
        for error in failed:
            exit_codes.say("kvq", spoken(error))
        raise
    for error in failed[1:]:
        exit_codes.say("kvq", spoken(error))
    if failed:
        raise failed[0]


def save(found: Mapping[str | Path, bytes], folder: str | None = None) -> None:
    """Write files by their paths, below a folder that is made if one is named."""
    if folder is not None:
        files.make_folder(Path(folder))
    for path, data in found.items():
        options.write_output(Path(folder or "", path), data)
