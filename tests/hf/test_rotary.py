"""The rotation that a cache undoes is the model's: cosines and sines by the papers' formulas, and keys before RoPE."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from generating import kvq
from models import prompt, random_model

from kvq_runtime.codec.codec import Codec
from kvq_runtime.hf.model import rotary_of

THETA, SIZE = 10000.0, 32
PLAIN = THETA ** (-np.arange(0, SIZE, 2) / SIZE)


def linear(factor: float) -> tuple[np.ndarray, float]:
    """Position interpolation (Chen et al., 2023)."""
    return PLAIN / factor, 1.0


def llama3(factor: float, low: float, high: float, context: int) -> tuple[np.ndarray, float]:
    """Llama 3.1's: long waves are stretched, short ones are not; between the two, by the turns in the context."""
    found = []
    for frequency in PLAIN:
        turns = context * frequency / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        found.append(share * frequency + (1 - share) * frequency / factor)
    return np.array(found), 1.0


def yarn(factor: float, context: int, fast: float = 32.0, slow: float = 1.0) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al., 2023): as above, but in proportion to the channel's number; cos and sin get a factor, too."""

    def channel(turns: float) -> float:
        """The pair of channels that turns so often in the context."""
        return SIZE * math.log(context / (2 * math.pi * turns)) / (2 * math.log(THETA))

    first, last = max(math.floor(channel(fast)), 0), min(math.ceil(channel(slow)), SIZE - 1)
    share = np.clip((np.arange(SIZE // 2) - first) / (last - first), 0, 1)
    return share * PLAIN / factor + (1 - share) * PLAIN, 0.1 * math.log(factor) + 1


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
CASES = {
    "default": ({}, (PLAIN, 1.0)),
    "linear": ({"factor": 2.5}, linear(2.5)),
    "llama3": (LLAMA3, llama3(8.0, 1.0, 4.0, 128)),
    "yarn": ({"factor": 4.0, "original_max_position_embeddings": 128}, yarn(4.0, 128)),
}


def a_model(kind: str):
    return random_model("llama", rope_parameters={"rope_type": kind, "rope_theta": THETA} | CASES[kind][0])


@pytest.mark.parametrize("kind", CASES)
def test_cos_and_sin_are_those_of_the_formula_and_of_the_model(kind):
    frequencies_K, factor = CASES[kind][1]
    assert kind == "default" or np.abs(frequencies_K / PLAIN - 1).max() > 0.5
    positions = torch.stack([torch.arange(60), torch.arange(440, 500)])  # each row its own
    module = a_model(kind).model.rotary_emb
    given = module(torch.zeros(1), positions)
    turning: Any = rotary_of(module, torch.float32)
    angles = positions.numpy()[..., None] * frequencies_K
    for ours, models, expected in zip(turning.tables(positions), given, (np.cos(angles), np.sin(angles)), strict=True):
        torch.testing.assert_close(torch.cat([ours, ours], -1), models, rtol=0, atol=1e-6)
        np.testing.assert_allclose(ours.numpy(), factor * expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", CASES)
def test_keys_are_encoded_as_the_model_projected_them(kind, monkeypatch):
    """Against the output of `k_proj`, which no rotation has touched: also in rows that are padded."""
    model, seen, projected = a_model(kind), [], []
    encode = Codec.encode

    def watching(self, x_NTC, context):
        if (self.layer, self.role) == (1, "key"):
            seen.append(x_NTC.clone())
        return encode(self, x_NTC, context)

    monkeypatch.setattr(Codec, "encode", watching)
    model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda module, args, out: projected.append(out))
    ids, cache = prompt(2, 120), kvq("exact-pre", model)
    mask = (torch.arange(120) >= torch.tensor([[0], [9]])).long()
    with torch.no_grad():
        for start, stop in ((0, 70), (70, 71), (71, 120)):
            model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
    blocks = torch.cat([part.unflatten(0, (2, -1)) for part in seen], 1).flatten(1, 2)
    expected = torch.cat(projected, 1)
    sinks, encoded = cache.blocks.recipe.window.sinks, cache.blocks.layers[1].encoded
    assert blocks.shape[1] == encoded >= 96
    for row, first in enumerate((sinks, 9 + sinks)):
        torch.testing.assert_close(blocks[row, first:], expected[row, first:encoded], rtol=1e-4, atol=1e-4)
