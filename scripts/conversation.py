"""Follow a chat of several turns with compressed caches that are kept over all of them: where do they leave, by turn?

A user's turn goes into every cache in one pass, which reads what the cache gives back of the turns before. Then the
16-bit model answers greedily, to the end of its turn or so many tokens, and every cache reads that answer, a token a
pass, as in `kvq_calib/evaluate/decode.py`: the next turn finds all caches with the same history. Of each turn

    first     the first token of the answer in which the likeliest differ; None: it never left
    kl, top1  as there, over the answer; `entropy`, of the 16-bit model, nats
    history   tokens in the cache when the turn began
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from kvq_calib.evaluate.decode import ends_of, next_tokens

TURNS = (  # over two passages of a text
    "Read this text.\n\n{0}\n\nSummarize it in two sentences.",
    "Which persons, places or things are named in it?",
    "Now read this one.\n\n{1}\n\nWhat do both texts have in common?",
    "Repeat the first sentence of the first text, word by word.",
)


def turns(folder: Path, passages: Sequence[str]) -> list[list[int]]:
    """The tokens that each user's turn adds, in the model's own form: from the end of its last answer to its next one.

    Raises ValueError for a model that has no chat template.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not tokenizer.chat_template:
        raise ValueError(f"{folder.name} has no chat template: it is no chat model, and has no turns")
    mark, found = "\x00an answer\x00", []
    messages: list[dict[str, str]] = []
    for words in TURNS:
        messages.append({"role": "user", "content": words.format(*passages)})
        said = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        found.append(tokenizer(said.rpartition(mark)[2], add_special_tokens=False)["input_ids"])
        messages.append({"role": "assistant", "content": mark})
    return found


@torch.inference_mode()
def follow(
    model: PreTrainedModel, asked: Sequence[Sequence[int]], caches: Sequence[Cache], most: int
) -> list[list[dict[str, Any]]]:
    """Return a list of turns for each cache.

    asked   the tokens that each turn adds; a turn begins with what ends the model's, as `turns` gives them
    most    tokens of an answer
    """
    exact, ends = DynamicCache(config=model.config), ends_of(model)
    found: list[list[dict[str, Any]]] = [[] for _ in caches]
    answer: list[int] = []
    for words in asked:
        history = exact.get_seq_length()
        # the end of the last answer is what the words begin with
        rest = [token for token in answer[-1:] if token not in ends]
        given, answer = torch.tensor([[*rest, *words]], device=model.device), []
        kls: list[list[float]] = [[] for _ in caches]
        agreed: list[list[bool]] = [[] for _ in caches]
        entropies: list[float] = []
        while len(answer) < most and not set(answer) & set(ends):
            logp_BV = next_tokens(model, exact, given)
            entropies.append(float(-(logp_BV.exp() * logp_BV).sum()))
            answer.append(int(logp_BV.argmax()))
            for number, cache in enumerate(caches):
                logq_BV = next_tokens(model, cache, given)
                kls[number].append(float((logp_BV.exp() * (logp_BV - logq_BV)).sum()))
                agreed[number].append(int(logq_BV.argmax()) == answer[-1])
            given = torch.tensor([answer[-1:]], device=model.device)
        about = {"history": history, "added": len(rest) + len(words), "tokens": len(answer), "answer": answer}
        about["entropy"] = sum(entropies) / len(entropies)
        for own, kl, same in zip(found, kls, agreed, strict=True):
            first = same.index(False) if False in same else None
            own.append({"first": first, "kl": sum(kl) / len(kl), "top1": sum(same) / len(same), **about})
    return found
