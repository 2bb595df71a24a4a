"""Train the embedded demo model: Qwen2's architecture with 4 million parameters, on text that every machine has.

    python -m scripts.train_demo_model --out build/demo-model       about 25 minutes on 2 cores
    python -m scripts.train_demo_model --out build/demo-model --text a.txt b.jsonl.gz --start-from artifacts/demo-model
    python -m scripts.train_demo_model --out build/narrow --heads 8 --head-size 32 --start-from artifacts/demo-model

The text is the fit part of each corpus, as `kvq_calib.text.split` divides it; the perplexity at the end is on held-
out documents that repeat next to nothing of it (`kvq_calib.text.split`), which are those that evaluations use. The
model in artifacts/ was trained on these fit parts, before such documents were left out: on those its perplexity is
too good.
"""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from kvq_calib.text import corpus
from kvq_calib.text.split import Unseen, part

END = "<|endoftext|>"
LARGEST = 9_000_000  # bytes of the weights: they live in the repository


@dataclass(frozen=True)
class Settings:
    """One run. `steps` fixes the length and makes it repeatable; without it `minutes` does, of training time."""

    steps: int | None = None
    minutes: float = 25.0
    seed: int = 0
    batch: int = 8
    length: int = 1024
    rate: float = 2e-3  # of AdamW at its highest; warms up over the first 2%, then falls as a cosine to a tenth
    decay: float = 0.1

    def done(self, step: int, seconds: float) -> float:
        """The finished share of the run."""
        if self.steps is not None:
            return 1.0 if step >= self.steps else step / self.steps
        return seconds / (60 * self.minutes)

    def rate_at(self, step: int, done: float) -> float:
        """The learning rate when this share of the run is done."""
        return self.rate * min(1.0, done / 0.02 + 1e-3) * (0.55 + 0.45 * math.cos(math.pi * min(done, 1.0)))


def read(sources: list[str], split: str) -> list[str]:
    """The documents of one part of every corpus, without repetitions, in a fixed order; of held-out ones, those that
    repeat no more of the fit parts than evaluations allow."""
    found: dict[str, str] = {}
    loaded = [corpus.load(source) for source in sources]
    for one in loaded:
        documents = part(one, split)  # type: ignore[arg-type]
        found |= {documents.ids[i]: documents.texts[i] for i in range(len(documents.ids))}
    texts = [found[name] for name in sorted(found)]
    unseen = Unseen(texts, [part(one, "fit") for one in loaded] if split == "held-out" else [])
    return [texts[place] for place in unseen.among(range(len(texts)))]


def make_tokenizer(texts: list[str], vocabulary: int = 2048) -> PreTrainedTokenizerFast:
    """Byte-level BPE of these texts; token 0 ends a document."""
    bpe = Tokenizer(models.BPE())
    like = Qwen2Tokenizer().backend_tokenizer  # how AutoTokenizer splits for any Qwen2 model
    bpe.normalizer, bpe.pre_tokenizer = like.normalizer, like.pre_tokenizer  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=END, eos_token=END, pad_token=END)


def make_model(vocabulary: int, seed: int, heads: int = 4, head_size: int = 64) -> Qwen2ForCausalLM:
    """The architecture with fresh weights, the same for the same seed; it has two KV heads."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=heads,
        num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip
    config.head_dim = head_size
    return Qwen2ForCausalLM(config)


def take_over(model: Qwen2ForCausalLM, folder: Path) -> None:
    """Give the model the weights of another one that have the same names and shapes; the rest stay fresh."""
    given, own = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict(), model.state_dict()
    model.load_state_dict(own | {name: x for name, x in given.items() if x.shape == own[name].shape})


def stream(texts: list[str], tokenizer) -> Tensor:
    """All tokens of the documents after each other, each document ended."""
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for document in ids for token in (*document, tokenizer.eos_token_id)])


def loss_of(model, tokens_BT: Tensor) -> Tensor:
    """Mean cross-entropy of every next token, in nats."""
    logits = model(input_ids=tokens_BT[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), tokens_BT[:, 1:].flatten())


@torch.no_grad()
def perplexity(model, tokens: Tensor, length: int, most: int = 32) -> float:
    """Per token, over at most `most` windows that do not overlap."""
    count = min(most, (len(tokens) - 1) // length)
    if count < 1:
        raise ValueError(f"{len(tokens)} held-out tokens; one window needs {length + 1}, give more text")
    windows = (tokens[i * length : (i + 1) * length + 1][None] for i in range(count))
    return math.exp(sum(loss_of(model, window).item() for window in windows) / count)


def optimizer_of(model, settings: Settings) -> torch.optim.AdamW:
    """AdamW; biases and norms do not decay, so that the biases of keys and values grow as they do in large models."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": settings.decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.95), fused=True)


