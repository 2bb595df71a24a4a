"""Make the texts of a task for one model: of symbols for the recall model, in words, as RULER's, for any other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from kvq_calib.model.files import ModelFiles
from kvq_calib.tasks import ruler, symbols, synthetic
from kvq_calib.text import corpus, tokenizer
from kvq_runtime.disk.gguf import is_gguf


@dataclass(frozen=True)
class Case:
    """A text as tokens, its questions, how many tokens answer each, and the score of answers.

    right   the tokens of the right answers; None: answers are words
    """

    context: tuple[int, ...]
    asked: tuple[tuple[int, ...], ...]
    steps: tuple[int, ...]
    score: Callable[[Sequence[Sequence[int]]], float]
    right: tuple[tuple[int, ...], ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Cases of one shape go through the model side by side."""
        return (len(self.context), *map(len, self.asked), *self.steps)


def known(files: ModelFiles) -> Sequence[str]:
    """The tasks that a model can be asked: those of symbols if it speaks them, else RULER's."""
    return list(synthetic.TASKS if of_symbols(files) else ruler.TASKS)


def make(
    files: ModelFiles, task: str, seed: int, length: int, depth: float, haystack: ruler.Haystack | None = None,
    chat: bool = False, steps: int | None = None,
) -> Case:  # fmt: skip
    """One text of at most `length` tokens, of symbols exactly that number, with question and answer.

    haystack   text of those of RULER's tasks that use essays
    chat       text and question are a user's turn, in the model's own form, and the answer begins in the next
    steps      the most tokens of an answer in words; None: the benchmark's
    """
    if of_symbols(files):
        if chat:
            raise ValueError(f"{files.id} speaks in symbols and has no form for a chat; leave it out")
        return _symbolic(task, seed, length, depth)
    frame = turn(files.path) if chat else ("", "")
    return _worded(_tokenizer(files.path), task, seed, length, depth, haystack, frame, steps)


@lru_cache(maxsize=4)
def turn(folder: Path) -> tuple[str, str]:
    """Return the text that a model's chat template puts before a user's first words, and the text after them.

    Raises ValueError for a model that has no template.
    """
    from transformers import AutoTokenizer

    tokenizer, mark = AutoTokenizer.from_pretrained(folder, trust_remote_code=False), "\x00the user's words\x00"
    if not tokenizer.chat_template:
        raise ValueError(f"{folder.name} has no chat template: it is no chat model; leave --chat out")
    said = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = str(said).partition(mark)
    return before, after


def haystack(source: str) -> ruler.Haystack:
    """The documents of a corpus, as `--corpus` takes it, in which needles are hidden."""
    found = corpus.load(corpus.pin(source))
    return ruler.Haystack.of(found.name, found.digest, found.texts)


def of_symbols(files: ModelFiles) -> bool:
    """True if a model's tokenizer is that of the recall model."""
    if files.vocabulary != symbols.SIZE or not (files.path / "tokenizer.json").is_file():
        return False
    return _tokenizer(files.path).get_vocab() == {word: id for id, word in enumerate(symbols.words())}


@lru_cache(maxsize=4)
def _tokenizer(folder: Path) -> Tokenizer:
    if not is_gguf(folder) and not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json, which makes texts into tokens; give the folder of a whole model"
        )
    return tokenizer.load(folder)[0]


def _symbolic(task: str, seed: int, length: int, depth: float) -> Case:
    made = synthetic.TASKS[task](seed, length, depth)
    asked, right = zip(*made.questions, strict=True)

    def score(answers: Sequence[Sequence[int]]) -> float:
        return sum(tuple(one) == other for one, other in zip(answers, right, strict=True)) / len(right)

    return Case(made.context, asked, tuple(map(len, right)), score, right)


def _worded(
    tokenizer: Tokenizer, task: str, seed: int, length: int, depth: float, essays: ruler.Haystack | None,
    frame: tuple[str, str] = ("", ""), steps: int | None = None,
) -> Case:  # fmt: skip
    chat = frame != ("", "")  # whose template has the token that begins a text

    def count(text: str) -> int:
        return len(tokenizer.encode("".join((frame[0], text, frame[1])), add_special_tokens=not chat).ids)

    made = ruler.fitted(task, seed, length, depth, count, essays, steps)
    context = frame[0] + made.context
    begun = made.begun.removeprefix(" Answer:").lstrip() if chat else made.begun
    whole = tokenizer.encode(context + made.question + frame[1] + begun, add_special_tokens=not chat)
    # the question begins with the token that its first character is in: the prompt is tokenized as one text
    cut = next(place for place, (_, end) in enumerate(whole.offsets) if end > len(context))

    def score(answers: Sequence[Sequence[int]]) -> float:
        return ruler.score(tokenizer.decode(list(answers[0])), made.references)

    return Case(tuple(whole.ids[:cut]), (tuple(whole.ids[cut:]),), (made.steps,), score)
