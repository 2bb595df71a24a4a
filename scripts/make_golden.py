"""Add golden artifacts: small ones of the recipes of GOLDEN, a block encoded, and what that decodes to.

    python scripts/make_golden.py       writes what git's HEAD does not hold of artifacts/golden/v1, and the digests of
                                        new presets in tests/recipes/presets.json; never changes what is committed

Of recipes without fitted tensors there is the block alone, in artifacts/golden/v1/unfitted. What was published once
must load and decode to the same numbers for ever: `tests/artifact/test_golden.py` reads all files here. The model is no
model: keys and values are a fixed chain of sines, so that nothing has to be kept to make them again.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvq_calib.fit import rotate
from kvq_calib.fit.chunks import Blocks, Chunk, blocks
from kvq_calib.fit.scheme import Asked, LayerSource, SchemeFit, Sums, summed
from kvq_calib.fit.statistics import Moments, Pair, QueryMoments
from kvq_runtime.artifact import artifact, recipe_text
from kvq_runtime.artifact.fingerprint import Fingerprint, probe
from kvq_runtime.codec.codec import Context
from kvq_runtime.codec.shared import build
from kvq_runtime.disk import strict_json
from kvq_runtime.fit.statistics import Statistics
from kvq_runtime.geometry import Geometry, Role
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.recipe import ROLES, Recipe, Scheme, preset, presets

FOLDER = Path(__file__).parents[1] / "artifacts" / "golden" / "v1"
PRESETS = Path(__file__).parents[1] / "tests" / "recipes" / "presets.json"
GEOMETRY = Geometry(layers=3, kv_heads=2, head_size=32)
TOKENS, SEQUENCES = 128, 4
SHOWN = 16  # of what an unfitted recipe decodes, every sixteenth token is kept
# recipes of every stage and family, with settings
GOLDEN = (
    "aqua-2bit",
    "aqua-2bit+key.predict=low_rank+value.predict=low_rank+name=aqua-2bit-rrr",
    "aqua-2bit+key.predict=mlp+value.predict=mlp+name=aqua-2bit-mlp",
    "aqua-2bit+all.predict.storage=gptq4+name=aqua-2bit-gptq",
    "aqua-2bit+key.axis=channel+value.axis=channel+name=aqua-2bit-channel",
    "aqua-2bit+all.predict.below=1,2+name=aqua-2bit-below-1-2",
    "aqua-fisher-1bit",
    "aqua-fisher-1bit+all.quantize.weighed=true+name=aqua-fisher-1bit-weighed",
    "fisher-2bit",
    "fisher-head-3bit",
    "gear-2bit",
    "gear-2bit+all.correct=low_rank+name=gear-l-2bit",
    "aqua-h2o-2bit",
    "higgs-2bit",
    "kivi-2bit",
    "kvarn-k4v2",
    "kvquant-3bit",
    "kivi-2bit+key.correct=sparse+key.correct.group=channel+value.correct=sparse+name=kivi-2bit-outliers",
    "oscar-2bit",
    "polar-3bit+all.predict=mean+position=pre+name=mean-polar-3bit",
    "polar-3bit+all.rotate=none+all.quantize=polar_fitted+all.quantize.levels=0+all.quantize.points=mean"
    "+name=polar-3bit-fitted-plain",
    "polar-paper+all.rotate=hadamard+all.rotate.group=head+all.quantize.points=mean+window.sinks=4+name=polar-hadamard",
    "quarot-2bit",
    "rtn-2bit",
    "squat-2bit",
    "squat-pre-2bit-paper+key.feedback.blocks=4+key.feedback.lam=5e-4+key.feedback.rank=60+name=squat-pre-2bit-llama3",
    "subkv-2bit",
    "svdq-2bit-v4",
    "svdq-wf-2bit-v4+value.quantize=exact+name=svdq-wf-2bit",
    "svdq-2bit-v4+key.quantize.bits=4,4,2,0,0,0,0,0+policies.chunks=on+name=svdq-shadow-1.25bit-v4",
    "turboquant-3bit",
    "lloyd-2bit+all.quantize.bits=1+name=lloyd-1bit",
    "mean-lloyd-3bit-post+all.quantize.bits=2+position=pre+name=mean-lloyd-2bit",
    "zipcache-2bit",
    "aqua-zipcache-2bit",
)


def recipes() -> tuple[list[Recipe], list[Recipe]]:
    """Recipes that have a golden artifact, and those without fitted tensors, which have a block alone."""
    named = [recipe_text.read(text) for text in GOLDEN]
    return [one for one in named if one.fitted], [one for one in named if not one.fitted]


def activations(layer: int) -> tuple[Tensor, Tensor]:
    """Keys before RoPE and values of one layer, [SEQUENCES, TOKENS, C]: waves that change slowly upward."""
    token = torch.arange(SEQUENCES * TOKENS, dtype=torch.float64).view(SEQUENCES, TOKENS, 1)
    channel = torch.arange(GEOMETRY.width, dtype=torch.float64)
    keys = torch.sin(token * (0.37 + 0.11 * channel) + 0.3 * layer) + 0.2 * torch.sin(token * channel**1.5 + layer)
    values = torch.sin(token * (0.23 + 0.07 * channel) - 0.2 * layer) + 0.3 * torch.cos(token * channel**1.2 - layer)
    return (keys + 2 * torch.cos(channel)).float(), values.float()


def queries(layer: int) -> Tensor:
    """Queries before RoPE of two heads a KV head, [SEQUENCES, TOKENS, 2 C]: waves of few frequencies."""
    token = torch.arange(SEQUENCES * TOKENS, dtype=torch.float64).view(SEQUENCES, TOKENS, 1)
    channel = torch.arange(2 * GEOMETRY.width, dtype=torch.float64)
    found = torch.sin(token * 0.31 + 0.7 * channel) + torch.cos(token * 1.7 + channel * (0.2 + 0.1 * layer))
    return (found + torch.sin(0.9 * token * (channel % 5))).float()


def rotary() -> Rotary:
    """The rotation of the model that there is none of."""
    half = GEOMETRY.head_size // 2
    return Rotary(10000.0 ** (-torch.arange(half) / half), 1.0, torch.float32)


def fit(recipe: Recipe) -> tuple[Recipe, dict[str, Tensor], dict[str, Tensor]]:
    """The recipe with what the fit found for it, the artifact's tensors; and of the first sequence, in every layer,
    what is stored and what that decodes to."""
    tensors: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    tables, below = rotary().tables(torch.arange(TOKENS)[None]), []
    for layer in range(GEOMETRY.layers):
        found: list[Tensor] = []
        schemes: list[Scheme] = []
        for role, x_NTC in zip(ROLES, activations(layer), strict=True):
            data = blocks(recipe, role, GEOMETRY, x_NTC, tables, range(SEQUENCES))
            moments = Moments(GEOMETRY.width)
            moments.update(x_NTC[:, recipe.window.sinks :])
            context = Context(rope=data.rope, keys=found[0] if found else None, below=below)
            source = one_chunk(layer, tables, role, data, context)
            known = {rotate.GradientMetric(): rotate.gradient_metric(source.gradients(), 1e-3)}  # of many gradients
            statistics = Statistics(moments.value().mean_C.float(), known)
            scheme = SchemeFit(recipe, layer, role, GEOMETRY, statistics)
            scheme.fit(source)
            schemes.append(scheme.scheme)
            fields = scheme.codec.encode(data.x, context)
            found.append(scheme.codec.decode(fields, context))
            tensors |= {f"layers.{layer}.{role}.{name}": tensor for name, tensor in scheme.tensors.items()}
            expected |= {f"layers.{layer}.{role}.{name}": field[:1] for name, field in fields.items()}
            expected[f"layers.{layer}.{role}.decoded"] = found[-1][:1].half().contiguous()
        below = [(found[0], found[1]), *below][:3]
        if (schemes[0], schemes[1]) != recipe.at(layer):
            recipe = recipe.with_schemes(layer, schemes[0], schemes[1])
    return recipe, tensors, expected


def one_chunk(layer: int, tables: Pair, role: Role, data: Blocks, context: Context) -> LayerSource:
    """A source of statistics: all sequences of a layer in one chunk. For gradients stand queries, and a channel."""

    def keys() -> Tensor:
        given = activations(layer)[0]
        return blocks(preset("oscar-2bit"), "key", GEOMETRY, given, tables, range(SEQUENCES)).x

    def partials(fit: SchemeFit, asked: Asked) -> Iterator[list[Sums]]:
        yield summed(asked, Chunk(fit.codec, data, context, keys))

    sums = QueryMoments(GEOMETRY)
    sums.update(queries(layer).unflatten(-1, (-1, GEOMETRY.head_size)), tables)
    found = sums.value()
    rows_NTC = activations(layer)[ROLES.index(role)]
    logs = rows_NTC[..., 0]  # of what errors count
    return LayerSource(partials, found, lambda: found.before, lambda: logs)


def first_block(recipe: Recipe, role: Role, x_NTC: Tensor) -> tuple[Tensor, Pair]:
    """The first block of the first sequence, [1, block, C], and the cosines and sines of its positions."""
    tables = rotary().tables(torch.arange(TOKENS)[None])
    data = blocks(recipe, role, GEOMETRY, x_NTC[:1], tables, range(1))
    return data.x[:1], (data.rope[0][:1], data.rope[1][:1])


def unfitted(recipe: Recipe) -> dict[str, Tensor]:
    """Encode layer 0 with a recipe without fitted tensors; return the fields, and a part of what they decode to."""
    found: dict[str, Tensor] = {}
    for codec, x_NTC in zip(build(recipe, GEOMETRY, {})[0], activations(0), strict=True):
        x_1TC, rope = first_block(recipe, codec.role, x_NTC)
        fields = codec.encode(x_1TC, Context(rope=rope))
        found |= {f"{codec.role}.{name}": field.contiguous() for name, field in fields.items()}
    return found | unfitted_decoded(recipe, found)


def unfitted_decoded(recipe: Recipe, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Decode those fields; return every sixteenth token."""
    found = {}
    for codec in build(recipe, GEOMETRY, {})[0]:
        fields = {name: stored[f"{codec.role}.{name}"] for name in codec.fields(torch.float32)}
        decoded = codec.decode(fields, Context(rope=first_block(recipe, codec.role, activations(0)[0])[1]))
        found[f"{codec.role}.decoded"] = decoded[:, ::SHOWN].half().contiguous()
    return found