def sample(tokens: Tensor, settings: Settings, step: int) -> Tensor:
    """The windows of one step: a function of seed and step alone."""
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    starts = torch.randint(len(tokens) - settings.length, (settings.batch,), generator=generator)
    return torch.stack([tokens[start : start + settings.length + 1] for start in starts.tolist()])


def train(model, tokens: Tensor, settings: Settings) -> None:
    """Fit the model in place."""

    def loss_at(step: int, done: float, seconds: float) -> tuple[Tensor, str]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, sample(tokens, settings, step))
        speed = (step + 1) * settings.batch * settings.length / max(seconds, 1e-3)
        return loss, f"{speed:,.0f} tokens/s"

    optimize(model, optimizer_of(model, settings), settings, loss_at, time.monotonic)


def optimize(model, optimizer: torch.optim.AdamW, settings: Any, loss_at: Callable, clock: Callable) -> None:
    """Fit a model in place, whose loss `loss_at` gives, of a step, the finished share and seconds, with what to say."""
    step, begun = 0, clock()
    form = "{percentage:3.0f}% |{bar}| {elapsed}<{remaining}{postfix}"
    with tqdm(total=1.0, bar_format=form, mininterval=1.0) as bar:
        while (done := settings.done(step, seconds := clock() - begun)) < 1:
            for group in optimizer.param_groups:
                group["lr"] = group.get("share", 1.0) * settings.rate_at(step, done)
            loss, said = loss_at(step, done, seconds)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            bar.set_postfix_str(f"step {step}, loss {loss.item():.3f}, {said}", refresh=False)
            bar.update(min(1.0, settings.done(step, clock() - begun)) - bar.n)


def save(model, tokenizer, out: Path, padding: int | None) -> int:
    """Write the folder in bfloat16, weights as safetensors; the size of the weights in bytes."""
    model.generation_config.pad_token_id = padding
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    weights = out / "model.safetensors"
    weights.chmod(0o644)
    size = weights.stat().st_size
    if size > LARGEST:
        raise ValueError(f"the weights have {size} bytes; the repository takes {LARGEST}")
    return size


def add_settings(parser: argparse.ArgumentParser, settings: Any, default: Path) -> None:
    """Add an option for the folder, and for each of the settings but the decay."""
    parser.add_argument("--out", type=Path, default=default, help="folder to write (%(default)s)")
    kinds = {"steps": int, "minutes": float, "seed": int, "batch": int, "length": int, "rate": float}
    for name in (one.name for one in fields(settings) if one.name in kinds):
        parser.add_argument(f"--{name}", type=kinds[name], default=getattr(settings, name), help="(%(default)s)")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_settings(parser, Settings, Path("build/demo-model"))
    told = "more corpora: .txt, .jsonl(.gz/.zst), .parquet"
    parser.add_argument("--text", nargs="+", default=[], metavar="FILE", help=told)
    told = "go on from this model, as far as its shapes are the same, with its tokenizer"
    parser.add_argument("--start-from", type=Path, metavar="DIR", help=told)
    parser.add_argument("--heads", type=int, default=4, help="query heads of a fresh model (%(default)s)")
    parser.add_argument("--head-size", type=int, default=64, help="channels of each head (%(default)s)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> float:
    """Train, save, and return the perplexity on held-out documents."""
    given = parse(arguments)
    settings = Settings(given.steps, given.minutes, given.seed, given.batch, given.length, given.rate)
    sources = ["demo", *given.text]
    texts = read(sources, "fit")
    tokenizer = AutoTokenizer.from_pretrained(given.start_from) if given.start_from else make_tokenizer(texts)
    model = make_model(len(tokenizer), settings.seed, given.heads, given.head_size)
    if given.start_from:
        take_over(model, given.start_from)
    tokens, held_out = stream(texts, tokenizer), stream(read(sources, "held-out"), tokenizer)
    print(f"{len(tokens):,} tokens to fit, {len(held_out):,} held out; {model.num_parameters():,} parameters")
    model.train()
    train(model, tokens, settings)
    model.eval()
    size = save(model, tokenizer, given.out, tokenizer.pad_token_id)
    result = perplexity(model, held_out, settings.length)
    print(f"{given.out}: {size:,} bytes, perplexity {result:.2f} per token on held-out documents")
    return result


if __name__ == "__main__":
    main()
