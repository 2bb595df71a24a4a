"""Make RULER's tasks, for any model's tokenizer: pure functions of what a text is drawn from.

    niah_single_1       one key and number in a haystack of five sentences, repeated
    niah_single_2, _3   one key and number, or UUID, in essays
    niah_multikey_1     four keys with a number each in essays, one asked for
    niah_multikey_2     the haystack is needles of other keys, values are numbers
    niah_multikey_3     the same, keys and values are UUIDs
    niah_multivalue     a key with four numbers in essays, all asked for
    niah_multiquery     four keys in essays, all asked for
    vt                  a number, and five variables that are assigned it one from the other
    cwe                 ten words of a numbered list that are there more often than the others
    fwe                 the three most frequent of made-up words, whose frequencies fall as 1 / rank²
    passkey             five digits, stated twice, in the haystack of five sentences: not RULER's, and older

Prompts and scores are those of the benchmark: the questions' words, worked examples, what the answer begins with, the
number of tokens generated, and the share of the references that the answer contains, in whatever case.
Source: Hsieh et al., 2024 (RULER), and `scripts/data/synthetic` of github.com/NVIDIA/RULER as of 2025.
Differs: essays are whatever text is given, whose sentences end at . ! or ? before a space; the depth of a needle, of
several the first one's, is given, not drawn; the worked example of variable tracking has 15 times the haystack, not as
often as 500 tokens hold; if the list of words is too short for cwe, words are pairs of them. The two tasks of questions
on documents are left out: their data have to be downloaded.
Source of passkey: Mohtashami and Jaggi, 2023 (Landmark Attention), section 4.2, whose prompt it is.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from itertools import pairwise
from random import Random
from uuid import UUID

LONGEST = 60  # words of a sentence of a haystack: a book's table of contents ends in no full stop
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
ABOUT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\n"
)
ASKED = "What are all the special magic {kind} for {query} mentioned in the provided text?"
BEGUN = " The special magic {kind} for {query} mentioned in the provided text are"
TRACK = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
TRACKED = "Question: Find all variables that are assigned the value {query} in the text above."
TRACKED_BEGUN = (
    " Answer: According to the chain(s) of variable assignment in the text above, {number} variables are assigned the "
    "value {query}, they are: "
)
HOPS, EXAMPLE_NOISE = 4, 15
HIDDEN = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
    "about the important information there.\n{context}\n"
)
PASSKEY = "The pass key is {key}. Remember it. {key} is the pass key."
COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\n"
)
COMMON_ASKED = "Question: What are the 10 most common words in the above list?"
COMMON_BEGUN = " Answer: The top 10 words that appear most often in the list are:"
COUNTS = 10  # common words
SHORT = 4096  # tokens, below which common words are there 6 times and others once; else 30 and 3 times
FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\n"
)
FREQUENT_ASKED = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text?"
)
FREQUENT_BEGUN = " Answer: According to the coded text above, the three most frequently appeared words are:"
PER_WORD = 50  # tokens of a text to each made-up word
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Haystack:
    """The text that needles of `ESSAYS` lie in: sentences, repeated if too few. Longer ones than LONGEST are parted.

    name, digest   of the text
    """

    name: str
    digest: str
    sentences: tuple[str, ...] = field(repr=False)

    @staticmethod
    def of(name: str, digest: str, texts: Iterable[str]) -> "Haystack":
        whole = re.sub(r"\s+", " ", " ".join(texts)).strip()
        sentences = (one.split(" ") for one in re.split(r"(?<=[.!?]) ", whole))
        parts = (words[start : start + LONGEST] for words in sentences for start in range(0, len(words), LONGEST))
        return Haystack(name, digest, tuple(map(" ".join, parts)))

    def first(self, count: int) -> list[str]:
        """So many sentences."""
        return [self.sentences[number % len(self.sentences)] for number in range(count)]


@dataclass(frozen=True)
class Draw:
    """The settings that a text is drawn from.

    size       how much of what is not asked for; the text grows with it
    depth      of what is asked for, 0 to 1
    length     tokens that the text should have
    haystack   of `ESSAYS`
    """

    seed: int
    size: int
    depth: float = 0.5
    length: int = SHORT
    haystack: Haystack | None = None


@dataclass(frozen=True)
class Prompt:
    """A text, what is asked of it, what the answer should contain, its most tokens, and how it begins.

    question, begun   `asked` is both; in the form of a chat the answer begins in the turn after the question's
    """

    context: str
    question: str
    references: tuple[str, ...]
    steps: int
    begun: str

    @property
    def asked(self) -> str:
        """The text after the context."""
        return self.question + self.begun


def score(answer: str, references: Sequence[str]) -> float:
    """The share of the references that the answer contains."""
    return sum(reference.lower() in answer.lower() for reference in references) / len(references)


def niah_single_1(of: Draw) -> Prompt:
    """One number in `size` times the haystack."""
    random = Random(f"niah_single_1 {of.seed}")
    key, value = _word(random), _number(random)
    lines = [NOISE] * of.size
    lines.insert(round(of.depth * of.size), NEEDLE.format(kind="numbers", key=key, value=value))
    return _niah("\n".join(lines), "numbers", [key], [value])


def niah_single_2(of: Draw) -> Prompt:
    """One number in essays."""
    random = Random(f"niah_single_2 {of.seed}")
    return _in_essays(random, [(_word(random), _number(random))], 1, "numbers", of)


def niah_single_3(of: Draw) -> Prompt:
    """One UUID in essays."""
    random = Random(f"niah_single_3 {of.seed}")
    return _in_essays(random, [(_word(random), _uuid(random))], 1, "uuids", of)


def niah_multikey_1(of: Draw) -> Prompt:
    """One number in essays, among three of other keys."""
    return _in_essays(*_four_keys("niah_multikey_1", of), 1, "numbers", of)


def niah_multikey_2(of: Draw) -> Prompt:
    """One number among `size` others with other keys."""
    return _among(Random(f"niah_multikey_2 {of.seed}"), "numbers", _word, _number, of)


def niah_multikey_3(of: Draw) -> Prompt:
    """One UUID among `size` others, of keys that are UUIDs."""
    return _among(Random(f"niah_multikey_3 {of.seed}"), "uuids", _uuid, _uuid, of)


def niah_multivalue(of: Draw) -> Prompt:
    """Four numbers of one key in essays."""
    random = Random(f"niah_multivalue {of.seed}")
    key = _word(random)
    return _in_essays(random, [(key, value) for value in _different(random, _number, 4)], 4, "numbers", of)


def niah_multiquery(of: Draw) -> Prompt:
    """Four keys with a number each in essays."""
    return _in_essays(*_four_keys("niah_multiquery", of), 4, "numbers", of)


def vt(of: Draw) -> Prompt:
    """A number and the variables that hold it, in order, the first at the depth of what leaves the others room."""
    random = Random(f"vt {of.seed}")
    example = _tracked(random, 3, EXAMPLE_NOISE, 0.0)
    made = _tracked(random, 5, of.size, of.depth)
    shown = f"{example.context}{example.asked} {' '.join(example.references)}\n\n"
    return replace(made, context=shown + made.context)


def cwe(of: Draw) -> Prompt:
    """Ten common words among `size` others; depth has no meaning."""
    random = Random(f"cwe {of.seed}")
    shown = _listed(random, 10, 3, 1) if of.length < SHORT else _listed(random, 30, 10, 3)
    made = _listed(random, of.size, 6, 1) if of.length < SHORT else _listed(random, of.size, 30, 3)
    answer = " ".join(f"{number}. {word}" for number, word in enumerate(shown.references, 1))
    return replace(made, context=f"{shown.context}{shown.asked} {answer}\n{made.context}")


def fwe(of: Draw) -> Prompt:
    """Made-up words, of which the most frequent is dots; `size` is about how many there are; depth has no meaning."""
    random = Random(f"fwe {of.seed}")
    steps = 50
    known = max(4, (of.length - steps) // PER_WORD)
    words = ["...", *_different(random, lambda draw: "".join(draw.choices(LETTERS.lower(), k=6)), known - 1)]
    counts = [int(of.size * 6 / math.pi**2 / rank**2) for rank in range(1, known + 1)]
    drawn = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    random.shuffle(drawn)
    return Prompt(FREQUENT.format(context=" ".join(drawn)), FREQUENT_ASKED, tuple(words[1:4]), steps, FREQUENT_BEGUN)


def passkey(of: Draw) -> Prompt:
    """Five digits in `size` times the haystack."""
    key = str(Random(f"passkey {of.seed}").randint(10000, 99999))
    lines = [NOISE] * of.size
    lines.insert(round(of.depth * of.size), PASSKEY.format(key=key))
    return Prompt(HIDDEN.format(context="\n".join(lines)), "What is the pass key?", (key,), 16, " The pass key is")


ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
TASKS: dict[str, Callable[[Draw], Prompt]] = {
    made.__name__: made
    for made in (
        niah_single_1, niah_single_2, niah_single_3, niah_multikey_1, niah_multikey_2, niah_multikey_3, niah_multivalue,
        niah_multiquery, vt, cwe, fwe, passkey,
    )
}  # fmt: skip


def fitted(
    task: str, seed: int, length: int, depth: float, count: Callable[[str], int], haystack: Haystack | None = None,
    steps: int | None = None,
) -> Prompt:  # fmt: skip
    """The longest prompt of a task that, with its answer, has at most `length` tokens.

    count      the tokens of a text
    haystack   of `ESSAYS`
    steps      the most tokens of an answer; None: the benchmark's
    Raises ValueError where none is so short.
    """
    make, draw = TASKS[task], Draw(seed, 1, depth, length, haystack)

    def draft(size: int) -> Prompt:
        made = make(replace(draw, size=size))
        return replace(made, steps=min(made.steps, steps or made.steps))

    def needs(size: int) -> int:
        made = draft(size)
        return count(made.context + made.asked) + made.steps

    if needs(1) > length:
        raise ValueError(f"{task} in length={length} tokens; use at least {needs(1)}")
    low, high = 1, 2
    while needs(high) <= length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needs(middle) <= length else (low, middle)
    return draft(low)


def _niah(context: str, kind: str, keys: Sequence[str], values: Sequence[str]) -> Prompt:
    """The prompt of needles; with one answer it speaks of one, as the benchmark's does."""
    about, asked, begun = ABOUT, ASKED, BEGUN
    if len(values) == 1:
        about = about.replace("Some", "A", 1).replace("are hidden", "is hidden")
        asked, begun = asked.replace("are all", "is"), begun.replace("text are", "text is")
        kind = kind[:-1]
    query = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
    asked, begun = (text.format(kind=kind, query=query) for text in (asked, begun))
    return Prompt(about.format(kind=kind, context=context), asked, tuple(values), 128, begun)


