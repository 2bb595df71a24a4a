"""Draw the recall model's circuits into a new model of Qwen2's architecture, before `train_recall_model.py` trains it.

    layer 0, heads 0, 1   the token before, by biases of keys and queries alone
    layer 0, head 3       tokens like this one, beside the beginning of the text: the more there are, the less is left
                          for the beginning, and two neurons make that share a number
    layer 1, heads 0, 1   what stands behind an earlier token like this one

Source: Olsson et al., 2022, In-context Learning and Induction Heads, for the first and the last.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvq_calib.tasks import symbols, synthetic

CONTEXT = 4096
BEGINNING = 6.0  # what the beginning of a text weighs beside one token that is looked for, where they are counted


def make_model(seed: int, layers: int = 3, theta: float = 1e8) -> Qwen2ForCausalLM:
    """The architecture, with its circuits drawn: four query heads and one KV head of 64, half as wide as hidden."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=symbols.SIZE, hidden_size=256, intermediate_size=256, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=1, max_position_embeddings=2 * CONTEXT, tie_word_embeddings=False,
        bos_token_id=symbols.BEGIN, eos_token_id=symbols.END,
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
    tokens = torch.randn(symbols.SIZE, 192)
    read = torch.cat([content, torch.zeros(64, 1), still]).flatten().bool()
    tokens[symbols.BEGIN, read] = tokens[symbols.END, read] = 0.0
    ends = torch.linalg.qr(tokens[[symbols.BEGIN, symbols.END]].T)[0]
    tokens -= tokens @ ends @ ends.T  # no other token looks like a beginning or an end
    # every token is as much like itself as any other is: what is matched has one norm, and so has all of it
    for part in (
        torch.nonzero(read[:64]).flatten(),
        torch.nonzero(read[64:]).flatten() + 64,
        torch.nonzero(~read).flatten(),
    ):
        tokens[:, part] *= (len(part) / 192) ** 0.5 / tokens[:, part].norm(dim=1, keepdim=True)
    tokens[[symbols.BEGIN, symbols.END]] = ends.T
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
    first, numbers = model.model.layers[0], slice(symbols.NUMBERS[1], symbols.NUMBERS[synthetic.MAX_MENTIONS] + 1)
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
    names = attention.v_proj.weight @ model.model.embed_tokens.weight[symbols.COUNT]
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
