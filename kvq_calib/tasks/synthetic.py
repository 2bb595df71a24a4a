"""Make tasks of retrieval over the recall model's symbols: pure functions of seed, length and depth.

    needle      `k v v v v ;` once, in filler: what does k hold?
    passkey     `pass d d d d d ;` once, in filler
    multikey    `k v ;` for as many keys as fit (at most all), the rest filler: what does one hold?
    multiquery  four needles, all asked for, one after another
    recall      as multikey, eight keys asked for
    chain       `x v ;`, `y x ;`, `z y ;`, ... scattered, in four chains: from the last name of one to its value
    count       k mentioned one to five times beside other keys: how often?

A text is BEGIN, then statements that lie in filler, then questions. Depth is the place of what is asked for: 0 right
after BEGIN, 1 right before the question; in a chain it is that of the value, in a count that of one mention, and the
others lie anywhere; of several that are asked for it is that of one.

Of the 1,024 symbols of the recall model, which mean nothing outside the tasks,

    ;            ends a statement about a key
    ask k        what follows k?                trace k      what follows it, and what follows that, to a value?
    count k      how often was k mentioned?     pass         the key of a passkey
    digits       of passkeys                    numbers      answers of counts, of 0 to 9
    filler       the haystack                   values       what statements give keys
    keys         names, of which each has one meaning in a text

Source: Hsieh et al., 2024 (RULER), section 3, for the kinds of tasks; Arora et al., 2023 (Zoology), for recall.
Differs: over symbols, answers of one to five tokens that the model gives greedily, one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

SIZE = 1024
BEGIN, END, ASK, TRACE, COUNT, PASS = range(6)
DIGITS = range(16, 26)
NUMBERS = range(26, 36)
FILLER = range(64, 256)
VALUES = range(256, 512)
KEYS = range(512, 1024)
Tokens = tuple[int, ...]
HOPS = 4  # statements of a chain
CHAINS = 4
MAX_MENTIONS = 5  # mentions of what is counted


def words() -> list[str]:
    """Return the spelling of each symbol, by its id."""
    spoken = {BEGIN: "<begin>", END: ";", ASK: "<ask>", TRACE: "<trace>", COUNT: "<count>", PASS: "<pass>"}
    kinds = (("digit", DIGITS), ("number", NUMBERS), ("filler", FILLER), ("value", VALUES), ("key", KEYS))
    spoken |= {start: f"<{name}-{place}>" for name, ids in kinds for place, start in enumerate(ids)}
    return [spoken.get(id, f"<unused-{id}>") for id in range(SIZE)]


@dataclass(frozen=True)
class Sample:
    """A text and its questions: each is what is asked, and the tokens of the right answer."""

    context: Tokens
    questions: tuple[tuple[Tokens, Tokens], ...]

    @property
    def tokens(self) -> Tokens:
        """All of it, with the right answers."""
        return self.context + tuple(token for asked, answer in self.questions for token in asked + answer)


Question = tuple[Tokens, Tokens]


def needle(seed: int, length: int, depth: float, needles: int = 1, asked: int = 1) -> Sample:
    """Keys that hold four values each, in filler; `asked` of them are asked for."""
    random = Random(f"needle {seed}")
    keys, values = random.sample(KEYS, needles), random.sample(VALUES, 4 * needles)
    held = [tuple(values[4 * place : 4 * place + 4]) for place in range(needles)]
    said = [(key, *value, END) for key, value in zip(keys, held, strict=True)]
    return _sample(random, said, [((ASK, key), value) for key, value in zip(keys, held, strict=True)][:asked],
                   length, depth)  # fmt: skip


def passkey(seed: int, length: int, depth: float) -> Sample:
    """Five different digits in filler."""
    random = Random(f"passkey {seed}")
    digits = tuple(random.sample(DIGITS, 5))
    return _sample(random, [(PASS, *digits, END)], [((ASK, PASS), digits)], length, depth)


def multikey(seed: int, length: int, depth: float, keys: int | None = None, asked: int = 1) -> Sample:
    """Keys that hold a value each, by default as many as there is room for; `asked` of them are asked for."""
    random = Random(f"multikey {seed}")
    room = max(asked, min(len(KEYS), (length - 1 - 3 * asked) // 3))
    names = random.sample(KEYS, room if keys is None else keys)
    values = random.choices(VALUES, k=len(names))
    said = [(key, value, END) for key, value in zip(names, values, strict=True)]
    return _sample(random, said, [((ASK, key), (value,)) for key, value, _ in said[:asked]], length, depth)


def chain(seed: int, length: int, depth: float, chains: int = CHAINS, hops: int = HOPS, asked: int = 1) -> Sample:
    """Names that hold names that hold ... a value; `asked` chains are asked for from their last name."""
    random = Random(f"chain {seed}")
    names, ends = random.sample(KEYS, chains * hops), random.sample(VALUES, chains)
    paths = [(*names[place * hops : place * hops + hops], end) for place, end in enumerate(ends)]
    # the statements that hold values first: that of the first chain is the one at the depth
    said = [(path[hop], path[hop + 1], END) for hop in reversed(range(hops)) for path in paths]
    return _sample(random, said, [((TRACE, path[0]), path[1:]) for path in paths[:asked]], length, depth)


def count(seed: int, length: int, depth: float, counted: int = 4, asked: int = 1) -> Sample:
    """Keys that are mentioned one to five times; `asked` of them are asked for."""
    random = Random(f"count {seed}")
    keys = random.sample(KEYS, counted)
    times = [random.randint(1, MAX_MENTIONS) for _ in keys]
    said = [(key,) for key, number in zip(keys, times, strict=True) for _ in range(number)]
    asked_for = [((COUNT, key), (NUMBERS[number],)) for key, number in zip(keys, times, strict=True)]
    return _sample(random, said, asked_for[:asked], length, depth)


def multiquery(seed: int, length: int, depth: float) -> Sample:
    """Four needles, all asked for."""
    return needle(seed, length, depth, 4, 4)


def recall(seed: int, length: int, depth: float) -> Sample:
    """As many keys as there is room for; eight are asked for."""
    return multikey(seed, length, depth, asked=8)


TASKS: dict[str, Callable[[int, int, float], Sample]] = {
    made.__name__: made for made in (needle, passkey, multikey, multiquery, recall, chain, count)
}


def _sample(random: Random, said: Sequence[Tokens], questions: Sequence[Question], length: int, depth: float) -> Sample:
    """Scatter statements in filler, the first of them at `depth`; questions are asked in random order."""
    filler = length - 1 - sum(map(len, said)) - sum(len(asked) + len(answer) for asked, answer in questions)
    if filler < 0 or not 0 <= depth <= 1:
        raise ValueError(
            f"length={length} tokens at depth={depth}; use at least {length - filler} tokens and a depth of 0 to 1"
        )
    places = [round(depth * filler), *(random.randint(0, filler) for _ in said[1:])]
    order = sorted(range(len(said)), key=lambda one: (places[one], random.random()))
    text = random.choices(FILLER, k=filler)
    context, done = [BEGIN], 0
    for one in order:
        context += [*text[done : places[one]], *said[one]]
        done = places[one]
    return Sample((*context, *text[done:]), tuple(random.sample(list(questions), len(questions))))