def _among(random: Random, kind: str, key, value, of: Draw) -> Prompt:
    keys = _different(random, key, of.size + 1)
    values = [value(random) for _ in keys]
    lines = [NEEDLE.format(kind=kind, key=k, value=v) for k, v in zip(keys[1:], values[1:], strict=True)]
    lines.insert(round(of.depth * of.size), NEEDLE.format(kind=kind, key=keys[0], value=values[0]))
    return _niah("\n".join(lines), kind, keys[:1], values[:1])


def _four_keys(task: str, of: Draw) -> tuple[Random, list[tuple[str, str]]]:
    random = Random(f"{task} {of.seed}")
    return random, list(zip(_different(random, _word, 4), _different(random, _number, 4), strict=True))


def _in_essays(random: Random, pairs: Sequence[tuple[str, str]], asked: int, kind: str, of: Draw) -> Prompt:
    """Needles among sentences, the first at the depth, the others anywhere; the first `asked` are asked for."""
    if of.haystack is None:
        raise ValueError("the haystack is essays; give a Haystack")
    places = [round(of.depth * of.size), *(random.randint(0, of.size) for _ in pairs[1:])]
    lines = of.haystack.first(of.size)
    for place, (key, value) in sorted(zip(places, pairs, strict=True), reverse=True):
        lines.insert(place, NEEDLE.format(kind=kind, key=key, value=value))
    keys, values = zip(*pairs[:asked], strict=True)
    return _niah(" ".join(lines), kind, list(dict.fromkeys(keys)), values)


