"""The stage graph as plain functions: prepare → layer 0 → layer 1 → ... → artifacts; `held_out.py` evaluates them.

Each function reads what the one before left in the run folder, so any of them can be a task of a workflow engine, and
a run that was killed goes on at the layer where it was. One pass over the model serves all recipes of the plan.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvq_calib import budget, checkpoint, chunks, corpus, measure
from kvq_calib.capture import Stream
from kvq_calib.chunks import RecipeWork, Spread
from kvq_calib.fit import metric, query
from kvq_calib.fit.layer import SideFit, summary
from kvq_calib.plan import Plan
from kvq_calib.statistics import MeanVariance, Moments
from kvq_calib.weights import ModelFiles
from kvq_runtime import faults
from kvq_runtime.artifact import Artifact
from kvq_runtime.recipe import HALVES, Recipe, Side
from kvq_runtime.stages.rotate import OutputBasis


@dataclass(frozen=True)
class Progress:
    """What a progress callback hears: this many of a layer's units of work are done.

    layer   -1: the whole model, whose units are `total` tokens; `tokens` of them since the last time
    """

    layer: int
    layers: int
    stage: str
    done: int
    total: int
    tokens: int
    round: int = 0


Listener = Callable[[Progress], None]
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Said:
    """What the capture says of a layer.

    moments   of keys and of values, for each number of sinks left out
    queries   those to fit on, where a recipe asks for queries; `held`: those held out, if any are
    """

    moments: dict[int, tuple[MeanVariance, MeanVariance]]
    queries: query.Queries | None = None
    held: query.Queries | None = None


@dataclass(frozen=True)
class Run:
    """A plan at work: where its files are, whose weights it reads, who does its chunks and hears of its progress.

    In another process it is a run that works there by itself, and that nobody hears of.
    """

    plan: Plan
    files: ModelFiles
    folder: Path
    listener: Listener = lambda progress: None
    round: int = 0
    spread: Spread = chunks.here

    def __reduce__(self):
        return Run, (self.plan, self.files, self.folder)

    def say(self, layer: int, stage: str, done: int, total: int, tokens: int = 0) -> None:
        """Report progress."""
        self.listener(Progress(layer, self.plan.geometry.layers, stage, done, total, tokens, self.round))


def calibrate(run: Run) -> dict[str, Artifact]:
    """Do the whole plan, or what is left of it, and return an artifact per recipe."""
    with checkpoint.claimed(run.folder):
        return fit(run)


def fit(run: Run) -> dict[str, Artifact]:
    """`calibrate` in a run folder that is claimed already."""
    for part in budget.rounds(run):
        stream = start(part)
        for layer in range(first_unfinished(part), part.plan.geometry.layers):
            fit_layer(part, stream, layer)
    return artifacts(run)


def start(run: Run) -> Stream:
    """Set the numeric environment, open the run folder and the model, and prepare the text."""
    plan = run.plan
    arithmetic(plan)
    checkpoint.open_run(plan, run.folder)
    stream = Stream(run.files, plan.device, getattr(torch, plan.dtype))
    prepare(run, stream)
    return stream


def arithmetic(plan: Plan) -> None:
    """Make this process calculate as the plan says."""
    torch.set_num_threads(plan.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(plan.device.startswith("cuda"))


def first_unfinished(run: Run) -> int:
    """The layer at which the run goes on. What that layer reads is checked against its digests."""
    last = max((n for n in range(run.plan.geometry.layers) if checkpoint.record(run.folder, n)), default=-1)
    if last < run.plan.geometry.layers - 1:
        checkpoint.verify(run.folder, last)
        for layer in range(max(0, last - run.plan.depth + 1), last):
            checkpoint.verify(run.folder, layer, tuple(recipe.name for recipe in run.plan.recipes))
    else:  # it may have been killed before it deleted what no layer reads
        checkpoint.thin(run.folder, last, run.plan.depth, last=True)
    for layer in range(last):
        checkpoint.verify(run.folder, layer, ("fit",))
    return last + 1


def prepare(run: Run, stream: Stream) -> None:
    """Choose the tokens and embed them: what lies under the first layer."""
    plan = run.plan
    if checkpoint.record(run.folder, -1) is not None:
        return
    batch = corpus.select(plan.corpus, run.files.path, plan.samples, plan.seq_len, plan.seed)
    with checkpoint.layer_folder(run.folder, -1, {"corpus": batch.description}) as folder:
        for index, rows in enumerate(plan.chunks):
            tokens = batch.tokens_BT[rows.start : rows.stop]
            checkpoint.save({"hidden": stream.embed(tokens).cpu()}, folder / chunks.file("hidden", index))


def fit_layer(run: Run, stream: Stream, layer: int) -> None:
    """Capture one layer, fit every recipe in it, and leave what the next layer reads."""
    plan, started = run.plan, time.perf_counter()
    record: dict = {"layer": layer, "fit": {}, "recipes": {}, "attention": {}, "seconds": {}}
    with checkpoint.layer_folder(run.folder, layer, record) as folder:
        said = _capture(run, stream, layer, folder, record["seconds"])
        record["seconds"]["capture"] = time.perf_counter() - started - record["seconds"]["forward"]
        tensors: dict[str, Tensor] = {}
        for recipe in plan.recipes:
            begun = time.perf_counter()
            fitted, measures, work = _fit_recipe(run, stream, layer, recipe, said, folder)
            tensors |= {f"{recipe.name}/{name}": tensor for name, tensor in fitted.items()}
            record["fit"][recipe.name] = measures
            record["recipes"][recipe.name] = recipe.with_sides(layer, *work.sides).to_json()
            if recipe.name in plan.budgets:
                found = measure.attention_errors(work, budget.options(plan.geometry))
                record["attention"][recipe.name] = found
                for half in HALVES:
                    measures[half]["attention_error"] = found[half][0]
            record["seconds"][recipe.name] = time.perf_counter() - begun
        checkpoint.save(tensors, folder / "fit.safetensors")
        if not any(chunks.clean(side) for recipe in plan.recipes for side in recipe.sides):
            for index in range(len(plan.chunks)):
                (folder / chunks.file("capture", index)).unlink()
                faults.point("capture.unlinked")
    checkpoint.thin(run.folder, layer, max(plan.depth, 1), last=layer == plan.geometry.layers - 1)


def _capture(run: Run, stream: Stream, layer: int, folder: Path, seconds: dict) -> Said:
    """Run the layer on every chunk, keep its keys and values, and take what statistics of it are sums."""
    plan, width, device = run.plan, run.plan.geometry.width, stream.device
    sums = {sinks: (Moments(width, device), Moments(width, device)) for sinks in {_sinks(r) for r in plan.recipes}}
    asked = any(side.feedback for recipe in plan.recipes for side in recipe.sides)
    gathered = query.Gathered(plan.geometry, stream.rope(plan.seq_len), plan.fitted_chunks, device)
    shared = chunks.Capture(run, stream, layer, folder, frozenset(sums), gathered if asked else None)
    caught = run.spread(chunks.capture, shared, range(len(plan.chunks)))
    for (index, rows), found in zip(enumerate(plan.chunks), caught, strict=True):
        seconds["forward"] = seconds.get("forward", 0.0) + found.forward
        for sinks, pair in found.moments.items():
            for total, partial in zip(sums[sinks], pair, strict=True):
                total.merge(index, partial)
        if found.queries is not None:
            gathered.merge(index, found.queries, len(rows))
        run.say(layer, "capture", index + 1, len(plan.chunks), len(rows) * plan.seq_len)
    moments = {sinks: (keys.value(), values.value()) for sinks, (keys, values) in sums.items()}
    return Said(moments, *(gathered.value() if asked else ()))


def _fit_recipe(
    run: Run, stream: Stream, layer: int, recipe: Recipe, said: Said, folder: Path
) -> tuple[dict[str, Tensor], dict, RecipeWork]:
    """Keys first, then values, each: statistics over the fitted chunks, solution, every chunk decoded.

    Returns tensors, measures, and the work, whose sides have what the fit found for their settings.
    """
    plan, geometry = run.plan, run.plan.geometry
    work = RecipeWork(run, stream, layer, recipe, folder)
    found: dict[str, Tensor] = {}
    measures: dict = {}
    for half, mean in zip(HALVES, said.moments[_sinks(recipe)], strict=True):
        side = SideFit(recipe, layer, half, geometry, mean, _metric(run, layer, recipe.side(layer, half)))
        shared, fitted = chunks.Pass(work, side), range(plan.fitted_chunks)
        if side.needs_statistics:
            side.solve(run.spread(chunks.statistics, shared, fitted), plan.seed)
        if said.queries is not None and side.side.feedback is not None:
            side.solve_feedback(said.queries)
        if side.needs_residuals:
            side.solve_residuals(run.spread(chunks.residuals, shared, fitted), plan.seed)
        sums = torch.zeros(5, dtype=torch.float64)
        for index, errors in enumerate(run.spread(chunks.decode, shared, range(len(plan.chunks)))):
            sums += errors
            run.say(layer, f"{recipe.name} {half}s", index + 1, len(plan.chunks))
        work.fits[half] = side
        found |= {f"layers.{layer}.{half}.{name}": tensor.cpu() for name, tensor in side.tensors.items()}
        measures[half] = summary(sums)
        if said.queries is not None and said.held is not None and side.side.feedback is not None:
            measures[half]["query_deviation"] = query.deviations(side.side.feedback, said.queries, said.held)
    return found, measures, work


def artifacts(run: Run) -> dict[str, Artifact]:
    """Put the layers together: an artifact per recipe."""
    return {recipe.name: _artifact(recipe.name, *budget.settled(run, recipe.name)) for recipe in run.plan.recipes}


def _artifact(name: str, run: Run, noted: dict) -> Artifact:
    plan, tensors, notes = run.plan, {}, []
    for layer in range(plan.geometry.layers):
        tensors |= checkpoint.load(checkpoint.folder_of(run.folder, layer) / "fit.safetensors")
        notes.append(checkpoint.record(run.folder, layer) or {})
    given = plan.to_json()
    provenance = {
        name: given[name] for name in ("model", "revision", "samples", "seq_len", "seed", "held_out", "environment")
    }
    provenance["corpus"] = (checkpoint.record(run.folder, -1) or {})["corpus"]
    recipe = next(recipe for recipe in plan.recipes if recipe.name == name)
    return Artifact(
        recipe=_resolved(recipe, [Recipe.from_json(note["recipes"][name]) for note in notes]),
        fingerprint=run.files.fingerprint(),
        tensors={n.split("/", 1)[1]: t for n, t in tensors.items() if n.split("/", 1)[0] == name},
        provenance=provenance,
        fit={"layers": [note["fit"][name] for note in notes]} | noted,
    )


def _resolved(recipe: Recipe, found: list[Recipe]) -> Recipe:
    """The recipe with what the fit found for the sides of each layer, if it found anything."""
    for layer, one in enumerate(found):
        if one.at(layer) != recipe.at(layer):
            recipe = recipe.with_sides(layer, *one.at(layer))
    return recipe


def seconds(run: Run) -> dict[str, float]:
    """Where the time of a finished run went: "forward" (the model itself), "capture" around it, and each recipe."""
    totals: dict[str, float] = {}
    for part in budget.rounds(run):
        for layer in range(run.plan.geometry.layers):
            for stage, spent in (checkpoint.record(part.folder, layer) or {})["seconds"].items():
                totals[stage] = totals.get(stage, 0.0) + spent
    return totals


def _metric(run: Run, layer: int, side: Side) -> Tensor | None:
    """What an error of values costs in this layer's output, where the side's basis asks for it."""
    if not isinstance(side.rotate, OutputBasis):
        return None
    weight = run.files.tensor(f"model.layers.{layer}.self_attn.o_proj.weight")
    return metric.output(weight.to(run.plan.device), run.plan.geometry)


def _sinks(recipe: Recipe) -> int:
    return max(recipe.key.sinks, recipe.value.sinks)