def fingerprint() -> Fingerprint:
    """The fingerprint of the model that there is none of."""
    weights = {
        f"layers.{n}.{role}.fingerprint.probe": activations(n)[i][0] for n in range(3) for i, role in enumerate(ROLES)
    }
    probes = {name: probe(weight) for name, weight in weights.items()}
    return Fingerprint(GEOMETRY, {"rope_type": "default", "rope_theta": 10000.0}, False, probes)


def digest(recipe: Recipe) -> str:
    """A digest of a recipe's JSON in artifacts, name and summary included."""
    return sha256(strict_json.dumps(recipe.to_json()).encode()).hexdigest()[:16]


def committed(path: Path) -> bytes | None:
    """Return a file as git's HEAD holds it; None: it does not."""
    command = ["git", "-C", str(path.parent), "show", f"HEAD:./{path.name}"]
    shown = subprocess.run(command, capture_output=True, check=False)
    return shown.stdout if shown.returncode == 0 else None


def main() -> int:
    """Write what is not committed, and print each file, and each preset that is another than the committed one."""
    known, now = json.loads(committed(PRESETS) or b"{}"), {name: digest(recipe) for name, recipe in presets().items()}
    PRESETS.write_text(json.dumps(now | known, indent=1, sort_keys=True) + "\n")
    for name in sorted(now):
        if name not in known:
            print(f"{PRESETS.name}: {name} {now[name]}")
        elif known[name] != now[name]:
            print(f"{PRESETS.name}: {name} is another recipe than the committed one; give it another name")
    torch.set_num_threads(1)
    (FOLDER / "unfitted").mkdir(parents=True, exist_ok=True)
    fitted, without = recipes()
    for stated in fitted:
        path = FOLDER / f"{stated.name}.safetensors"
        if committed(path) is None:
            recipe, tensors, expected = fit(stated)
            source = {"model": "golden", "text": "sines"}
            path.unlink(missing_ok=True)
            save_file(expected, path.with_suffix(".expected"), metadata=None)
            artifact.save(artifact.Artifact(recipe, fingerprint(), tensors, source, {"layers": []}), path)
            print(f"{path.name}: {path.stat().st_size} bytes")
    for recipe in without:
        path = FOLDER / "unfitted" / f"{recipe.name}.expected"
        if committed(path) is None:
            save_file(unfitted(recipe), path, metadata=None)
            print(f"{path.name}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
