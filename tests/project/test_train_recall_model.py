"""The embedded recall model: at 16 bits it answers, and keys and values are narrow. The script that makes it: what it
trains on, the circuits that it begins with, which do what they are drawn for before any training, and that the same run
makes the same weights.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvq_calib.model import find as models
from kvq_calib.tasks import synthetic
from scripts import train_recall_model as script
from scripts.train_demo_model import LARGEST
from scripts.train_recall_model import make_model

STAGES = (script.Stage(96, 384, 0.5), script.Stage(160, 320, 1.0))


def run(folder, *more: str) -> dict[str, float]:
    given = ["--out", str(folder / "model"), "--samples", "1", "--steps", "4", *more]
    return dict(script.main(given, STAGES))


def weights(folder) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto").state_dict()


@pytest.mark.parametrize("task", script.TRAINED)
@pytest.mark.parametrize("length", [128, 1024])
def test_texts_to_train_on_are_of_one_length_and_mostly_have_many_questions(task, length):
    made = [script.crowded(task, seed, length) for seed in range(8)]
    assert {len(one.tokens) for one in made} == {length}
    assert task == "passkey" or sum(len(one.questions) for one in made) > 8


def test_answers_are_marked_where_they_stand():
    batch = script.sample(script.Stage(128, 2048, 1.0), 0, 0)
    for row, task in enumerate(batch.tasks):
        text = script.crowded(task, script.FIRST + row, 128)
        right = [token for _, answer in text.questions for token in answer]
        assert batch.tokens_BT[row][batch.answers_BT[row]].tolist() == right
    assert set(batch.tasks) == set(script.TRAINED)


def test_positions_jump_between_statements_alone_and_stay_in_the_context():
    tokens = script.sample(script.Stage(256, 8192, 1.0), 1, 3).tokens_BT
    steps = script.jumping(tokens, 7).diff(dim=1)
    assert steps.min() == 1 and script.jumping(tokens, 7).max() < script.CONTEXT
    before = tokens[:, :-1][steps > 1]
    filler = (before >= synthetic.FILLER.start) & (before < synthetic.FILLER.stop)
    assert len(before) > len(tokens) and bool((filler | (before == synthetic.END) | (before == synthetic.BEGIN)).all())


def test_what_counts_is_trained_slowly_and_all_of_the_model_is():
    model = make_model(0)
    found = script.groups(model, script.Settings())
    assert sum(weight.numel() for group in found for weight in group["params"]) == model.num_parameters()
    shares = {id(weight): group["share"] for group in found for weight in group["params"]}
    layers = model.model.layers
    assert shares[id(layers[0].self_attn.k_proj.weight)] == shares[id(model.model.embed_tokens.weight)] < 0.01
    assert shares[id(layers[1].self_attn.k_proj.weight)] == shares[id(model.lm_head.weight)] == 1


def test_the_tokenizer_has_a_word_for_every_symbol(tmp_path):
    script.make_tokenizer().save_pretrained(tmp_path)
    make_model(0).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    words = synthetic.words()
    text = " ".join([words[synthetic.ASK], words[synthetic.KEYS[3]], words[synthetic.END], words[synthetic.VALUES[0]]])
    assert tokenizer(text)["input_ids"] == [
        synthetic.BEGIN, synthetic.ASK, synthetic.KEYS[3], synthetic.END, synthetic.VALUES[0],
    ]  # fmt: skip


@pytest.mark.slow
def test_the_same_command_makes_the_same_weights_and_trains_them(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    found = run(one)
    assert set(found) == {f"{task} {length}" for task in script.synthetic.TASKS for length in (96, 160)}
    run(two)
    first, second = weights(one), weights(two)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    drawn = make_model(0).state_dict()
    assert any(not torch.equal(first[name].float(), drawn[name].bfloat16().float()) for name in first)


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
