"""Print what a calibration would do (`kvq-calibrate --dry-run`), as JSON and in lines for people, and what came of it:
measurements, where the artifact is, what it took, and what to do next.
"""

import resource
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from kvq_calib.evaluate import held_out
from kvq_calib.evaluate.record import fits, whole_bytes
from kvq_calib.job.job import Job
from kvq_calib.model.streamed import Stream
from kvq_calib.report import published
from kvq_calib.report.published import Published
from kvq_calib.run import budget, gradients, share
from kvq_calib.run.device import settle
from kvq_calib.run.plan import Plan, set_arithmetic
from kvq_calib.run.run import InMemory, Run
from kvq_calib.text import corpus
from kvq_runtime.artifact.header import ARTIFACT_FILE
from kvq_runtime.cli.table import print_table
from kvq_runtime.errors import counted
from kvq_runtime.registry import rating
from kvq_runtime.registry.evaluation_records import TextRecord
from kvq_runtime.registry.rating import Rating
from kvq_runtime.registry.reference import registry_url


def plan(asked: Job, work: Run) -> dict[str, Any]:
    """The plan as JSON, with units in the names. `evaluation` is None without one."""
    plan, files = work.plan, work.files
    needs = plan.needs(files)
    return {
        "model": plan.model,
        "revision": plan.revision,
        **({"quantization": files.quantization} if files.quantization else {}),
        "layers": plan.geometry.layers,
        "recipes": [recipe.name for recipe in plan.recipes],
        "artifacts": [asked.artifact_name(files, recipe.name) for recipe in plan.recipes],
        "registries": [target.url for target in asked.publication.targets],
        "corpus": plan.corpus,
        "samples": plan.samples,
        "held_out": plan.held_out,
        "seq_len": plan.seq_len,
        "tokens": plan.tokens,
        "evaluation": _evaluation(asked, work) if asked.evaluation.evaluate else None,
        "chunks": len(plan.chunks),
        "sequences_per_chunk": plan.chunk,
        **_rounds(plan),
        **_time(work),
        "device": plan.device,
        "dtype": plan.dtype,
        "threads": plan.threads,
        "layer_bytes": needs["layer"],
        "chunk_bytes": needs["chunk"],
        "evaluation_bytes": whole_bytes(files, plan.device) if asked.evaluation.evaluate else 0,
        "evaluation_by_layer": asked.evaluation.evaluate and not fits(files, plan.device),
        "activations_in": work.activations.place,
        "held_bytes": needs["held"],
        "disk_bytes": needs["disk"],
        "download_bytes": files.download_bytes,
        "run_folder": str(work.folder),
        "plan": plan.digest,
    }


def lines(found: dict[str, Any]) -> dict[str, Any]:
    """The same for people: {what: in words}."""
    layer, chunk, whole = (found[f"{name}_bytes"] / 1e6 for name in ("layer", "chunk", "evaluation"))
    shown = {name: found[name] for name in ("model", "revision", "layers", "recipes", "artifacts")}
    shown["revision"] = found["revision"] or "local"
    if "quantization" in found:
        shown["weights"] = f"{found['quantization']}, dequantized"
    shown["published to"] = found["registries"] or "nowhere: they stay in the run folder"
    shown |= {"corpus": found["corpus"], "samples": f"{found['samples']} ({found['held_out']} held out)"}
    shown |= {name: found[name] for name in ("seq_len", "tokens")}
    shown["evaluation"] = _spoken(found["evaluation"])
    shown["chunks"] = f"{found['chunks']} of at most {counted(found['sequences_per_chunk'], 'sequence')}"
    if "budgets" in found:
        asked = ", ".join(f"{bits:g} bits" for bits in found["budgets"].values())
        other = f", {found['sequences_of_transfer']} of them of {found['transfer']}" if found["transfer"] else ""
        shown["budgets"] = (
            f"{asked}: {found['settings_per_layer']} settings for each layer's keys and values, measured on "
            f"{found['sequences_measured']} sequences{other}, in 2 to {found['rounds_at_most']} rounds, each a pass "
            "over the model"
        )
    if "shared_bits" in found:
        shown["shared bits"] = f"{', '.join(found['shared_bits'])}: after a draft, fitted to a part of the text"
    if "forward_seconds" in found:
        one, count = found["forward_seconds"], found["forward_passes"]
        passes = f"{count:g} {'pass' if count == 1 else 'passes'} of the model"
        each = "" if count == 1 else f", {_duration(one)} each"
        shown["time"] = (
            f"at least {_duration(one * count)}: {passes}{each}, as timed on one sequence in the "
            "first layer; fits and evaluation come on top"
        )
    shown["device"] = f"{found['device']}, {found['dtype']}, {counted(found['threads'], 'thread')}"
    shown["memory"] = f"{layer + chunk:.0f} MB: one layer and one chunk"
    if found["evaluation_by_layer"]:
        shown["memory"] += ", likewise to evaluate"
    elif whole:
        shown["memory"] += f"; then {whole:.0f} MB: the whole model, to evaluate"
    shown["memory"] += f"; beside Python and its libraries, {psutil.Process().memory_info().rss / 1e6:.0f} MB by now"
    held = f"{found['held_bytes'] / 1e6:.0f} MB at most"
    shown["activations"] = f"in {found['activations_in']}, {held}"
    shown["disk"] = f"{found['disk_bytes'] / 1e6:.0f} MB at most"
    if found["download_bytes"]:
        shown["download"] = f"{found['download_bytes'] / 1e9:.1f} GB of weights, by the calibration itself"
    return shown | {"run folder": found["run_folder"], "plan": found["plan"]}


