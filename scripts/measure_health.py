"""Measure what the check of blocks' errors finds on texts and models that a fit did not see, and what it costs.

    python scripts/measure_health.py [REFERENCE ...] [--registry URL]

An artifact of the demo model each (`kvq-calibrate --model demo --recipe ...`). Prints the tables of
benchmarks/records/health.md: the share of blocks beyond the promise, by what the model read; and the processor time of
a prompt with the check over that without it, in turns, also of recipes without a fit.
"""

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from statistics import median

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from kvq_calib.evaluate.record import load_model
from kvq_calib.model import find
from kvq_calib.report.tables import markdown_table
from kvq_calib.text import corpus, tokenizer
from kvq_runtime import KVQCache, load_artifact, preset
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.hf.model import CACHE

LENGTH, TOKEN, ROUNDS, UNFITTED = 1024, 300, 7, ("kivi-4bit", "higgs-2bit")
GERMAN = (
    "Der Wind kam am Abend aus Norden, und die Boote im Hafen lagen so unruhig, dass niemand mehr hinausfahren wollte. "
    "Die alte Frau am Kai zählte die Lichter auf dem Wasser, wie sie es jeden Tag tat, und schrieb die Zahl mit Kreide "
    "an die Tür des Schuppens. Wer fragte, wozu das gut sei, bekam keine Antwort, höchstens ein Nicken zum Meer hin. "
    "Später, als der Regen schon gegen die Scheiben schlug, ging noch einmal jemand den Steg entlang; man hörte die "
    "Schritte, dann nichts mehr. Am Morgen war die Zahl an der Tür eine andere, größer um eins. "
)


def texts(files) -> dict[str, Tensor]:
    """Windows by name, [windows, LENGTH]."""

    def held(source: str, count: int, length: int = LENGTH) -> Tensor:
        return corpus.select(source, files.path, count, length, 1, "held-out").tokens_BT.long()

    german = tokenizer.load(files.path)[0].encode(GERMAN * 12).ids
    random = torch.randint(0, files.vocabulary, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    return {
        "held-out text": held("demo", 16),
        "held-out text, twice as long": held("demo", 4, 2 * LENGTH),
        "code (demo-code)": held("demo-code", 4),
        "German prose, over and over": torch.tensor(german[:LENGTH])[None],
        "random tokens": random,
        "one token, over and over": torch.full((1, LENGTH), 500),
    }


def perturbed(model: PreTrainedModel, share: float) -> PreTrainedModel:
    """The model with noise of this share of the deviation of each matrix of its layers."""
    other, generator = deepcopy(model), torch.Generator().manual_seed(1)
    for name, x in other.named_parameters():
        if x.ndim == 2 and "layers" in name:
            x.data += share * x.data.std() * torch.randn(x.shape, generator=generator)
    return other


@contextmanager
def planted(model: PreTrainedModel, layer: int, times: float) -> Iterator[None]:
    """Multiply keys and values of one token, in block 2, in a layer."""

    def plant(module, inputs, out: Tensor) -> Tensor:
        if out.shape[1] <= TOKEN:  # a later pass
            return out
        out = out.clone()
        out[:, TOKEN] *= times
        return out

    attention = model.model.layers[layer].self_attn
    hooks = [one.register_forward_hook(plant) for one in (attention.k_proj, attention.v_proj)]
    yield
    for hook in hooks:
        hook.remove()


@torch.inference_mode()
def found(artifact: Artifact, model: PreTrainedModel, tokens: Tensor, of: Callable = lambda one: True) -> dict:
    """The blocks that a cache of these windows finds beyond; and the divergence of its last quarter from 16 bits, read
    from what it holds of the tokens before, with and without what is kept exact."""
    beyond, blocks, kls = 0, 0, []
    for row in tokens:
        exact, checked = DynamicCache(config=model.config), cache_of(artifact, model)
        unchecked = cache_of(artifact, model)
        unchecked.blocks.check = None
        logits = [_last(model, row, cache) for cache in (exact, checked, unchecked)]
        kls.append([float((logits[0].exp() * (logits[0] - one)).sum(-1).mean()) for one in logits[1:]])
        rows = [one for one in checked.health().layers if of(one)]
        beyond, blocks = beyond + sum(one.beyond for one in rows), blocks + sum(one.blocks for one in rows)
    checked, unchecked = torch.tensor(kls).mean(0).tolist()
    kl = {"KL": f"{checked:.4f}", "KL without the check": f"{unchecked:.4f}"}
    return {"blocks": blocks, "beyond": beyond, "share": f"{beyond / blocks:.1%}"} | kl


def cache_of(artifact: Artifact, model: PreTrainedModel) -> KVQCache:
    with warnings.catch_warnings(action="ignore"):  # of other weights
        return KVQCache.from_artifact(artifact, model, allow_other_weights=True)


def _last(model: PreTrainedModel, row: Tensor, cache: Cache) -> Tensor:
    """log-probabilities of the last quarter of a window, [tokens, vocabulary]."""
    first = len(row) * 3 // 4
    model(row[None, :first], **{CACHE: cache})
    return model(row[None, first:], **{CACHE: cache}).logits[0].double().log_softmax(-1)


def findings(artifact: Artifact, model: PreTrainedModel, windows: dict[str, Tensor]) -> Iterator[dict]:
    """A row for everything that a model may read, or be."""
    for name, tokens in windows.items():
        yield {"what": name} | found(artifact, model, tokens)
    own = windows["held-out text"][:4]
    for share in (0.02, 0.05, 0.1, 0.2):
        yield {"what": f"weights with {share:.0%} of noise"} | found(artifact, perturbed(model, share), own)
    for times in (3, 10, 30):
        with planted(model, 3, times):
            yield {"what": f"a token of layer 3 times {times}, its layer"} | found(
                artifact, model, own, lambda one: one.layer == 3
            )


@torch.inference_mode()
def cost(make: Callable[[], KVQCache], model: PreTrainedModel, tokens: Tensor) -> float:
    """Processor time of a prompt with the check over that without: the median of rounds, in each both by turns."""
    ratios = []
    for _ in range(ROUNDS):
        spent = []
        for checked in (False, True):
            cache = make()
            cache.blocks.check = cache.blocks.check if checked else None
            begun = time.process_time()
            model(tokens, **{CACHE: cache})
            spent.append(time.process_time() - begun)
        ratios.append(spent[1] / spent[0])
    return median(ratios)


def main() -> None:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("references", nargs="*", default=["demo-aqua-2bit"])
    top.add_argument("--registry")
    given = top.parse_args()
    logging.getLogger("kvq_runtime").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    files = find.resolve("demo")
    model, windows = load_model(files), texts(files)
    model.set_attn_implementation("kvq")
    prompt, rows = windows["held-out text"][:1], []
    for name in given.references:
        artifact = load_artifact(name, given.registry)
        seen = []
        for row in findings(artifact, model, windows):
            print(row, file=sys.stderr, flush=True)
            seen.append(row)
        print(f"\n{artifact.recipe.name}\n\n{markdown_table(seen)}", flush=True)
        ratio = cost(lambda artifact=artifact: KVQCache.from_artifact(artifact, model), model, prompt)
        rows.append({"recipe": artifact.recipe.name, "prompt with the check": f"{ratio - 1:+.1%}"})
    for name in UNFITTED:
        ratio = cost(lambda name=name: KVQCache.from_recipe(preset(name), model, health=True), model, prompt)
        rows.append({"recipe": name, "prompt with the check": f"{ratio - 1:+.1%}"})
    print(f"\n{markdown_table(rows)}")


if __name__ == "__main__":
    main()