def _tracked(random: Random, letters: int, size: int, depth: float) -> Prompt:
    """A chain of variables with `letters` letters each."""
    names = _different(random, lambda draw: "".join(draw.choices(LETTERS, k=letters)), HOPS + 1)
    value = str(random.randint(10000, 99999))
    said = [f"VAR {names[0]} = {value}", *(f"VAR {new} = VAR {old} " for old, new in pairwise(names))]
    first = round(depth * size)
    places = [first, *sorted(random.randint(first, size) for _ in said[1:])]
    lines = [NOISE] * size
    for place, line in reversed(list(zip(places, said, strict=True))):
        lines.insert(place, line)
    query = {"query": value, "number": HOPS + 1}
    asked, begun = (text.format(**query) for text in (TRACKED, TRACKED_BEGUN))
    return Prompt(TRACK.format(context="\n".join(lines)), asked, tuple(names), 30, begun)


def _listed(random: Random, others: int, often: int, seldom: int) -> Prompt:
    """A numbered list of common words, `often` times each, and others, `seldom` times."""
    words = _words("noun", "adjective", "verb")
    count = COUNTS + others
    chosen = random.sample(words, count) if count <= len(words) else _different(random, _word, count)
    drawn = chosen[:COUNTS] * often + chosen[COUNTS:] * seldom
    random.shuffle(drawn)
    context = " ".join(f"{number}. {word}" for number, word in enumerate(drawn, 1))
    return Prompt(COMMON.format(context=context), COMMON_ASKED, tuple(chosen[:COUNTS]), 120, COMMON_BEGUN)


def _different(random: Random, draw: Callable[[Random], str], count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(random)] = None
    return list(found)


@lru_cache
def _words(*kinds: str) -> list[str]:
    """The words of the package wonderwords, which the benchmark takes its words from."""
    lists = [resources.files("wonderwords").joinpath("assets", f"{kind}list.txt").read_text() for kind in kinds]
    return sorted({word.strip() for text in lists for word in text.split("\n")} - {""})


def _word(random: Random) -> str:
    return f"{random.choice(_words('adjective'))}-{random.choice(_words('noun'))}"


def _number(random: Random) -> str:
    return str(random.randint(1_000_000, 9_999_999))


def _uuid(random: Random) -> str:
    return str(UUID(int=random.getrandbits(128), version=4))
