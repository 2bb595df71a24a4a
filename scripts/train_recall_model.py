"""Train the recall model: Qwen2's architecture with 1.6 million parameters, on tasks of retrieval alone.

    python -m scripts.train_recall_model --out build/recall-model     10 minutes of a core

The tasks are those of `kvq_calib/tasks/synthetic.py`, with as many questions as a text has room for, the loss on
answers alone. Lengths grow from 128 to 4,096 tokens. Short texts are trained at the places of long ones: positions jump
ahead between statements (Zhu et al., 2023, PoSE), so that RoPE at all distances is learned cheaply, and the last stage
has only to learn how many tokens there are.

The model begins with circuits that are drawn, not found: alone they count without a mistake and answer 80 to 100% of
the other tasks' tokens. All weights are trained.

layer 0, heads 0, 1   the token before, by biases of keys and queries alone
layer 0, head 3       tokens like this one, beside the beginning of the text: the more there are, the less is left for
                      the beginning, and two neurons make that share a number
layer 1, heads 0, 1   what stands behind an earlier token like this one

Source: Olsson et al., 2022, In-context Learning and Induction Heads, for the first and the last.
"""

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from kvq_calib.tasks import synthetic
from kvq_calib.tasks.synthetic import Sample
from scripts.train_demo_model import add_settings, optimize, save

CONTEXT = 4096
BEGINNING = 6.0  # what the beginning of a text weighs beside one token that is looked for, where they are counted
TRAINED = ("multikey", "chain", "count", "needle", "passkey")
FIRST = 1 << 32  # seed of training: smaller ones are left to evaluations
JUMPS = 2  # of the positions of a row


@dataclass(frozen=True)
class Stage:
    """A part of the run: texts of one length, a number of tokens a step, up to this share of the run."""

    length: int
    tokens: int
    until: float


STAGES = (
    Stage(128, 2048, 0.12),
    Stage(256, 2048, 0.24),
    Stage(512, 4096, 0.38),
    Stage(1024, 4096, 0.55),
    Stage(4096, 8192, 1.0),
)


@dataclass(frozen=True)
class Settings:
    """One run. `steps` fixes the length and makes it repeatable; without it `minutes` of processor time do."""

    steps: int | None = None
    minutes: float = 10.0
    seed: int = 0
    rate: float = 5e-4  # of AdamW at its highest; warms up over 50 steps, falls linearly from half of the run on
    decay: float = 0.01

    def done(self, step: int, seconds: float) -> float:
        """The finished share of the run."""
        share = seconds / (60 * self.minutes) if self.steps is None else step / max(self.steps, 1)
        return min(share, 1.0) if self.steps != 0 else 1.0

    def rate_at(self, step: int, done: float) -> float:
        """The learning rate."""
        return self.rate * min(1.0, (step + 1) / 50) * max(0.02, min(1.0, 2 * (1 - done)))


