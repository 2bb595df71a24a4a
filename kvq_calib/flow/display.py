"""Show a run in Prefect: how far it is, the result table, the plots, links to what was published."""

import base64
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from kvq_calib.job.job import Job
from kvq_calib.report import plots
from kvq_calib.report.published import Place, Published
from kvq_calib.run.run import Progress
from kvq_runtime.registry import reference
from kvq_runtime.registry.measured import TextRecord
from kvq_runtime.registry.sound import read

EVERY = 5.0  # seconds between two updates of one layer


def create_progress(model: str) -> Any:
    """Create the progress artifact of a flow run; its id."""
    return create_progress_artifact(0.0, key="kvq-progress", description=f"{model}: preparing")


class ProgressArtifact:
    """A progress listener that keeps a progress artifact up to date: at the start of each layer, then every 5 s.

    Per cent are of the layers of a round, then of the evaluation.
    """

    def __init__(self, artifact: UUID, model: str):
        self._artifact, self._model = artifact, model
        self._at, self._last = (0, -2), 0.0

    def __call__(self, progress: Progress) -> None:
        now, at = time.monotonic(), (progress.round, progress.layer)
        if at == self._at and now - self._last < EVERY and (progress.layer >= 0 or progress.done < progress.total):
            return
        self._at, self._last = at, now
        share = progress.done / progress.total
        where = progress.stage
        if progress.layer >= 0:
            share = progress.layer / progress.layers
            again = f"round {progress.round}, " if progress.round else ""
            where = f"{again}layer {progress.layer + 1} of {progress.layers}, {progress.stage}"
        update_progress_artifact(self._artifact, 100 * share, f"{self._model}: {where}")

    def finished(self, layer: int, layers: int) -> None:
        """A layer is done."""
        update_progress_artifact(self._artifact, 100 * (layer + 1) / layers, f"{self._model}: {layer + 1} of {layers}")


def show_results(asked: Job, done: Sequence[Published], folder: Path) -> None:
    """Show the results of a run: the table, the plots if it was evaluated, a link to each version."""
    rows = [artifact.row() | {"not published": "; ".join(artifact.failed)} for artifact in done]
    create_table_artifact(rows, key="kvq-artifacts", description=f"Artifacts of {asked.what.model}")
    if (folder / "evaluation.json").exists() and asked.evaluation.evaluate:
        records = [read(one, TextRecord) for one in json.loads((folder / "evaluation.json").read_text())]
        drawn = {
            "Perplexity by bits": plots.perplexity_by_bits(records),
            "Error by layer": plots.error_by_layer(records),
        }
        images = [
            f"## {name}\n\n![{name}](data:image/png;base64,{base64.b64encode(png).decode()})"
            for name, png in drawn.items()
        ]
        create_markdown_artifact("\n\n".join(images), key="kvq-plots", description=f"Plots of {asked.what.model}")
    for place in (place for artifact in done for place in artifact.places):
        create_link_artifact(_link(place), key="kvq-version", link_text=place.reference)


def _link(place: Place) -> str:
    """Return the address of a version: a page of the Hub, or the file."""
    if place.path is not None:
        return Path(place.path).as_uri()
    from huggingface_hub import constants

    version = reference.parse(place.reference)
    assert isinstance(version, reference.Reference), "what is published on a Hub has a reference"
    return f"{constants.ENDPOINT}/{reference.hub_org(place.registry)}/{version.name}/tree/v{version.value}"
