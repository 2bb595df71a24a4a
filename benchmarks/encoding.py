"""Time what recipes cost where no token is generated: the fit, and to encode and decode a token.

    python benchmarks/encoding.py aqua-1bit aqua-metric-1bit aqua-metric-1bit-vocab [--rounds 5] [--json FILE]

Recipes are presets, or presets with settings (`aqua-1bit+key.predict=mean`). All are fitted in one pass over the
model, as `kvq compare` does it; then encodings take turns: a round is one of each recipe, so that whatever else the
machine does falls on all of them. Of fits and rounds the median is given, with the least and the greatest. The clock is
the process's CPU time, of one thread.

fit      seconds of a recipe's own fit on `--samples` sequences; rows "forward" and "capture" are what all share, which
         recipes whose bits are shared out need a second time
encode   microseconds of a token in all layers, keys and values: the blocks of a window of `--length` tokens, one row,
         are encoded one after the other, and decoded where the layer above is predicted from them
decode   likewise, all encoded blocks of a layer at once, as under an attention that reads decoded tokens
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvq_calib.evaluate.full import FullCache
from kvq_calib.evaluate.reads import counting
from kvq_calib.evaluate.record import load_model
from kvq_calib.model import find as models
from kvq_calib.model.files import ModelFiles
from kvq_calib.run import calibrate, checkpoint, plan
from kvq_calib.run.run import Run
from kvq_calib.text import corpus
from kvq_runtime.artifact import recipe_text
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.cli.table import print_table
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.decode import Pair

Clock = Callable[[], float]


class TimedCache(FullCache):
    """A full encode of one pass, whose encoding and decoding are timed: `spent`, in seconds of the clock."""

    def __init__(
        self, recipe: Recipe, model: PreTrainedModel, tensors: Mapping[str, Tensor], length: int, clock: Clock
    ):
        if recipe.policies:
            raise ValueError(
                f"{recipe.name} chooses among tokens, or is fitted to its prompt; time recipes that do not"
            )
        super().__init__(recipe, model, tensors, length=length)
        self.clock, self.spent = clock, {"encode": 0.0, "decode": 0.0}

    def _encode(self, layer: int) -> Pair:
        begun = self.clock()
        self.blocks.encoder.flush(layer)
        encoded = self.clock()
        pair = self.blocks.decoder.whole(layer)
        self.spent["encode"] += encoded - begun
        self.spent["decode"] += self.clock() - encoded
        return pair

    def _count(self, *counted: Any, **more: Any) -> None:
        """What is read is not counted: nobody asks."""


def fitted(work: Run, clock: Clock) -> tuple[dict[str, float], dict[str, Artifact]]:
    """Seconds of a run by recipe, and under "forward" and "capture" those that all share; and the artifacts."""
    with patch("time.perf_counter", clock), checkpoint.claimed(work.folder):
        made = calibrate.fit(work)
    return calibrate.seconds(work), made


@torch.inference_mode()
def encoded(
    model: PreTrainedModel, tokens_T: Tensor, recipe: Recipe, tensors: Mapping[str, Tensor], clock: Clock
) -> dict[str, float]:
    """Seconds of encoding and of decoding a window, all layers."""
    cache = TimedCache(recipe, model, tensors, len(tokens_T), clock)
    with counting(model, cache):
        model(tokens_T[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache.spent


def measure(
    files: ModelFiles, recipes: Sequence[Recipe], samples: int, length: int, rounds: int, fits: int, clock: Clock
) -> list[dict[str, Any]]:
    """A row a recipe: bits, and of fit, encode and decode the median, least and greatest."""
    made: dict[str, tuple[Recipe, Mapping[str, Tensor]]] = {recipe.name: (recipe, {}) for recipe in recipes}
    times: dict[str, dict[str, list[float]]] = {}
    to_fit = [recipe for recipe in recipes if recipe.fitted]
    for _ in range(fits if to_fit else 0):
        settings = plan.make(files, to_fit, samples=samples, seq_len=length, threads=1)
        with tempfile.TemporaryDirectory() as folder:
            spent, artifacts = fitted(Run(settings, files, Path(folder)), clock)
        for name, seconds in spent.items():
            times.setdefault(name, {}).setdefault("fit s", []).append(seconds)
        made |= {name: (one.recipe, one.tensors) for name, one in artifacts.items()}
    model = load_model(files)
    (tokens_T,) = corpus.select(files.entry.corpus, files.path, 1, length, 0, "held-out").tokens_BT.long()
    for turn in range(rounds + 1):
        for name, (recipe, tensors) in made.items():
            for what, spent in encoded(model, tokens_T, recipe, tensors, clock).items():
                if turn:  # the first round warms up
                    times.setdefault(name, {}).setdefault(f"{what} us", []).append(1e6 * spent / length)
    return [{"recipe": name, **_figures(found)} for name, found in times.items()]


def _figures(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each time, its least and its greatest."""
    return {
        head: value
        for name, some in times.items()
        for head, value in ((name, median(some)), (f"{name} least", min(some)), (f"{name} greatest", max(some)))
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write JSON."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("recipes", nargs="+", metavar="RECIPE", help="a preset, or one with settings")
    top.add_argument("--model", default="demo", help="a name of the catalog, a folder or a Hub id")
    top.add_argument("--samples", type=int, default=24, help="sequences to fit on")
    top.add_argument("--length", type=int, default=1024, help="tokens of a sequence, and of the window")
    top.add_argument("--rounds", type=int, default=5, help="encodings of each recipe")
    top.add_argument("--fits", type=int, default=3, help="fits of each recipe, 1 or more")
    top.add_argument("--json", metavar="FILE", help="write the rows")
    args = top.parse_args(arguments)
    torch.set_num_threads(1)
    files = models.resolve(args.model)
    recipes = recipe_text.distinct(recipe_text.read(text).check(files.geometry) for text in args.recipes)
    rows = measure(files, recipes, args.samples, args.length, args.rounds, args.fits, time.process_time)
    print_table(rows, json=False)
    if args.json:
        about = {"benchmark": "encoding", "model": files.id, "samples": args.samples, "length": args.length}
        about |= {"torch": torch.__version__, "threads": 1}
        Path(args.json).write_text("".join(json.dumps(about | row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