def _time(work: Run) -> dict[str, float]:
    """Seconds of one pass of the model over all sequences, and how many passes there are at most; nothing where the
    weights are not here. The least of three times of one sequence in the first layer."""
    plan, files = work.plan, work.files
    if not files.local:
        return {}
    set_arithmetic(plan)
    stream = Stream(files, plan.device, getattr(torch, plan.dtype))
    hidden = stream.embed(torch.arange(plan.seq_len)[None] % files.vocabulary)
    layer, taken = stream.layer(0), []
    for _ in range(3):
        begun = time.perf_counter()
        layer.forward(hidden)
        settle(plan.device)
        taken.append(time.perf_counter() - begun)
    passes = float(budget.ROUNDS if plan.budgets else 1)
    if plan.descends:  # down through what all have gone up through once
        passes += 3 * sum(map(len, gradients.chunks(plan))) / plan.samples
    elif any(map(share.wanted, plan.recipes)):
        passes += share.draft(plan).tokens / plan.tokens
    count = plan.samples + plan.transfer_samples
    return {"forward_seconds": min(taken) * count * plan.geometry.layers, "forward_passes": round(passes, 2)}


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def _evaluation(asked: Job, work: Run) -> dict[str, Any]:
    plan, evaluation = work.plan, asked.evaluation
    return {
        "windows": evaluation.eval_windows or held_out.windows(plan, plan.seq_len),
        "windows_are": "asked for" if evaluation.eval_windows else "at most",
        "also": list(corpus.others(asked.beside(work.files))),
        "baselines": list(evaluation.baselines),
        "bounds": dict(evaluation.bounds.given),
    }


def _spoken(found: dict[str, Any] | None) -> str:
    if found is None:
        return "none"
    count = f"{'up to ' if found['windows_are'] == 'at most' else ''}{found['windows']}"
    also = "".join(f", and of {text}" for text in found["also"])
    beside = f", beside {', '.join(found['baselines'])}" if found["baselines"] else ""
    bounds = "".join(f", {name} at most {bound:g}" for name, bound in found["bounds"].items())
    return f"{count} held-out windows{also}{beside}{bounds}"


def _rounds(plan: Plan) -> dict[str, Any]:
    """Return what a plan's budgets make it do, if it has any."""
    shared = [recipe.name for recipe in plan.recipes if share.wanted(recipe)]
    if plan.budgets:
        return {
            "budgets": plan.budgets,
            "settings_per_layer": len(budget.served_options(plan.geometry)),
            "sequences_measured": sum(len(plan.chunks[index]) for index in budget.measured_chunks(plan)),
            "transfer": plan.transfer,
            "sequences_of_transfer": plan.transfer_samples,
            "rounds_at_most": budget.ROUNDS,
        }
    return {"shared_bits": shared} if shared else {}


def as_records(
    done: Sequence[Published], records: Sequence[TextRecord], caution: str | None = None
) -> list[dict[str, Any]]:
    """Return what `--json` prints of each artifact; the arguments are those of `show`."""
    beside = records[len(done) :]
    compared: dict[str, Any] = {"baselines": [published.baseline_record(one) for one in beside]} if beside else {}
    compared |= {"caution": caution} if caution else {}
    told = zip(done, _verdicts(done, records), strict=True)
    return [made.record() | {"verdict": asdict(one)} | compared for made, one in told]


def _verdicts(done: Sequence[Published], records: Sequence[TextRecord]) -> list[Rating]:
    return [rating.rate(records[place] if records else None) for place in range(len(done))]


