"""Print the plan of a calibration (`--dry-run`) and its outcome: measurements, places, cost, and what to do next."""

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kvq_calib.evaluate import quality_checks
from kvq_calib.evaluate.perplexity import AT_ONCE, LEAST
from kvq_calib.evaluate.record import default_dtype, fits, whole_bytes
from kvq_calib.job.job import Job
from kvq_calib.job.run import Published, baseline_record
from kvq_calib.model.streamed import Stream
from kvq_calib.report import tables
from kvq_calib.run.device import settle
from kvq_calib.run.run import Run
from kvq_runtime.artifact.header import ARTIFACT_FILE
from kvq_runtime.cli.table import print_table
from kvq_runtime.registry import rating
from kvq_runtime.registry.evaluation_records import TextRecord
from kvq_runtime.registry.rating import Rating
from kvq_runtime.registry.reference import registry_url

SAMPLE = 1024  # tokens that a layer is timed on


def plan(job: Job, work: Run) -> dict[str, Any]:
    """Return the plan as a record, with units in the names; `evaluation` is None without one."""
    plan, files = work.plan, work.files
    needs, most = plan.needs(files), job.eval_windows or quality_checks.windows(plan.seq_len)
    least, caches = min(most, job.eval_windows or LEAST), len(plan.recipes) + len(job.baselines)
    unit, fit_s, measured_s = "device_s" if plan.device.startswith("cuda") else "processor_s", None, None
    if files.local:
        fit_s = plan.tokens * seconds_a_token(work, getattr(torch, plan.dtype))
        measured_s = (1 + 1.5 * caches) * plan.seq_len * seconds_a_token(work, default_dtype(files, plan.device))
    evaluation = {
        "windows_at_least": least,
        "windows_at_most": most,
        f"{unit}_at_least": measured_s and measured_s * least,
        f"{unit}_at_most": measured_s and measured_s * most,
        "baselines": list(job.baselines),
        "bounds": dict(job.bounds.given),
        "bytes": whole_bytes(files, plan.device) + needs["chunk"] + 32 * AT_ONCE,
        "by_layer": not fits(files, plan.device),
    }
    return {
        "model": plan.model,
        "revision": plan.revision,
        **({"quantization": files.quantization} if files.quantization else {}),
        "layers": plan.geometry.layers,
        "recipes": [recipe.name for recipe in plan.recipes],
        **({"budgets": plan.budgets} if plan.budgets else {}),
        "artifacts": [job.artifact_name(files, recipe.name) for recipe in plan.recipes],
        "registries": [target.url for target in job.targets],
        "corpus": plan.corpus,
        "samples": plan.samples,
        "held_out": plan.held_out,
        "seq_len": plan.seq_len,
        "tokens": plan.tokens,
        "chunks": len(plan.chunks),
        f"fit_{unit}_at_least": fit_s,
        "evaluation": evaluation if job.evaluate else None,
        "device": plan.device,
        "dtype": plan.dtype,
        "threads": plan.threads,
        "layer_bytes": needs["layer"],
        "chunk_bytes": needs["chunk"],
        "activations": work.activations.description,
        "activation_bytes": needs["held"],
        "disk_bytes": needs["disk"],
        "download_bytes": files.download_bytes,
        "run_folder": str(work.folder),
        "plan": plan.digest,
    }


def seconds_a_token(work: Run, dtype: torch.dtype) -> float:
    """Time one layer on one sequence; return the seconds that the model takes for a token, its head included.

    Processor seconds, which other processes hardly change; on a GPU seconds.
    """
    plan, files, device = work.plan, work.files, torch.device(work.plan.device)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    stream = Stream(files, device, dtype)
    layer, h_BTE = stream.layer(0), stream.embed(torch.ones(1, min(plan.seq_len, SAMPLE), dtype=torch.long))
    for _ in range(2):  # the first warms up
        begun = clock()
        layer.forward(h_BTE)
        settle(device)
        spent = clock() - begun
    head = files.vocabulary * files.hidden / files.weights.layer_parameters(files.stretches[0])
    return spent / h_BTE.shape[1] * (plan.geometry.layers + head)