def make_model(seed: int, layers: int = 3, theta: float = 1e8) -> Qwen2ForCausalLM:
    """The architecture, with its circuits drawn: four query heads and one KV head of 64, half as wide as hidden."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=synthetic.SIZE, hidden_size=256, intermediate_size=256, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=1, max_position_embeddings=2 * CONTEXT, tie_word_embeddings=False,
        bos_token_id=synthetic.BEGIN, eos_token_id=synthetic.END,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )  # fmt: skip
    config.head_dim = 64
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        _draw(model, theta)
    return model


def _draw(model: Qwen2ForCausalLM, theta: float) -> None:
    """Lay the circuits: the residual stream's first 192 directions are tokens', its last 64 the token before's.

    Keys that say what a token is are in the pairs of channels that RoPE turns by less than a radian in CONTEXT, by less
    than 0.15 where tokens are counted, so that far ones count as much as near ones.
    """
    turn = theta ** -(torch.arange(32) / 32)  # RoPE's angle per token, of pairs (i, i + 32)
    slow, still = ((turn * CONTEXT < most).repeat(2)[:, None].float() for most in (1.0, 0.15))
    last = 31  # channel of the slowest pair
    content = slow.clone()
    content[[last, 63]] = still[last] = 0.0
    basis = torch.linalg.qr(torch.randn(256, 256))[0]
    own, before = basis[:, :192], basis[:, 192:]
    names, answers, same = own[:, :64], own[:, 64:128], own[:, 128:]
    inner, heads = model.model, [layer.self_attn for layer in model.model.layers]
    tokens = torch.randn(synthetic.SIZE, 192)
    read = torch.cat([content, torch.zeros(64, 1), still]).flatten().bool()
    tokens[synthetic.BEGIN, read] = tokens[synthetic.END, read] = 0.0
    ends = torch.linalg.qr(tokens[[synthetic.BEGIN, synthetic.END]].T)[0]
    tokens -= tokens @ ends @ ends.T  # no other token looks like a beginning or an end
    # every token is as much like itself as any other is: what is matched has one norm, and so has all of it
    for part in (
        torch.nonzero(read[:64]).flatten(),
        torch.nonzero(read[64:]).flatten() + 64,
        torch.nonzero(~read).flatten(),
    ):
        tokens[:, part] *= (len(part) / 192) ** 0.5 / tokens[:, part].norm(dim=1, keepdim=True)
    tokens[[synthetic.BEGIN, synthetic.END]] = ends.T
    inner.embed_tokens.weight.copy_(tokens @ own.T)
    model.lm_head.weight.copy_(tokens @ own.T)
    begin, end = own @ ends[:, 0], own @ ends[:, 1]
    for layer in inner.layers:
        layer.mlp.down_proj.weight.mul_(0.5)

    # layer 0, heads 0 and 1: the token before, written where it does not meet the token itself
    back = torch.where(turn > 0.03, 7.7, 0.0)
    heads[0].k_proj.bias.copy_(torch.cat([back, torch.zeros(32)]))
    heads[0].q_proj.bias[:128] = torch.cat([back * turn.cos(), -back * turn.sin()]).repeat(2)
    heads[0].q_proj.weight[:128] = 0.0  # by place alone
    heads[0].v_proj.weight.copy_(names.T)
    heads[0].o_proj.weight[:, :128] = 0.055 * before.repeat(1, 2)
    # head 3: tokens like this one, beside the beginning of the text, whose weight falls with their number
    heads[0].k_proj.weight.copy_(2.3 * still * same.T)
    heads[0].q_proj.weight[192:] = 2.3 * still * same.T
    heads[0].k_proj.weight[last], heads[0].q_proj.weight[192 + last] = begin, 0.0
    alike = 2.3**2 * 256 * float(still.sum()) / 192 / 64**0.5  # the score of a token with one like itself
    heads[0].q_proj.bias[192 + last] = (alike + math.log(BEGINNING)) / (16 / 64**0.5)
    heads[0].v_proj.weight[63] = begin
    heads[0].o_proj.weight[:, [63, 127]] = 0.0
    heads[0].o_proj.weight[:, 192:] = 0.0
    heads[0].o_proj.weight[:, 255] = 0.06 * before[:, 63]
    _draw_numbers(model, before)

    # layer 1, heads 0 and 1: what stands behind an earlier token like this one, unless that is the end of a statement
    heads[1].k_proj.weight.copy_(1.9 * content * before.T)
    heads[1].q_proj.weight[:128] = 2.8 * (content * names.T).repeat(2, 1)
    heads[1].k_proj.weight[last] = -end
    heads[1].q_proj.bias[[last, 64 + last]] = 8.7
    heads[1].v_proj.weight.copy_(answers.T)
    heads[1].o_proj.weight[:, :128] = 0.4 * answers.repeat(1, 2)


def _draw_numbers(model: Qwen2ForCausalLM, before: Tensor) -> None:
    """Make the share s of head 3 a number, in the first MLP and in what NUMBERS are embedded as.

    Behind COUNT two neurons write a constant and s less a middle one, in two directions that nothing else is in. Both
    are as large as the norm of the rest has them, so that of NUMBERS the one nearest to s is the likeliest, whatever
    the norm. SHARES are those of one to MAX_MENTIONS mentions.
    """
    first, numbers = model.model.layers[0], slice(synthetic.NUMBERS[1], synthetic.NUMBERS[synthetic.MAX_MENTIONS] + 1)
    attention, mlp = first.self_attn, first.mlp
    one, is_number, how_many, share = before[:, 0], before[:, 1], before[:, 2], before[:, 63]
    for place in (0, 1, 2):
        attention.o_proj.weight[:, [place, 64 + place]] = 0.0
    attention.v_proj.weight[0] = 0.0
    attention.v_proj.bias[0] = 1.0
    reserved = before[:, [0, 1, 2, 63]]
    attention.o_proj.weight[:, 128:192] -= reserved @ reserved.T @ attention.o_proj.weight[:, 128:192]
    mlp.down_proj.weight -= reserved @ reserved.T @ mlp.down_proj.weight
    attention.o_proj.weight[:, 192] = one
    shares = [0.96 * BEGINNING / (BEGINNING + 1 + number) for number in range(1, synthetic.MAX_MENTIONS + 1)]
    middle = sum(shares) / len(shares)
    names = attention.v_proj.weight @ model.model.embed_tokens.weight[synthetic.COUNT]
    asked = before[:, 3:63] @ names[3:63] / names[3:63].norm()
    mlp.gate_proj.weight[:2] = 2.0 * (asked - 0.7 * one)
    mlp.up_proj.weight[0] = 0.1 * one
    mlp.up_proj.weight[1] = 1.0 * (middle * one - share)
    mlp.down_proj.weight[:, 0], mlp.down_proj.weight[:, 1] = is_number, how_many
    steps = torch.tensor([0.0, *(((low + high) / 2 - middle) for low, high in pairwise(shares))])
    counted = torch.arange(synthetic.MAX_MENTIONS) - (synthetic.MAX_MENTIONS - 1) / 2
    likely = 10.0 * steps.cumsum(0)
    model.lm_head.weight[numbers] = torch.outer(1.0 + likely - likely.mean(), is_number) + torch.outer(
        counted, how_many
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word for every symbol, with spaces between them; texts begin with BEGIN."""
    words = synthetic.words()
    inner = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=words[-1]))
    # whole words for AutoTokenizer as well, which splits as every Qwen2 model's tokenizer does
    inner.add_tokens([AddedToken(word, lstrip=True, normalized=False) for word in words])
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    begin = words[synthetic.BEGIN]
    inner.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"{begin} $A", special_tokens=[(begin, synthetic.BEGIN)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=begin, eos_token=words[synthetic.END], pad_token=begin
    )


