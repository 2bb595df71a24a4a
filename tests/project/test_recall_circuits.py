"""The circuits that the recall model begins with: they do what they are drawn for, before any training."""

import torch

from scripts import train_recall_model as script
from scripts.train_recall_model import make_model


def test_the_first_layer_looks_one_token_back():
    """What the biases are drawn for: far more than half of a head's attention is on the token before."""
    model = make_model(0)
    model.set_attn_implementation("eager")
    tokens = script.sample(script.Stage(256, 256, 1.0), 0, 0).tokens_BT
    with torch.inference_mode():
        weights = model(tokens, output_attentions=True).attentions[0][0, 0]
    assert weights.diagonal(-1)[1:].mean() > 0.9


def test_the_drawn_heads_count():
    """Before any training, in short texts and in long ones."""
    model = make_model(0).eval()
    for length in (128, 1024):
        texts = [script.crowded("count", seed, length) for seed in range(4)]
        right = asked = 0
        for text in texts:
            with torch.inference_mode():
                found = model(torch.tensor([text.tokens]), use_cache=False).logits[0].argmax(-1)
            answers = len(text.context) + 2 + 3 * torch.arange(len(text.questions))
            right += int((found[answers - 1] == torch.tensor([answer for _, (answer,) in text.questions])).sum())
            asked += len(answers)
        assert right >= 0.98 * asked > 20