def show(
    done: Sequence[Published], records: Sequence[TextRecord], caution: str | None = None, json: bool = False
) -> None:
    """Print the table of results, then a paragraph an artifact, its verdict first; with `json` a record an artifact.

    records   of the evaluation, artifacts first, then baselines; empty without one
    caution   a warning about a fit on few sequences; None: there is none
    """
    beside = records[len(done) :]
    ratings = [rating.rate(records[place] if records else None) for place in range(len(done))]
    if json:
        more: dict[str, Any] = {"baselines": [baseline_record(one) for one in beside]} if beside else {}
        more |= {"caution": caution} if caution else {}
        pairs = zip(done, ratings, strict=True)
        print_table([made.record() | {"verdict": asdict(rated)} | more for made, rated in pairs], json=True)
        return
    print_table([made.row() for made in done], json=False)
    if records:
        print()
        print_table(tables.table(records), json=False)
        print("".join(f"\n{note}" for note in tables.notes(records)))
    for made, rated in zip(done, ratings, strict=True):
        if made.layers:
            print(f"\n{made.recipe}: bits per element by layer")
            print_table([{name: row[name] for name in ("layer", "keys", "values")} for row in made.layers], json=False)
        print("\n" + "\n".join(_paragraph(made, rated, caution)))


def _paragraph(made: Published, rated: Rating, caution: str | None) -> list[str]:
    """Describe an artifact: whether it can be used, where it is, and what to do with it."""

    def line(what: str, text: str) -> str:
        return f"  {what:14} {text}"

    lines = [made.name, line("VERDICT", f"{rated.word.upper()}: {rated.why}")]
    lines += [line("CAUTION", caution)] if caution else []
    for place in made.places:
        known = "" if place.new else " (these bytes were there already)"
        lines.append(line("published", f"{place.reference} in {place.registry}{known}"))
        lines += [line("WITHDRAWN", f"{place.yanked}; only its number loads it")] if place.yanked else []
    if not made.places:
        lines.append(line("not published", "it exceeds the bounds" if made.failed else "as asked for"))
    lines.append(line("files", made.folder))
    if made.failed:
        return lines
    other = made.places and made.places[0].path is not None and made.places[0].registry != registry_url()
    url = made.places[0].registry if other else ""  # of a folder that is not the registry in use
    loads = made.reference if made.places else str(Path(made.folder) / ARTIFACT_FILE)
    registry = f', registry="{url}"' if url else ""
    lines.append(line("load it", f'KVQCache.from_pretrained("{loads}", model=model{registry})'))
    option = f" --registry {shlex.quote(url)}" if url else ""
    if made.places and rated.word == rating.LOSSY:
        lines.append(line("find a better", "kvq compare --model M --recipes ...   (kvq promote refuses this one)"))
    elif made.places and rated.word == rating.NOT_MEASURED:
        command = f"kvq eval {made.reference}{option} --model M"
        lines.append(line("measure it", f"{command}   (until then kvq promote refuses it)"))
    elif made.places and made.places[0].yanked is None:
        lines.append(line("promote it", f"kvq promote {made.reference}{option}   (then its name alone means it)"))
    return lines


def show_cost(wall: float, spent: Mapping[str, float]) -> None:
    """Print what the run took.

    wall    seconds of this command
    spent   seconds by stage, of all commands that worked on the run; "evaluation": of this one
    """
    forward = spent.get("forward", 0.0)
    fit = sum(seconds for name, seconds in spent.items() if name != "evaluation")
    times = f", {fit / forward:.2f} times the model's own forward pass" if forward else ""
    evaluation = f", the evaluation {spent['evaluation']:.1f} s" if "evaluation" in spent else ""
    print(f"\n{wall:.1f} s; the fit took {fit:.1f} s{times}{evaluation}.")
