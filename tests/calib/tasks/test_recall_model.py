"""The embedded recall model: at 16 bits it answers, and keys and values are narrow."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvq_calib.model import find as models
from scripts import train_recall_model as script
from scripts.train_demo_model import LARGEST


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(models.resolve("recall").path, dtype=torch.float32)


def test_sixteen_bits_answer_98_of_100_in_each_task(model):
    """Answers of texts that neither training nor an evaluation draws, each with as many questions as it holds."""
    right, of = dict.fromkeys(script.TRAINED, 0), dict.fromkeys(script.TRAINED, 0)
    for length, texts in ((512, 3), (4096, 1)):
        for task in script.TRAINED:
            batch = script.batched([script.crowded(task, seed, length) for seed in range(texts)], (task,) * texts)
            with torch.inference_mode():
                logits, wanted = script.answered(model, batch)
            right[task] += int((logits.argmax(-1) == wanted).sum())
            of[task] += len(wanted)
    assert {task: right[task] / of[task] for task in of if right[task] < 0.98 * of[task]} == {}


def test_keys_and_values_are_at_most_half_as_wide_as_the_hidden_state(model):
    """What predicts a layer's cache from the one below has no more to predict from than in a large model."""
    files = models.resolve("recall")
    assert 2 * files.geometry.width <= model.config.hidden_size / 2
    assert files.entry.corpus == "recall" and files.entry.beside() == ()
    assert (files.path / "model.safetensors").stat().st_size <= LARGEST
