"""Tasks over symbols: each can be solved from its text alone, in one way, and lies where it was asked to."""

import pytest

from kvq_calib.tasks import synthetic
from kvq_calib.tasks import synthetic as s
from kvq_calib.tasks.synthetic import TASKS

PLACES = ((0, 128, 0.0), (1, 500, 0.5), (2, 1024, 1.0))
CASES = [(task, *place) for task in TASKS for place in PLACES]


def solved(context: tuple[int, ...], asked: tuple[int, ...], steps: int) -> tuple[int, ...]:
    """The answer, by reading the text: what stands behind the key, from key to key, or how often it stands there."""
    how, key = asked
    if how == s.COUNT:
        return (s.NUMBERS[context.count(key)],)
    if how == s.ASK:
        (place,) = [place for place, token in enumerate(context) if token == key]
        assert context[place + 1 + steps] == s.END
        return context[place + 1 : place + 1 + steps]
    path = [key]
    while path[-1] in s.KEYS:
        said = [
            place for place in range(len(context) - 1) if context[place] == path[-1] and context[place + 1] != s.END
        ]
        (place,) = said
        path.append(context[place + 1])
    return tuple(path[1:])


@pytest.mark.parametrize("task, seed, length, depth", CASES)
def test_the_text_alone_answers_every_question(task, seed, length, depth):
    made = TASKS[task](seed, length, depth)
    assert made == TASKS[task](seed, length, depth) != TASKS[task](seed + 1, length, depth)
    assert len(made.tokens) == length and made.tokens[0] == s.BEGIN and max(made.tokens) < s.SIZE
    for asked, answer in made.questions:
        assert solved(made.context, asked, len(answer)) == answer


@pytest.mark.parametrize("task", ["needle", "passkey"])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_depth_is_the_share_of_the_filler_before_it(task, depth):
    made = TASKS[task](5, 800, depth)
    ((asked, answer),) = made.questions
    place = made.context.index(asked[1])
    said = 2 + len(answer)
    assert place - 1 == round(depth * (len(made.context) - 1 - said))


def test_keys_fill_the_text_until_all_are_named():
    for length, keys in ((301, 99), (4096, len(s.KEYS))):
        made = synthetic.multikey(0, length, 0.5)
        assert sum(token in s.KEYS for token in made.context) == keys
        assert len({token for token in made.context if token in s.KEYS}) == keys


def test_chains_are_as_long_as_they_say_and_counts_are_of_every_number():
    ((_, answer),) = synthetic.chain(3, 300, 0.5).questions
    assert len(answer) == synthetic.HOPS and answer[-1] in s.VALUES
    counts = {synthetic.count(seed, 200, 0.5).questions[0][1][0] for seed in range(60)}
    assert counts == {s.NUMBERS[number] for number in range(1, synthetic.MAX_MENTIONS + 1)}


def test_kinds_of_symbols_have_words_of_their_own():
    assert len(set(s.words())) == len(s.words()) == s.SIZE
    kinds = (s.DIGITS, s.NUMBERS, s.FILLER, s.VALUES, s.KEYS)
    assert len({id for kind in kinds for id in kind}) == sum(map(len, kinds)), "no symbol is of two kinds"


@pytest.mark.parametrize("length, depth", [(20, 0.5), (400, 1.5), (400, -0.1)])
def test_what_cannot_be_made_is_refused(length, depth):
    with pytest.raises(ValueError, match="use at least"):
        synthetic.chain(0, length, depth)