def crowded(task: str, seed: int, length: int) -> Sample:
    """A text of a task with as many questions as there is room for, of a number of statements that varies."""
    random = Random(f"{task} {seed} of {length}")
    depth, full = random.random(), random.random() < 0.5
    if task == "multikey":
        keys = min(len(synthetic.KEYS), (length - 1) // 6)
        keys = keys if full else random.randint(1, keys)
        return synthetic.multikey(seed, length, depth, keys, min(keys, 256))
    if task == "chain":
        hops = random.randint(2, synthetic.HOPS)
        most = max(1, min(32, (length - 1) // (4 * hops + 2)))
        chains = most if full else random.randint(1, most)
        return synthetic.chain(seed, length, depth, chains, hops, chains)
    if task == "count":
        most = max(1, min(48, (length - 1) // (synthetic.MAX_MENTIONS + 3)))
        counted = most if full else random.randint(1, most)
        return synthetic.count(seed, length, depth, counted, counted)
    if task == "needle":
        most = max(1, min(48, (length - 1) // 12))
        needles = most if full else random.randint(1, most)
        return synthetic.needle(seed, length, depth, needles, needles)
    return synthetic.TASKS[task](seed, length, depth)


@dataclass(frozen=True)
class Batch:
    """Texts of one length: tokens, which of them are answers, at which positions, and the task of each row."""

    tokens_BT: Tensor
    answers_BT: Tensor
    positions_BT: Tensor
    tasks: tuple[str, ...]


def sample(stage: Stage, seed: int, step: int) -> Batch:
    """The texts of a step."""
    rows = max(1, stage.tokens // stage.length)
    order = (*(TRAINED[:4] * 4)[:15], TRAINED[4])  # a passkey is five answers, and learned from few
    tasks = tuple(order[(step * rows + row) % len(order)] for row in range(rows))
    texts = [crowded(task, FIRST * (seed + 1) + step * rows + row, stage.length) for row, task in enumerate(tasks)]
    batch = batched(texts, tasks)
    return replace(batch, positions_BT=jumping(batch.tokens_BT, seed * 1_000_003 + step))


def batched(texts: Sequence[Sample], tasks: tuple[str, ...]) -> Batch:
    """Texts of one length, each token at its place."""
    tokens = torch.tensor([text.tokens for text in texts])
    answers = torch.zeros_like(tokens, dtype=torch.bool)
    for row, text in enumerate(texts):
        place = len(text.context)
        for asked, answer in text.questions:
            answers[row, place + len(asked) : place + len(asked) + len(answer)] = True
            place += len(asked) + len(answer)
    return Batch(tokens, answers, torch.arange(tokens.shape[1]).expand_as(tokens), tasks)


def jumping(tokens_BT: Tensor, seed: int) -> Tensor:
    """Positions that jump ahead after some tokens of the filler or ends of statements, all within CONTEXT."""
    generator = torch.Generator().manual_seed(seed)
    batch, length = tokens_BT.shape
    between = (tokens_BT == synthetic.END) | (tokens_BT == synthetic.BEGIN)
    between |= (tokens_BT >= synthetic.FILLER.start) & (tokens_BT < synthetic.FILLER.stop)
    between[:, -1] = False
    after = torch.multinomial(between + 1e-6, JUMPS, generator=generator)
    far = torch.rand(batch, JUMPS, generator=generator) ** 2 * (CONTEXT - length) / JUMPS
    ahead = torch.zeros_like(tokens_BT).scatter_add_(1, (after + 1).clamp(max=length - 1), far.long())
    return torch.arange(length) + ahead.cumsum(1)


def answered(model: Qwen2ForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits at the answers, and the right ones: [A, vocabulary], [A]."""
    hidden = model.model(
        input_ids=batch.tokens_BT,
        attention_mask=torch.ones_like(batch.tokens_BT),  # without it jumps in positions would be taken for new texts
        position_ids=batch.positions_BT,
        use_cache=False,
    ).last_hidden_state
    wanted = batch.answers_BT[:, 1:]
    return model.lm_head(hidden[:, :-1][wanted]), batch.tokens_BT[:, 1:][wanted]


def groups(model: Qwen2ForCausalLM, settings: Settings) -> list[dict]:
    """Return the groups of weights, with their share of the rate and their decay.

    What counts a token's likes has them in exponents of 24: a step of Adam in embeddings or in layer 0, as large where
    a gradient is noise as where it is not, would undo it. They are trained at a three-hundredth of the rate.
    """
    slow, decayed, others = [], [], []
    for name, weight in model.named_parameters():
        first = "embed_tokens" in name or ".layers.0." in name
        (slow if first else decayed if weight.dim() > 1 else others).append(weight)
    return [
        {"params": slow, "weight_decay": 0.0, "share": 1 / 300},
        {"params": decayed, "weight_decay": settings.decay, "share": 1.0},
        {"params": others, "weight_decay": 0.0, "share": 1.0},
    ]


def train(model: Qwen2ForCausalLM, settings: Settings, stages: tuple[Stage, ...]) -> None:
    """Fit the model in place."""

    def loss_at(step: int, done: float, seconds: float) -> tuple[Tensor, str]:
        stage = next(stage for stage in stages if done < stage.until)
        logits, right = answered(model, sample(stage, settings.seed, step))
        share = (logits.argmax(-1) == right).float().mean().item()
        return cross_entropy(logits, right), f"{stage.length} tokens, {share:.1%} right"

    optimizer = torch.optim.AdamW(groups(model, settings), betas=(0.9, 0.98))
    optimize(model, optimizer, settings, loss_at, time.process_time)


@torch.no_grad()
def accuracy(model: Qwen2ForCausalLM, lengths: tuple[int, ...], samples: int) -> Mapping[str, float]:
    """The share of texts whose answers are all right, by task and length, at depths that are spread evenly."""
    found = {}
    for length in lengths:
        for task, make in synthetic.TASKS.items():
            right = 0
            for seed in range(samples):
                text = make(seed, length, (seed + 0.5) / samples)
                logits = model(input_ids=torch.tensor([text.tokens]), use_cache=False).logits[0].argmax(-1)
                place, whole = len(text.context), True
                for asked, answer in text.questions:
                    place += len(asked)
                    whole &= logits[place - 1 : place - 1 + len(answer)].tolist() == list(answer)
                    place += len(answer)
                right += whole
            found[f"{task} {length}"] = right / samples
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_settings(parser, Settings, Path("build/recall-model"))
    told = "texts of each task and length at the end (%(default)s)"
    parser.add_argument("--samples", type=int, default=50, help=told)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None, stages: tuple[Stage, ...] = STAGES) -> Mapping[str, float]:
    """Train, save, and return the accuracy by task and length."""
    given = parse(arguments)
    settings = Settings(given.steps, given.minutes, given.seed, given.rate)
    model = make_model(settings.seed)
    model.train()
    train(model, settings, stages)
    model.eval()
    size = save(model, make_tokenizer(), given.out, synthetic.BEGIN)
    found = accuracy(model.float(), tuple(sorted({stage.length for stage in stages})), given.samples)
    print(f"{given.out}: {size:,} bytes, {model.num_parameters():,} parameters")
    print(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    main()
