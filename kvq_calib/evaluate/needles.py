"""Make the two needle tasks, for any model's tokenizer: pure functions of seed, size and depth.

    passkey   five digits, stated twice, in a haystack of five sentences, repeated
    needle    the number of one key, in the sentences of a text

Source of passkey: Mohtashami and Jaggi, 2023 (Landmark Attention), section 4.2, whose prompt it is. Of needle: Hsieh et
al., 2024 (RULER), `niah_single_2`, whose prompt it is.
Differs: the haystack is any text, whose sentences end at . ! or ? before a space; the depth is given, not drawn.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

LONGEST = 60  # words of a sentence of a haystack: a table of contents ends in no full stop
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
HIDDEN = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
    "about the important information there.\n{context}\n"
)
PASSKEY = "The pass key is {key}. Remember it. {key} is the pass key."
NEEDLE = "One of the special magic numbers for {key} is: {value}."
ABOUT = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards.\n{context}\n"
)
ASKED = "What is the special magic number for {key} mentioned in the provided text?"
BEGUN = " The special magic number for {key} mentioned in the provided text is"
ADJECTIVES = "ancient bitter brave bright calm clever eager famous gentle golden hollow narrow proud quiet rapid silent"
NOUNS = "anchor basket candle dragon engine forest garden hammer island lantern mirror needle orchard river tower"
STEPS = 16  # tokens of an answer


@dataclass(frozen=True)
class Haystack:
    """The sentences that needles lie in, repeated if too few. Those longer than LONGEST words are cut.

    name, digest   of the text
    """

    name: str
    digest: str
    sentences: tuple[str, ...] = field(repr=False)

    @staticmethod
    def of_texts(name: str, digest: str, texts: Iterable[str]) -> "Haystack":
        """Split texts into sentences."""
        whole = re.sub(r"\s+", " ", " ".join(texts)).strip()
        sentences = (sentence.split(" ") for sentence in re.split(r"(?<=[.!?]) ", whole))
        parts = (words[start : start + LONGEST] for words in sentences for start in range(0, len(words), LONGEST))
        return Haystack(name, digest, tuple(map(" ".join, parts)))

    def first(self, count: int) -> list[str]:
        """Return the first `count` sentences."""
        return [self.sentences[number % len(self.sentences)] for number in range(count)]


@dataclass(frozen=True)
class Prompt:
    """A text, its question, the beginning of the answer, and what the rest of the answer should contain.

    In the form of a chat the answer begins in the turn after the question's.
    """

    context: str
    question: str
    begun: str
    reference: str

    def score(self, answer: str) -> float:
        """Return 1 if the answer contains the reference, else 0."""
        return float(self.reference in answer)


def passkey(seed: int, size: int, depth: float, haystack: Haystack) -> Prompt:
    """Hide five digits in `size` times the noise."""
    key = str(Random(f"passkey {seed}").randint(10000, 99999))
    lines = _hidden([NOISE] * size, PASSKEY.format(key=key), depth)
    return Prompt(HIDDEN.format(context="\n".join(lines)), "What is the pass key?", " The pass key is", key)


def needle(seed: int, size: int, depth: float, haystack: Haystack) -> Prompt:
    """Hide a number of seven digits in `size` sentences of the haystack."""
    random = Random(f"needle {seed}")
    key = f"{random.choice(ADJECTIVES.split())}-{random.choice(NOUNS.split())}"
    value = str(random.randint(1_000_000, 9_999_999))
    lines = _hidden(haystack.first(size), NEEDLE.format(key=key, value=value), depth)
    return Prompt(ABOUT.format(context=" ".join(lines)), ASKED.format(key=key), BEGUN.format(key=key), value)


TASKS: dict[str, Callable[[int, int, float, Haystack], Prompt]] = {"passkey": passkey, "needle": needle}


def longest(task: str, seed: int, length: int, depth: float, haystack: Haystack, count: Callable[[str], int]) -> Prompt:
    """Return the longest prompt of a task that, with STEPS tokens of answer, has at most `length` tokens.

    count   returns the tokens of a text

    Raises ValueError where none is so short.
    """

    def draft(size: int) -> Prompt:
        return TASKS[task](seed, size, depth, haystack)

    def needs(size: int) -> int:
        made = draft(size)
        return count(made.context + made.question + made.begun) + STEPS

    if needs(1) > length:
        raise ValueError(f"{task} in length={length} tokens; use at least {needs(1)}")
    low, high = 1, 2
    while needs(high) <= length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needs(middle) <= length else (low, middle)
    return draft(low)


def _hidden(lines: Sequence[str], said: str, depth: float) -> list[str]:
    place = round(depth * len(lines))
    return [*lines[:place], said, *lines[place:]]
