"""Run the stages of a calibration: prepare → layer 0 → layer 1 → ... → artifacts.

Each stage is a function of the run folder, so that it can be a task of a workflow engine, and a killed run resumes at
its layer. One pass over the model serves all recipes of the plan.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq_calib.fit import rotate
from kvq_calib.fit.scheme import Asked, Errors, LayerSource, SchemeFit, Sums, summary
from kvq_calib.fit.statistics import LayerQueries, MeanVariance, Moments, QueryMoments
from kvq_calib.model.streamed import Stream
from kvq_calib.run import bit_allocation, checkpoint, gradients, passes
from kvq_calib.run.passes import RecipeWork
from kvq_calib.run.plan import BEGINNING, Plan, by_gradients, divides, is_divided, set_arithmetic, takes
from kvq_calib.run.run import Run
from kvq_calib.text import corpus
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.disk import files
from kvq_runtime.fit.statistics import Statistics
from kvq_runtime.recipe import ROLES, Recipe, Role

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LayerStatistics:
    """Sums over all chunks of a captured layer.

    moments   of keys and of values, by the number of sinks left out
    queries   second moments of the fit's queries, if a recipe requests them
    """

    moments: dict[int, tuple[MeanVariance, MeanVariance]]
    queries: LayerQueries | None = None


def calibrate(run: Run) -> dict[str, Artifact]:
    """Execute the plan, or the rest of it; return an artifact per recipe."""
    with run.claimed():
        return fit(run)


def fit(run: Run) -> dict[str, Artifact]:
    """Calibrate in a claimed run folder."""
    start(run)  # a draft copies it
    for part in bit_allocation.rounds(run):
        stream = start(part)
        for layer in range(first_unfinished(part), part.plan.geometry.layers):
            fit_layer(part, stream, layer)
    return artifacts(run)


@torch.inference_mode(False)  # gradients need it off
def start(run: Run) -> Stream:
    """Set the numeric environment, open the run folder and the model, and prepare the text."""
    plan = run.plan
    set_arithmetic(plan)
    checkpoint.open_run(plan, run.folder)
    stream = Stream(run.files, plan.device, getattr(torch, plan.dtype))
    prepare(run, stream)
    return stream


def first_unfinished(run: Run) -> int:
    """Return the layer to resume at, after comparing its inputs with their digests."""
    last = checkpoint.rewind(run.folder, run.plan.geometry.layers)
    if last < run.plan.geometry.layers - 1:
        run.activations.resume(run.folder)
        checkpoint.verify(run.folder, last)
        for layer in range(max(0, last - run.plan.depth + 1), last):
            checkpoint.verify(run.folder, layer, tuple(recipe.name for recipe in run.plan.recipes))
    else:  # it may have been killed before it deleted activations
        checkpoint.thin(run.folder, last, run.plan.depth, last=True)
    for layer in range(last + 1):
        checkpoint.verify(run.folder, layer, ("fit",))
    return last + 1


def prepare(run: Run, stream: Stream) -> None:
    """Choose the tokens, and collect the gradients of fits."""
    plan = run.plan
    if checkpoint.record(run.folder, -1) is not None:
        return
    if plan.draft:
        return _begin_draft(run)
    batch = corpus.select(plan.corpus, run.files.path, plan.samples, plan.seq_len, plan.seed)
    record: dict[str, Any] = {"corpus": batch.description, "seconds": {}}
    with checkpoint.sealed(checkpoint.folder_of(run.folder, -1), record) as folder:
        checkpoint.save({"tokens": batch.tokens_BT}, folder / passes.TOKENS)
        if plan.descends:
            moments = gradients.collect(run, stream, batch.tokens_BT, folder, record["seconds"])
            checkpoint.save(moments, folder / gradients.FILE)


def _begin_draft(run: Run) -> None:
    """Copy the first sequences and the gradients of the draft's run."""
    before = checkpoint.folder_of(run.folder.parent, -1)
    with checkpoint.sealed(checkpoint.folder_of(run.folder, -1), {}) as folder:
        tokens_BT = checkpoint.load(before / passes.TOKENS)["tokens"]
        checkpoint.save({"tokens": tokens_BT[: run.plan.samples]}, folder / passes.TOKENS)
        if (before / gradients.FILE).is_file():
            checkpoint.save(checkpoint.load(before / gradients.FILE), folder / gradients.FILE)


