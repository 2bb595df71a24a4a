"""RULER's prompts, word by word, and its score."""

from itertools import pairwise

import pytest

from kvq_calib.tasks import ruler


def words(text: str) -> int:
    return len(text.split())


def test_one_needle_is_asked_for_as_the_benchmark_does():
    made = ruler.niah_single_1(0, 2, 0.5)
    (value,) = made.references
    key = made.asked.split(" for ")[1].split(" mentioned")[0]
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    assert made.context == (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        f"the number afterwards.\n{noise}\nOne of the special magic numbers for {key} is: {value}.\n{noise}\n"
    )
    assert made.asked == (
        f"What is the special magic number for {key} mentioned in the provided text? The special magic number for "
        f"{key} mentioned in the provided text is"
    )
    assert made.steps == 128 and len(value) == 7


def test_several_are_asked_for_by_the_keys():
    made = ruler.niah_multiquery(1, 6, 0.0)
    keys = made.asked.split("numbers for ")[1].split(" mentioned")[0].replace(" and ", " ").split(", ")
    assert len(set(keys)) == 4 and made.asked.startswith("What are all the special magic numbers for ")
    for key, value in zip(keys, made.references, strict=True):
        assert made.context.count(f"One of the special magic numbers for {key} is: {value}.") == 1
    made = ruler.niah_multivalue(1, 6, 0.0)
    assert len(set(made.references)) == 4 and all(value in made.context for value in made.references)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_variables_are_assigned_one_from_the_other_in_order(depth):
    made = ruler.vt(2, 9, depth)
    names = made.references
    value = made.asked.split("assigned the value ")[1].split(" ")[0]
    said = [
        f"VAR {names[0]} = {value}",
        *(f"VAR {new} = VAR {old}" for old, new in pairwise(names)),
    ]
    places = [made.context.index(one) for one in said]
    assert places == sorted(places) and len(names) == 5
    assert made.asked.endswith(f"5 variables are assgined the value {value}, they are: ") and made.steps == 30


@pytest.mark.parametrize("task", ruler.TASKS)
def test_a_prompt_is_the_longest_that_fits(task):
    made = ruler.fitted(task, 3, 700, 0.5, words)
    assert made == ruler.fitted(task, 3, 700, 0.5, words)
    size = next(size for size in range(1, 700) if ruler.TASKS[task](3, size, 0.5) == made)
    more = ruler.TASKS[task](3, size + 1, 0.5)
    assert words(made.context + made.asked) + made.steps <= 700 < words(more.context + more.asked) + more.steps
    assert all(made.context.count(one) for one in made.references)
    with pytest.raises(ValueError, match=f"{task} in length=20 tokens; use at least"):
        ruler.fitted(task, 3, 20, 0.5, words)


def test_the_score_is_the_share_of_references_in_the_answer():
    assert ruler.score(" 123, Abc and 9", ["123", "aBC", "77"]) == pytest.approx(2 / 3)
    assert ruler.score("", ["1"]) == 0