def show(done: Sequence[Published], records: Sequence[TextRecord], caution: str | None = None) -> None:
    """Print the table of results, then a paragraph an artifact, its verdict first.

    records   of the evaluation, artifacts first, then baselines; empty without one
    caution   a warning about a fit on few sequences: `rating.fit_warning`
    """
    beside = records[len(done) :]
    rows = [row for made in done for row in made.rows()]
    rows += [row for one in beside for row in published.baseline_rows(one)]
    first = published.reference_row(records)
    first |= {"text": rows[0]["text"]} if first and "text" in rows[0] else {}
    print_table([dict.fromkeys(rows[0]) | first, *rows] if first else rows, json=False)
    if records:
        print("\nvs 16 bit: perplexity over that of the 16-bit model, less 1. KL: from it, nats per token.")
        if any("beyond" in row for row in rows):
            print("beyond: blocks of keys or values whose error is beyond 99.9% of those in calibration.")
    for made in done:
        if made.layers:
            print(f"\n{made.recipe}: bits per element, and the error they put into the model's stream")
            names = ("layer", "keys", "values", "keys attention", "values attention")
            print_table([{name: row[name] for name in names} for row in made.layers], json=False)
    for made, one in zip(done, _verdicts(done, records), strict=True):
        print("\n" + "\n".join(_paragraph(made, one, caution)))


def _paragraph(made: Published, found: Rating, caution: str | None) -> list[str]:
    """Describe an artifact: whether it can be used, where it is, and what to do with it."""
    folder, said = Path(made.folder), [made.name, _line("VERDICT", f"{found.word.upper()}: {found.why}")]
    said += [_line(f"on {text}", lost) for text, lost in published.lines(made.measured).items()]
    said += [_line("CAUTION", caution)] if caution else []
    for place in made.places:
        said.append(_line("published" if place.new else "was there", f"{place.reference} in {place.registry}"))
        said[-1] += "" if place.new else ": published already, nothing changed"
        said += [_line("WITHDRAWN", f"{place.yanked}; by its number alone it is loaded")] if place.yanked else []
        said += [_line("artifact", place.path)] if place.path is not None else []
    if not made.places:
        said.append(_line("not published", "it exceeds the bounds" if made.failed else "as asked for"))
        said.append(_line("artifact", str(folder / ARTIFACT_FILE)))
    said.append(_line(_kinds(folder), made.folder))
    if made.failed:
        return said
    loads = made.reference if made.places else str(folder / ARTIFACT_FILE)
    loaded = f'"{loads}", model=model{_elsewhere(made, python=True)})'
    said.append(_line("load it", f"KVQCache.from_pretrained({loaded}"))
    if made.places and found.word == rating.LOSSY:
        measure = "kvq compare --model M --recipes ...   (measures others; kvq promote refuses this one)"
        said.append(_line("find a better one", measure))
    elif made.places and made.places[0].yanked is None:
        told = f"kvq promote {made.reference}{_elsewhere(made, python=False)}"
        said.append(_line("promote it", f"{told}   (then the name alone means this version)"))
    return said


def _line(what: str, text: str) -> str:
    return f"  {what:20} {text}"


def _kinds(folder: Path) -> str:
    """List what is in the folder beside the artifact."""
    kinds = {"card": "README.md", "plots": "*.png", "record": "evaluation.json"}
    return ", ".join(kind for kind, pattern in kinds.items() if any(folder.glob(pattern)))


def _elsewhere(made: Published, python: bool) -> str:
    """The option that names the registry, where it is a folder other than the one in use."""
    if not made.places or made.places[0].path is None or made.places[0].registry == registry_url():
        return ""
    url = made.places[0].registry
    return f', registry="{url}"' if python else f" --registry {shlex.quote(url)}"


def cost(wall: float, spent: Mapping[str, float], layers: tuple[int, int]) -> None:
    """Write what the run took.

    wall     seconds of this command
    spent    seconds by stage, of all commands that worked on the run; "evaluation": of this one
    layers   how many of them were fitted before this command, and in all
    """
    stages = {name: seconds for name, seconds in spent.items() if name not in ("forward", "evaluation")}
    forward, before, count = spent.get("forward", 0.0), *layers
    total = forward + sum(stages.values())
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in stages.items())
    times = f"{total / forward:.2f} times the model's own forward pass in them ({forward:.1f} s): " if forward else ""
    when = ""
    if before:
        when = ", in an earlier run of this command" if before == count else f", {before} of {count} in an earlier run"
    print(f"\n{wall:.1f} s. The layers took {total:.1f} s{when}, {times}{parts}.", end="")
    print(f" The evaluation took {spent['evaluation']:.1f} s." if "evaluation" in spent else "")


def peak(work: Run) -> None:
    """Write how much memory the run took, beside the plan's for one layer, one chunk, and activations held there."""
    plan, needs = work.plan, work.plan.needs(work.files)
    planned = f"one layer {needs['layer'] / 1e6:.0f} MB, one chunk {needs['chunk'] / 1e6:.0f} MB"
    if isinstance(work.activations, InMemory):
        planned += f", activations {needs['held'] / 1e6:.0f} MB in {work.activations.place.partition(',')[0]}"
    if plan.device.startswith("cuda"):
        held = torch.cuda.max_memory_allocated(plan.device)
        print(f"At most {held / 1e6:.0f} MB on {plan.device} (plan: {planned}).")
    else:
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(f"At most {held:.0f} MB of memory, Python and its libraries included (plan: {planned}).")
