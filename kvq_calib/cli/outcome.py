"""Print the outcome of a calibration: its measurements, where the artifact is, what it took, and what to do next."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvq_calib.report import published
from kvq_calib.report.published import Published
from kvq_calib.run.activations import InMemory
from kvq_calib.run.run import Run
from kvq_runtime.artifact import ARTIFACT_FILE
from kvq_runtime.cli.table import print_table
from kvq_runtime.registry import verdict
from kvq_runtime.registry.measured import TextRecord
from kvq_runtime.registry.reference import registry_url
from kvq_runtime.registry.verdict import Verdict


def show(done: Sequence[Published], records: Sequence[TextRecord], as_json: bool, caution: str | None = None) -> None:
    """Print the table of results, then a paragraph an artifact, its verdict first; with `as_json`, a list of records.

    records   of the evaluation, artifacts first, then baselines; empty without one
    caution   a warning about a fit on few sequences: `verdict.thin`
    """
    beside = records[len(done) :]
    verdicts = [verdict.of_record(records[place] if records else None) for place in range(len(done))]
    if as_json:
        compared: dict[str, Any] = {"baselines": [published.baseline_record(one) for one in beside]} if beside else {}
        compared |= {"caution": caution} if caution else {}
        told = zip(done, verdicts, strict=True)
        print(json.dumps([made.record() | {"verdict": asdict(one)} | compared for made, one in told], indent=2))
        return
    rows = [made.row() for made in done] + [published.baseline_row(one) for one in beside]
    first = published.reference_row(records)
    print_table([dict.fromkeys(rows[0]) | first, *rows] if first else rows, json=False)
    if records:
        print("\nvs 16 bit: perplexity over that of the 16-bit model, less 1. KL: from it, nats per token.")
    for made in done:
        if made.layers:
            print(f"\n{made.recipe}: bits per element, and the error they put into the model's stream")
            names = ("layer", "keys", "values", "keys attention", "values attention")
            print_table([{name: row[name] for name in names} for row in made.layers], json=False)
    for made, one in zip(done, verdicts, strict=True):
        print("\n" + "\n".join(_paragraph(made, one, caution)))


def _paragraph(made: Published, found: Verdict, caution: str | None) -> list[str]:
    """Describe an artifact: whether it can be used, where it is, and what to do with it."""
    folder, said = Path(made.folder), [made.name, _line("VERDICT", f"{found.word.upper()}: {found.why}")]
    said += [_line("CAUTION", caution)] if caution else []
    for place in made.places:
        said.append(_line("published" if place.new else "was there", f"{place.reference} in {place.registry}"))
        said[-1] += "" if place.new else ": published already, nothing changed"
        said += [_line("artifact", place.path)] if place.path is not None else []
    if not made.places:
        said.append(_line("not published", "it exceeds the bounds" if made.failed else "as asked for"))
        said.append(_line("artifact", str(folder / ARTIFACT_FILE)))
    said.append(_line(_kinds(folder), made.folder))
    if made.failed:
        return said
    loads = made.reference if made.places else str(folder / ARTIFACT_FILE)
    said.append(_line("load it", f'KVQCache.from_pretrained("{loads}", model=model{_elsewhere(made, python=True)})'))
    if made.places and found.word == verdict.LOSSY:
        measure = "kvq compare --model M --recipes ...   (measures others; kvq promote refuses this one)"
        said.append(_line("find a better one", measure))
    elif made.places:
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
    import resource

    import torch

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
