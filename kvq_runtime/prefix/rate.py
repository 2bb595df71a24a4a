"""Keep prefixes in fewer bits than an artifact was fitted for: the same stages, rounded by coarser steps.

    steps x f, one f for all layers, keys and values → cells, and rungs of the same deviations → a set of its own

A place's step is in the unit of the model's loss, so that one factor moves all places along their curves of rate and
loss (`kvq_calib/run/share.py`). Which factor gives a rate follows from the artifact alone, and so do the bytes that
processes share; the recipe of a set states the steps. Bits are what the ladder says of the energy of latents,

    d² at f = d² at 1 + (n² at f - n² at 1) / 2

where n² is the error of the layers that a place is predicted from, as the prediction passes it on: noise of the size of
rounding errors goes through the fit's own matrices, from the first layer up. Errors resemble what is rounded, and
predictions cancel part of that; with a half, fits of 0.5 to 3 bits took within 5% of what was asked at 1.6 times their
steps, within 8% at 2.5 times. Before, d is scaled by what makes the bits at the fit's own step those that it counted on
text that it did not see.

A fit for fewer bits predicts with that noise in mind, and is better: `MOST` is where a coarser step still comes near.
A finer step is not made: channels that were too small for the fit's are not in the artifact.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.codec import shared
from kvq_runtime.geometry import ROLES, Role
from kvq_runtime.ops import ladder
from kvq_runtime.prefix.block_file import LENGTH, beside
from kvq_runtime.recipe import Recipe

PER = 24  # factors of an octave: so few that machines choose the same
MOST = PER  # of them: twice the step
PASSED = 0.5  # of an error's energy, what predictions pass on
SAMPLES = 128  # rows of noise
HALVINGS = 18
Place = tuple[int, Role]


def named(recipe: Recipe, layers: int) -> float | None:
    """Return the bits per element that files of an entropy-coded recipe were fitted for; None for other recipes."""
    stages: list[Any] = [scheme.quantize for n in range(layers) for scheme in recipe.at(n)]
    targets = [stage.target for stage in stages if stage.at_rest]
    return sum(targets) / len(targets) if targets else None


def coarser(artifact: Artifact, bits: float) -> Artifact:
    """The artifact with the steps at which files take so many bits per element, sinks in 16 bits and frames counted, of
    prefixes of LENGTH tokens of text like that of calibration. It promises no errors: the fit's were of its own steps.

    bits   at most those that the artifact was fitted for; the least are those at the coarsest step
    Raises ValueError for other bits, and for recipes whose files have no rate to set.
    """
    recipe, bits, layers = artifact.recipe, float(bits), artifact.fingerprint.geometry.layers
    own = named(recipe, layers)
    if own is None or not all(scheme.quantize.at_rest for n in range(layers) for scheme in recipe.at(n)):
        raise ValueError(f"bits={bits:g}; files of {recipe.name} have no rate to set; leave bits out, or use rest-*")
    if bits == own:
        return artifact
    model = _Model(artifact)
    least, most = model.bits(MOST), max(model.bits(0), own)
    if not least <= bits <= most:
        raise ValueError(
            f"bits={bits:g}; of {recipe.name} prefixes of {LENGTH} tokens can take {least:.3g} to {most:.3g} bits an "
            f"element; for others fit a recipe for these bits: kvq-calibrate --recipe "
            f"rest-1bit+all.quantize.target={bits:g}"
        )
    low, high = 0, MOST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if model.bits(middle) > bits else (low, middle)
    nearer = min((low, high), key=lambda number: abs(model.bits(number) - bits))
    # named by what the factor gives, so that requests that are equal, or near, share a set
    return _made(artifact, 2.0 ** (nearer / PER), float(f"{model.bits(nearer):.3g}")) if nearer else artifact


def _made(artifact: Artifact, factor: float, bits: float) -> Artifact:
    recipe, tensors = artifact.recipe, dict(artifact.tensors)
    for layer in range(artifact.fingerprint.geometry.layers):
        pair = []
        for role, scheme in zip(ROLES, recipe.at(layer), strict=True):
            stage: Any = scheme.quantize
            stage = replace(stage, step=float(f"{factor * stage.step:.6g}"), target=bits)
            cell, rung = (f"layers.{layer}.{role}.quantize.{name}" for name in ("cell", "rung"))
            tensors[cell], tensors[rung] = ladder.coarser(tensors[cell], tensors[rung], stage.step)
            pair.append(replace(scheme, quantize=stage))
        recipe = recipe.with_schemes(layer, *pair)
    recipe = replace(recipe, name=f"{recipe.name},bits={bits:g}")
    return replace(artifact, recipe=recipe, tensors=tensors, fit={})


class _Model:
    """The size of an artifact's files at coarser steps."""

    def __init__(self, artifact: Artifact):
        self.artifact, self.geometry = artifact, artifact.fingerprint.geometry
        self.codecs = shared.build(artifact.recipe, self.geometry, dict(artifact.tensors))  # held as long as this
        self.places: list[Place] = [(layer, role) for layer in range(self.geometry.layers) for role in ROLES]
        self.fixed = beside(artifact.recipe, self.geometry)
        energies = {place: self._fitted(place) for place in self.places}
        self.own = {place: energy_R.clone() for place, energy_R in energies.items()}
        for place, noise_R in self._passed(1.0, energies)[1].items():
            self.own[place] = energies[place] - noise_R

    def bits(self, number: int) -> float:
        """Per element of a prefix, at 2^(number / PER) times the steps."""
        energies = self._passed(2.0 ** (number / PER))[0]
        return self.fixed + sum(self._bits(place, energies[place]) for place in self.places) / len(self.places)

    def _passed(
        self, factor: float, known: dict[Place, Tensor] | None = None
    ) -> tuple[dict[Place, Tensor], dict[Place, Tensor]]:
        """Energies of residual latents [R], in cells, or those that are known, and of the noise among them."""
        generator, sent = torch.Generator().manual_seed(0), dict[Place, Tensor]()
        energies, noises = dict[Place, Tensor](), dict[Place, Tensor]()
        for place in self.places:
            layer, role = place
            codec = self.codecs[layer][ROLES.index(role)]
            own_R = self.artifact.tensors[f"layers.{layer}.{role}.quantize.cell"].double()
            stage: Any = self.artifact.recipe.scheme(*place).quantize
            cell_R = own_R.clamp_min(factor * stage.step)
            noises[place] = torch.zeros_like(own_R)
            if codec.below or codec.reads_keys:
                read = [sent[layer, "key"]] if codec.reads_keys else []
                for one in _turns(role, codec.reads_both):
                    read += [sent[layer - depth, one] for depth in codec.below]
                inputs = torch.cat(read, 1)
                latents_SR = codec.rotated(inputs @ codec.affine()[0])
                noises[place] = PASSED * latents_SR.double().square().mean(0) / own_R.square()
            energy_R = known[place] if known else self.own[place] + noises[place]
            energies[place] = energy_R * (own_R / cell_R).square()
            error_R = _between(ladder.ladder().error, energies[place]).clamp_min(0) * cell_R.square()
            back, noise_SR = codec.back, torch.randn(SAMPLES, len(own_R), dtype=torch.float32, generator=generator)
            assert back is not None, "latents have a way back"
            sent[place] = (noise_SR * error_R.sqrt().float()) @ back.float()
        return energies, noises

    def _fitted(self, place: Place) -> Tensor:
        """Energies at the fit's own step, in cells, at which codes take what the fit counted."""
        rung_R = self.artifact.tensors["layers.{}.{}.quantize.rung".format(*place)].double()
        energy_R = 4.0 ** ((rung_R + ladder.LOWEST) / ladder.PER)
        counted = self._counted(place)
        if counted is None:
            return energy_R
        low, high = -8.0, 8.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._bits(place, energy_R * 4.0**middle) < counted else (low, middle)
        return energy_R * 4.0**low

    def _counted(self, place: Place) -> float | None:
        """Bits an element that the fit counted; None: an older version's, or what is no such number."""
        layer, role = place
        layers = self.artifact.fit.get("layers")
        measured = layers[layer] if isinstance(layers, Sequence) and layer < len(layers) else None
        own = measured.get(role) if isinstance(measured, Mapping) else None
        found = own.get("coded_bits") if isinstance(own, Mapping) else None
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found < math.inf:
            return None
        return float(found)

    def _bits(self, place: Place, energy_R: Tensor) -> float:
        return float(_between(ladder.ladder().mean, energy_R).sum()) / self.geometry.width


def _turns(role: Role, both: bool) -> list[Role]:
    """Of what layers below hold, the roles that a prediction reads, in its order."""
    return sorted(ROLES, key=lambda one: one != role)[: 2 if both else 1]


def _between(table_K: Tensor, energy_R: Tensor) -> Tensor:
    """Of energies in cells, between two rungs in proportion."""
    place_R = (ladder.PER / 2 * energy_R.clamp_min(1e-30).log2() - ladder.LOWEST).clamp(0, ladder.RUNGS - 1)
    low_R = place_R.long().clamp(max=ladder.RUNGS - 2)
    return torch.lerp(table_K[low_R], table_K[low_R + 1], place_R - low_R)
