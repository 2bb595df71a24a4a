"""Make RULER's tasks that need no download, for any model's tokenizer: pure functions of seed, length and depth.

    niah_single_1       one key and number in a haystack of five sentences, repeated
    niah_multikey_2     the haystack is needles of other keys, values are numbers
    niah_multikey_3     the same, keys and values are UUIDs
    niah_multivalue     a key with four numbers, all asked for        niah_multiquery    four keys, all asked for
    vt                  a number, and five variables that are assigned it one from the other

Prompts and scores are those of the benchmark: the questions' words, what the answer begins with, the number of tokens
generated, and the share of the references that the answer contains, in whatever case.
Source: Hsieh et al., 2024 (RULER), and the constants of github.com/NVIDIA/RULER, `scripts/data/synthetic`.
Differs: multivalue and multiquery lie in the repeated sentences, not in essays; keys are of our own words, not of the
package wonderwords; the depth of a needle is given, not drawn; variable tracking has no worked example before it;
common and frequent words, and questions on documents, are left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from uuid import UUID

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
ABOUT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\n"
)
ASKED = (
    "What are all the special magic {kind} for {query} mentioned in the provided text? The special magic {kind} for "
    "{query} mentioned in the provided text are"
)
TRACK = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
TRACKED = (
    "Question: Find all variables that are assigned the value {query} in the text above. Answer: According to the "
    "chain(s) of variable assignment in the text above, {number} variables are assgined the value {query}, they are: "
)  # the benchmark's spelling
HOPS = 4
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FIRST = """amber brave calm daring eager faint gentle hollow icy jolly keen lively
misty noble odd plain quiet rapid silent tidy upper vivid warm young"""
SECOND = """anchor basket candle desert engine forest garden hammer island jacket kettle ladder
market needle orchard pencil quarry river saddle tunnel urn valley window yard"""


@dataclass(frozen=True)
class Prompt:
    """A text, what is asked of it and how the answer begins, what the answer should contain, and its most tokens."""

    context: str
    asked: str
    references: tuple[str, ...]
    steps: int


def score(answer: str, references: Sequence[str]) -> float:
    """The share of the references that the answer contains."""
    return sum(reference.lower() in answer.lower() for reference in references) / len(references)


def niah_single_1(seed: int, size: int, depth: float) -> Prompt:
    """One number in `size` times the haystack."""
    random = Random(f"niah_single_1 {seed}")
    key, value = _word(random), _number(random)
    lines = [NOISE] * size
    lines.insert(round(depth * size), NEEDLE.format(kind="numbers", key=key, value=value))
    return _niah(lines, "numbers", [key], [value])


def niah_multikey_2(seed: int, size: int, depth: float) -> Prompt:
    """One number among `size` others with other keys."""
    return _among(Random(f"niah_multikey_2 {seed}"), "numbers", _word, _number, size, depth)


def niah_multikey_3(seed: int, size: int, depth: float) -> Prompt:
    """One UUID among `size` others, of keys that are UUIDs."""
    return _among(Random(f"niah_multikey_3 {seed}"), "uuids", _uuid, _uuid, size, depth)


def niah_multivalue(seed: int, size: int, depth: float) -> Prompt:
    """Four numbers of one key, the first at the depth."""
    random = Random(f"niah_multivalue {seed}")
    key, values = _word(random), _different(random, _number, 4)
    return _niah(_scattered(random, [(key, value) for value in values], size, depth), "numbers", [key], values)


def niah_multiquery(seed: int, size: int, depth: float) -> Prompt:
    """Four keys with a number each, the first at the depth."""
    random = Random(f"niah_multiquery {seed}")
    keys, values = _different(random, _word, 4), _different(random, _number, 4)
    return _niah(_scattered(random, list(zip(keys, values, strict=True)), size, depth), "numbers", keys, values)


def vt(seed: int, size: int, depth: float) -> Prompt:
    """A number and the variables that hold it, in order, the first at the depth of what leaves the others room."""
    random = Random(f"vt {seed}")
    names = _different(random, lambda draw: "".join(draw.choices(LETTERS, k=5)), HOPS + 1)
    value = str(random.randint(10000, 99999))
    said = [
        f"VAR {names[0]} = {value}",
        *(f"VAR {new} = VAR {old} " for old, new in pairwise(names)),
    ]
    first = round(depth * size)
    places = [first, *sorted(random.randint(first, size) for _ in said[1:])]
    lines = [f"{NOISE}\n"] * size
    for place, line in reversed(list(zip(places, said, strict=True))):
        lines.insert(place, line)
    query = {"query": value, "number": HOPS + 1}
    return Prompt(TRACK.format(context=" ".join(lines)), TRACKED.format(**query), tuple(names), 30)


TASKS: dict[str, Callable[[int, int, float], Prompt]] = {
    made.__name__: made
    for made in (niah_single_1, niah_multikey_2, niah_multikey_3, niah_multivalue, niah_multiquery, vt)
}


def fitted(task: str, seed: int, length: int, depth: float, count: Callable[[str], int]) -> Prompt:
    """The longest prompt of a task that, with its answer, has at most `length` tokens.

    count   the tokens of a text
    Raises ValueError where none is so short.
    """
    make = TASKS[task]

    def needs(size: int) -> int:
        made = make(seed, size, depth)
        return count(made.context + made.asked) + made.steps

    if needs(1) > length:
        raise ValueError(f"{task} in length={length} tokens; use at least {needs(1)}")
    low, high = 1, 2
    while needs(high) <= length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needs(middle) <= length else (low, middle)
    return make(seed, low, depth)


def _niah(lines: Sequence[str], kind: str, keys: Sequence[str], values: Sequence[str]) -> Prompt:
    """The prompt of needles; with one answer it speaks of one, as the benchmark's does."""
    about, asked = ABOUT, ASKED
    if len(values) == 1:
        about = about.replace("Some", "A", 1).replace("are hidden", "is hidden")
        asked = asked.replace("are all", "is").replace("text are", "text is")
        kind = kind[:-1]
    query = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
    context = about.format(kind=kind, context="\n".join(lines))
    return Prompt(context, asked.format(kind=kind, query=query), tuple(values), 128)


def _among(random: Random, kind: str, key, value, size: int, depth: float) -> Prompt:
    keys = _different(random, key, size + 1)
    values = [value(random) for _ in keys]
    lines = [NEEDLE.format(kind=kind, key=k, value=v) for k, v in zip(keys[1:], values[1:], strict=True)]
    lines.insert(round(depth * size), NEEDLE.format(kind=kind, key=keys[0], value=values[0]))
    return _niah(lines, kind, keys[:1], values[:1])


def _scattered(random: Random, pairs: Sequence[tuple[str, str]], size: int, depth: float) -> list[str]:
    """Needles in the haystack, the first at the depth, the others anywhere."""
    places = [round(depth * size), *(random.randint(0, size) for _ in pairs[1:])]
    lines = [NOISE] * size
    for place, (key, value) in sorted(zip(places, pairs, strict=True), reverse=True):
        lines.insert(place, NEEDLE.format(kind="numbers", key=key, value=value))
    return lines


def _different(random: Random, draw: Callable[[Random], str], count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(random)] = None
    return list(found)


def _word(random: Random) -> str:
    """Two words and, as there are few of them, a third: 13,824 keys."""
    first, second = FIRST.split(), SECOND.split()
    return f"{random.choice(first)}-{random.choice(second)}-{random.choice(second)}"


def _number(random: Random) -> str:
    return str(random.randint(1_000_000, 9_999_999))


def _uuid(random: Random) -> str:
    return str(UUID(int=random.getrandbits(128), version=4))
