"""The stages of a calibration as plain functions: prepare → layer 0 → layer 1 → ... → artifacts.

Each function reads what the one before left in the run folder, so any of them can be a task of a workflow engine, and
a run that was killed goes on at the layer where it was. One pass over the model serves all recipes of the plan.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq_calib.fit import rotate
from kvq_calib.fit.scheme import Asked, Errors, SchemeFit, Source, Sums, summary
from kvq_calib.fit.statistics import LayerQueries, MeanVariance, Moments, QuerySums, deviations
from kvq_calib.model.streamed import Stream
from kvq_calib.run import budget, checkpoint, gradients, passes, share
from kvq_calib.run.passes import RecipeWork
from kvq_calib.run.plan import by_gradients, set_arithmetic, takes
from kvq_calib.run.run import Run
from kvq_calib.text import corpus
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.disk import files
from kvq_runtime.fit.statistics import Statistics
from kvq_runtime.recipe import ROLES, Recipe, Role

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LayerStatistics:
    """Sums over all chunks, collected while a layer was captured.

    moments   of keys and of values, by the number of sinks left out
    queries   second moments of the queries to fit on, where a recipe asks for queries; `held`: of the held-out ones
    energy    mean ‖h‖² of the stream under the layer then, over the tokens to fit on but the sinks, one of which may
              have a massive activation, as many thousand times the energy of any other
    """

    moments: dict[int, tuple[MeanVariance, MeanVariance]]
    energy: float
    queries: LayerQueries | None = None
    held: LayerQueries | None = None


def calibrate(run: Run) -> dict[str, Artifact]:
    """Do the whole plan, or what is left of it, and return an artifact per recipe."""
    with run.claimed():
        return fit(run)


def fit(run: Run) -> dict[str, Artifact]:
    """`calibrate` in a run folder that is claimed already."""
    start(run)  # what a draft begins with
    for part in budget.rounds(run):
        stream = start(part)
        for layer in range(first_unfinished(part), part.plan.geometry.layers):
            fit_layer(part, stream, layer)
    return artifacts(run)


@torch.inference_mode(False)  # which a caller may be in, and gradients are taken
def start(run: Run) -> Stream:
    """Set the numeric environment, open the run folder and the model, and prepare the text."""
    plan = run.plan
    set_arithmetic(plan)
    checkpoint.open_run(plan, run.folder)
    stream = Stream(run.files, plan.device, getattr(torch, plan.dtype))
    prepare(run, stream)
    return stream


def first_unfinished(run: Run) -> int:
    """The layer at which the run goes on. What that layer reads is checked against its digests."""
    last = checkpoint.rewind(run.folder, run.plan.geometry.layers)
    if last < run.plan.geometry.layers - 1:
        run.activations.resume(run.folder)
        checkpoint.verify(run.folder, last)
        gradients.verify(run, last + 1)
        for layer in range(max(0, last - run.plan.depth + 1), last):
            checkpoint.verify(run.folder, layer, tuple(recipe.name for recipe in run.plan.recipes))
    else:  # it may have been killed before it deleted what no layer reads
        checkpoint.thin(run.folder, last, run.plan.depth, last=True)
    for layer in range(last + 1):
        checkpoint.verify(run.folder, layer, ("fit",))
    return last + 1


def prepare(run: Run, stream: Stream) -> None:
    """Choose the tokens, and collect the gradients that fits need."""
    plan = run.plan
    if checkpoint.record(run.folder, -1) is not None:
        return
    if plan.draft:
        return _begin_draft(run)
    batch = corpus.select(plan.corpus, run.files.path, plan.samples, plan.seq_len, plan.seed)
    tokens_BT, record = batch.tokens_BT, {"corpus": batch.description, "seconds": {}}
    if plan.transfer is not None:
        other = corpus.select(plan.transfer, run.files.path, plan.transfer_samples, plan.seq_len, plan.seed)
        tokens_BT, record = torch.cat([tokens_BT, other.tokens_BT]), record | {"transfer": other.description}
    with checkpoint.whole(checkpoint.folder_of(run.folder, -1), record) as folder:
        checkpoint.save({"tokens": tokens_BT}, folder / passes.TOKENS)
        if plan.descends:
            found = gradients.collect(run, stream, batch.tokens_BT, folder, record["seconds"])
            checkpoint.save(found, folder / gradients.FILE)


def _begin_draft(run: Run) -> None:
    """Take what the run that the draft is of begins with: of tokens the first sequences, and gradients."""
    before = checkpoint.folder_of(run.folder.parent, -1)
    with checkpoint.whole(checkpoint.folder_of(run.folder, -1), {}) as folder:
        tokens_BT = checkpoint.load(before / passes.TOKENS)["tokens"]
        checkpoint.save({"tokens": tokens_BT[: run.plan.samples]}, folder / passes.TOKENS)
        if (before / gradients.FILE).is_file():
            checkpoint.save(checkpoint.load(before / gradients.FILE), folder / gradients.FILE)


@torch.inference_mode(False)
def fit_layer(run: Run, stream: Stream, layer: int) -> None:
    """Capture one layer, fit every recipe in it, and leave what the next layer reads."""
    plan, started = run.plan, time.perf_counter()
    record: dict = {name: {} for name in ("fit", "recipes", "attention", "variances", "seconds")}
    record["layer"] = layer
    with checkpoint.whole(checkpoint.folder_of(run.folder, layer), record) as folder:
        collected = _capture(run, stream, layer, folder, record["seconds"])
        record["seconds"]["capture"] = time.perf_counter() - started - record["seconds"]["forward"]
        tensors: dict[str, Tensor] = {}
        for recipe in plan.recipes:
            begun = time.perf_counter()
            given = budget.given(run, recipe, layer)
            fitted, measures, work = _fit_recipe(run, stream, layer, given, collected, folder)
            tensors |= {f"{recipe.name}/{name}": tensor for name, tensor in fitted.items()}
            record["fit"][recipe.name] = measures
            record["recipes"][recipe.name] = given.with_schemes(layer, *work.schemes).to_json()
            if plan.draft:
                record["variances"][recipe.name] = _variances(work, collected)
            if recipe.name in plan.budgets:
                sources: dict[Role, Source] = {role: _source(work, role, collected.queries) for role in ROLES}
                errors = budget.attention_errors(work, budget.served_options(plan.geometry), sources)
                record["attention"][recipe.name] = errors
                for role in ROLES:
                    measures[role]["attention_error"] = errors[role][0]
            record["seconds"][recipe.name] = time.perf_counter() - begun
        checkpoint.save(tensors, folder / "fit.safetensors")
        if not any(passes.clean(scheme) for recipe in plan.recipes for scheme in recipe.schemes):
            for index in range(len(plan.chunks)):
                run.activations.remove(folder / passes.file("capture", index))
                files.fault_point("capture.unlinked")
    run.activations.finished(run.folder, layer, max(plan.depth, 1), last=layer == plan.geometry.layers - 1)


def _capture(run: Run, stream: Stream, layer: int, folder: Path, seconds: dict) -> LayerStatistics:
    """Run the layer on every chunk, keep its keys and values, and sum what fits need of them and of its queries."""
    plan, width, device = run.plan, run.plan.geometry.width, stream.device
    sums = {
        sinks: (Moments(width, device), Moments(width, device))
        for sinks in {recipe.window.sinks for recipe in plan.recipes}
    }
    query_sums = None
    asked = any(takes(recipe, "capture") for recipe in plan.recipes)
    if plan.budgets or asked or (plan.draft and not all(map(by_gradients, plan.recipes))):
        query_sums = QuerySums(plan.geometry, stream.rope(plan.seq_len), plan.fitted_chunks, device)
    energy, counted = 0.0, 0
    shared = passes.Capture(run, stream, layer, folder, frozenset(sums), query_sums)
    captured = run.executor(passes.capture, shared, range(len(plan.chunks)))
    for (index, rows), chunk in zip(enumerate(plan.chunks), captured, strict=True):
        seconds["forward"] = seconds.get("forward", 0.0) + chunk.forward
        if index < plan.fitted_chunks:
            energy, counted = energy + chunk.energy, counted + len(rows) * (plan.seq_len - max(shared.sinks))
        for sinks, pair in chunk.moments.items():
            for total, partial in zip(sums[sinks], pair, strict=True):
                total.merge(index, partial)
        if query_sums is not None and index < plan.own_chunks:
            query_sums.merge(index, chunk.queries, len(rows))
        run.report(layer, "capture", index + 1, len(plan.chunks), len(rows) * plan.seq_len)
    moments = {sinks: (keys.value(), values.value()) for sinks, (keys, values) in sums.items()}
    return LayerStatistics(moments, energy / counted, *(query_sums.value() if query_sums is not None else ()))


def _fit_recipe(
    run: Run, stream: Stream, layer: int, recipe: Recipe, collected: LayerStatistics, folder: Path
) -> tuple[dict[str, Tensor], dict, RecipeWork]:
    """Keys first, then values, each: the stages fitted, then every chunk decoded.

    Returns tensors, measures, and the work, whose schemes have the settings that the fit found.
    """
    plan, work = run.plan, RecipeWork(run, stream, layer, recipe, folder)
    tensors: dict[str, Tensor] = {}
    measures: dict = {}
    for role, moments in zip(ROLES, collected.moments[recipe.window.sinks], strict=True):
        fit = SchemeFit(recipe, layer, role, plan.geometry, Statistics(moments.mean_C.float(), seed=plan.seed))
        fit.known, fit.rows = work.known(role), share.ROWS if plan.draft else 0
        fit.fit(_source(work, role, collected.queries))
        errors = Errors()
        decoded = run.executor(passes.decode, passes.Pass(work, fit), range(len(plan.chunks)))
        for index, of_chunk in enumerate(decoded):
            errors += of_chunk
            tokens = len(plan.chunks[index]) * plan.seq_len
            run.report(layer, f"{recipe.name} {role}s", index + 1, len(plan.chunks), tokens)
        work.fits[role] = fit
        tensors |= {f"layers.{layer}.{role}.{name}": tensor.cpu() for name, tensor in fit.tensors.items()}
        measures[role] = summary(errors)
        if fit.scheme.feedback is not None and collected.queries is not None and collected.held is not None:
            found = deviations(fit.scheme.feedback, collected.queries, collected.held)
            measures[role]["query_deviation"] = found
    work.leave()
    return tensors, measures, work


def _variances(work: RecipeWork, collected: LayerStatistics) -> dict[str, Any]:
    """By role, of schemes whose bits are shared out, the latent variances times what errors cost.

    A prediction from I inputs, fitted to n tokens, leaves 1 - I / n as much of them as of others."""
    run, recipe = work.run, work.recipe
    roles: list[Role] = [role for role in ROLES if share.shares(recipe.scheme(work.layer, role))]
    if by_gradients(recipe):
        cost = {role: float(_gradients(work, role).diagonal(dim1=-2, dim2=-1).mean()) for role in roles}
    else:
        assert collected.queries is not None, "bits are shared out by what queries make of errors"
        weight = run.files.output_projection(work.layer)
        variance_C = collected.moments[recipe.window.sinks][1].variance_C
        cost = share.costs(weight, collected.queries, variance_C, collected.energy, run.plan.geometry)
    found, count = {}, collected.moments[recipe.window.sinks][0].count
    for role in roles:
        inputs = run.plan.geometry.width * recipe.scheme(work.layer, role).inputs(work.layer, role).tokens
        left = max(1 - inputs / count, 0.1)
        scheme, seen = work.fits[role].scheme, work.fits[role].statistics
        variances_C, _ = seen.directions(rotate.metric(scheme.rotate))
        found[role] = (cost[role] / left * variances_C).tolist()
    return found


def _source(work: RecipeWork, role: Role, queries: LayerQueries | None) -> Source:
    """Everything that this run knows of a layer's keys, or values."""
    run, layer = work.run, work.layer

    def partials(fit: SchemeFit, asked: Asked) -> Iterator[list[Sums]]:
        return run.executor(passes.collect, passes.Pass(work, fit, asked), range(run.plan.fitted_chunks))

    return Source(
        partials,
        queries,
        projection=lambda: run.files.output_projection(layer).to(run.plan.device),
        gradients=lambda: _gradients(work, role),
        log_importance=lambda: gradients.log_importance(run, layer, role, work.recipe.window.sinks),
    )


def _gradients(work: RecipeWork, role: Role) -> Tensor:
    """Second moments of the gradients at keys, or at values, float64 [H, D, D]."""
    return gradients.moment(work.run, work.layer, role, work.recipe.window.sinks).to(work.run.plan.device)


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
    } | run.files.provenance
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
    """The recipe with what the fit found for the schemes of each layer, if it found anything."""
    for layer, one in enumerate(found):
        if one.at(layer) != recipe.at(layer):
            recipe = recipe.with_schemes(layer, *one.at(layer))
    return recipe


def seconds(run: Run) -> dict[str, float]:
    """Return the seconds of a finished run: "forward" (the model itself), "capture" around it, "gradients" on the way
    down, and each recipe."""
    totals: dict[str, float] = {}
    for part in budget.rounds(run):
        for layer in range(-1, run.plan.geometry.layers):
            for stage, spent in (checkpoint.record(part.folder, layer) or {}).get("seconds", {}).items():
                totals[stage] = totals.get(stage, 0.0) + spent
    return totals
