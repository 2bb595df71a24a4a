"""Print what a calibration would do: `kvq-calibrate --dry-run`, as JSON of plain numbers and as lines for people."""

import time
from typing import Any

import torch

from kvq_calib.evaluate import held_out
from kvq_calib.evaluate.record import fits, whole_bytes
from kvq_calib.job.job import Job
from kvq_calib.model.streamed import Stream
from kvq_calib.run import budget, gradients, sensitivity, share
from kvq_calib.run.device import settle
from kvq_calib.run.plan import Plan, set_arithmetic
from kvq_calib.run.run import Run
from kvq_calib.text import corpus


def record(asked: Job, work: Run) -> dict[str, Any]:
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
    shown["chunks"] = f"{found['chunks']} of at most {found['sequences_per_chunk']} sequences"
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
        shown["time"] = (
            f"at least {_duration(one * count)}: {count:g} passes of the model, {_duration(one)} each, as timed on one "
            "sequence in the first layer; fits and evaluation come on top"
        )
    threads = f"{found['threads']} thread{'s' if found['threads'] > 1 else ''}"
    shown["device"] = f"{found['device']}, {found['dtype']}, {threads}"
    shown["memory"] = f"{layer + chunk:.0f} MB: one layer and one chunk"
    if found["evaluation_by_layer"]:
        shown["memory"] += ", likewise to evaluate"
    elif whole:
        shown["memory"] += f"; then {whole:.0f} MB: the whole model, to evaluate"
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
    if files.headers is not None:
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
            "settings_per_layer": max(
                len(budget.settings(recipe, plan.geometry, "key"))
                for recipe in plan.recipes
                if recipe.name in plan.budgets
            ),
            "sequences_measured": sum(len(plan.chunks[index]) for index in sensitivity.chunks(plan)),
            "transfer": plan.transfer,
            "sequences_of_transfer": plan.transfer_samples,
            "rounds_at_most": budget.ROUNDS,
        }
    return {"shared_bits": shared} if shared else {}