@torch.inference_mode(False)
def fit_layer(run: Run, stream: Stream, layer: int) -> None:
    """Capture one layer, fit every recipe in it, and save the inputs of the next layer."""
    plan, started = run.plan, time.perf_counter()
    record: dict = {name: {} for name in ("fit", "recipes", "settings", "variances", "seconds")}
    record["layer"] = layer
    with checkpoint.sealed(checkpoint.folder_of(run.folder, layer), record) as folder:
        collected = _capture(run, stream, layer, folder, record["seconds"])
        record["seconds"]["capture"] = time.perf_counter() - started - record["seconds"]["forward"]
        tensors: dict[str, Tensor] = {}
        for recipe in plan.recipes:
            begun = time.perf_counter()
            divided = _divided(run, recipe, layer)
            fitted, measures, work = _fit_recipe(run, stream, layer, divided, collected, folder)
            tensors |= {f"{recipe.name}/{name}": tensor for name, tensor in fitted.items()}
            record["fit"][recipe.name] = measures
            record["recipes"][recipe.name] = divided.with_schemes(layer, *work.schemes).to_json()
            if plan.draft:
                record["variances"][recipe.name] = _variances(work, collected)
            if recipe.name in plan.budgets:
                record["settings"][recipe.name] = _measured_settings(work, collected)
            record["seconds"][recipe.name] = time.perf_counter() - begun
        checkpoint.save(tensors, folder / "fit.safetensors")
        if not any(passes.clean(scheme) for recipe in plan.recipes for scheme in recipe.schemes):
            for index in range(len(plan.chunks)):
                run.activations.remove(folder / passes.file("capture", index))
                files.fault_point("capture.unlinked")
    run.activations.finished(run.folder, layer, max(plan.depth, 1), last=layer == plan.geometry.layers - 1)


def _capture(run: Run, stream: Stream, layer: int, folder: Path, seconds: dict) -> LayerStatistics:
    """Run the layer on every chunk, save its keys and values, and sum their moments and those of queries."""
    plan, width, device = run.plan, run.plan.geometry.width, stream.device
    sums = {
        sinks: (Moments(width, device), Moments(width, device))
        for sinks in {recipe.window.sinks for recipe in plan.recipes}
    }
    asks_queries = any(takes(recipe, "capture") for recipe in plan.recipes)
    query_sums = QueryMoments(plan.geometry, device)
    shared = passes.Capture(run, stream, layer, folder, frozenset(sums), asks_queries)
    captured = run.executor(passes.capture, shared, range(len(plan.chunks)))
    for done, chunk in enumerate(captured, 1):
        seconds["forward"] = seconds.get("forward", 0.0) + chunk.forward
        for sinks, pair in chunk.moments.items():
            for total, part in zip(sums[sinks], pair, strict=True):
                total.merge(part)
        if chunk.queries is not None:
            query_sums.merge(chunk.queries)
        run.report(layer, "capture", done, len(plan.chunks))
    moments = {sinks: (keys.value(), values.value()) for sinks, (keys, values) in sums.items()}
    return LayerStatistics(moments, query_sums.value() if asks_queries else None)


def _fit_recipe(
    run: Run, stream: Stream, layer: int, recipe: Recipe, collected: LayerStatistics, folder: Path
) -> tuple[dict[str, Tensor], dict, RecipeWork]:
    """Fit the stages of keys and decode every chunk, then those of values.

    Returns tensors, measures, and the work, with the fitted schemes.
    """
    plan, work = run.plan, RecipeWork(run, stream, layer, recipe, folder)
    tensors: dict[str, Tensor] = {}
    measures: dict = {}
    for role, moments in zip(ROLES, collected.moments[recipe.window.sinks], strict=True):
        fit = SchemeFit(recipe, layer, role, plan.geometry, Statistics(moments.mean_C.float(), seed=plan.seed))
        fit.rows = bit_allocation.DRAFT_ROWS if plan.draft else 0
        fit.fit(_source(work, role, collected.queries))
        errors = Errors()
        decoded = run.executor(passes.decode, passes.Pass(work, fit), range(len(plan.chunks)))
        for done, of_chunk in enumerate(decoded, 1):
            errors += of_chunk
            run.report(layer, f"{recipe.name} {role}s", done, len(plan.chunks))
        work.fits[role] = fit
        tensors |= {f"layers.{layer}.{role}.{name}": tensor.cpu() for name, tensor in fit.tensors.items()}
        measures[role] = summary(errors, plan.held_out > 0)
    return tensors, measures, work


def _divided(run: Run, recipe: Recipe, layer: int) -> Recipe:
    """Return the recipe with its bits divided by the draft's variances, if it divides them.

    Reads the notes of the draft for the first layer, and those of the layer below for the others.
    """
    if run.plan.draft or not is_divided(recipe):
        return recipe
    if layer:
        return Recipe.from_json((checkpoint.record(run.folder, layer - 1) or {})["recipes"][recipe.name])
    notes = _notes(run.folder / bit_allocation.DRAFT, run.plan, "variances", recipe.name)
    return bit_allocation.divided(recipe, run.plan.geometry, notes)


def _notes(folder: Path, plan: Plan, kind: str, name: str) -> list[Any]:
    """Read the notes of one kind on a recipe, by layer."""
    return [(checkpoint.record(folder, layer) or {})[kind][name] for layer in range(plan.geometry.layers)]


def _variances(work: RecipeWork, collected: LayerStatistics) -> dict[str, Any]:
    """Return latent variances times the cost of errors, by role, of schemes that share bits.

    A prediction from I inputs, fitted to n tokens, leaves 1 - I / n as much variance of these as of other tokens."""
    recipe, geometry, layer = work.recipe, work.run.plan.geometry, work.layer
    roles: list[Role] = [role for role in ROLES if divides(recipe.scheme(layer, role))]
    variances, count = {}, collected.moments[recipe.window.sinks][0].count
    for role in roles:
        inputs = geometry.width * recipe.scheme(layer, role).inputs(layer, role).tokens
        left = max(1 - inputs / count, 0.1)
        scheme, seen = work.fits[role].scheme, work.fits[role].statistics
        variances_C, _ = rotate.directions(scheme, seen, geometry)
        variances[role] = (_cost(work, role) / left * variances_C).tolist()
    return variances


def _cost(work: RecipeWork, role: Role) -> float:
    """Return twice the nats that a unit of squared error costs, in the mean over channels."""
    return float(_gradients(work, role).diagonal(dim1=-2, dim2=-1).mean())


def _measured_settings(work: RecipeWork, collected: LayerStatistics) -> dict[str, list[dict[str, Any]]]:
    """Measure all settings that a budget chooses from, by role; `nats`: the cost of their errors."""
    run, settings, measures = work.run, bit_allocation.vllm_settings(work.run.plan.geometry), {}
    for role in ROLES:
        fit, source = work.fits[role], _source(work, role, collected.queries)
        fits = [fit.with_rounding(scheme, fit.statistics, partial(fit.collect, source)) for scheme in settings]
        totals = [Errors() for _ in settings]
        chunks = run.plan.measured_chunks
        measured = run.executor(passes.measure, passes.Settings(work, fits), chunks)
        for done, errors in enumerate(measured, 1):
            totals = [total + more for total, more in zip(totals, errors, strict=True)]
            run.report(work.layer, f"{work.recipe.name} settings", done, len(chunks))
        cost = _cost(work, role) / 2
        measures[role] = [summary(total) | {"nats": cost * float(total.sums[3] / total.sums[4])} for total in totals]
    return measures


def _source(work: RecipeWork, role: Role, queries: LayerQueries | None) -> LayerSource:
    """Return the sources of statistics of a layer's keys, or values."""
    run, layer = work.run, work.layer

    def partials(fit: SchemeFit, asked: Asked) -> Iterator[list[Sums]]:
        return run.executor(passes.collect, passes.Pass(work, fit, asked), range(run.plan.fitted_chunks))

    return LayerSource(
        partials,
        queries,
        gradients=lambda: _gradients(work, role),
        log_importance=lambda: gradients.log_importance(run, layer, role, work.recipe.window.sinks),
    )


def _gradients(work: RecipeWork, role: Role) -> Tensor:
    """Return second moments of the gradients at keys, or at values, float64 [H, D, D]."""
    return gradients.moment(work.run, work.layer, role, work.recipe).to(work.run.plan.device)


def artifacts(run: Run) -> dict[str, Artifact]:
    """Assemble the layers into an artifact per recipe."""
    return {recipe.name: _artifact(run, recipe) for recipe in run.plan.recipes}


def _artifact(run: Run, recipe: Recipe) -> Artifact:
    plan, tensors, name = run.plan, {}, recipe.name
    for layer in range(plan.geometry.layers):
        fitted = checkpoint.load(checkpoint.folder_of(run.folder, layer) / "fit.safetensors")
        tensors |= {n.split("/", 1)[1]: tensor for n, tensor in fitted.items() if n.split("/", 1)[0] == name}
    settings = plan.to_json()
    provenance = {
        key: settings[key] for key in ("model", "revision", "samples", "seq_len", "seed", "held_out", "environment")
    } | run.files.provenance
    if name in plan.budgets or by_gradients(recipe):
        provenance["gradient_tokens"] = plan.gradient_tokens or BEGINNING
    provenance["corpus"] = (checkpoint.record(run.folder, -1) or {})["corpus"]
    fit: dict[str, Any] = {"layers": _notes(run.folder, plan, "fit", name)}
    recipe = _resolved(recipe, list(map(Recipe.from_json, _notes(run.folder, plan, "recipes", name))))
    if name in plan.budgets:
        bits, measured = plan.budgets[name], _notes(run.folder, plan, "settings", name)
        recipe, fit["layers"] = bit_allocation.chosen(recipe, bits, plan.geometry, measured)
        fit["budget"] = {"bits": bits}
    return Artifact(recipe=recipe, fingerprint=run.files.fingerprint(), tensors=tensors, provenance=provenance, fit=fit)


def _resolved(recipe: Recipe, fitted: list[Recipe]) -> Recipe:
    """Return the recipe with the fitted schemes of each layer that differ from its own."""
    for layer, own in enumerate(fitted):
        if own.at(layer) != recipe.at(layer):
            recipe = recipe.with_schemes(layer, *own.at(layer))
    return recipe


def seconds(run: Run) -> dict[str, float]:
    """Return the seconds of a finished run: "forward" (the model itself), "capture" around it, "gradients" on the way
    down, and each recipe."""
    totals: dict[str, float] = {}
    for part in bit_allocation.rounds(run):
        for layer in range(-1, run.plan.geometry.layers):
            for stage, spent in (checkpoint.record(part.folder, layer) or {}).get("seconds", {}).items():
                totals[stage] = totals.get(stage, 0.0) + spent
    return totals
