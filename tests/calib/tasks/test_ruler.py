"""RULER's prompts, word by word, and its score."""

from collections import Counter
from itertools import count, dropwhile, pairwise

import pytest

from kvq_calib.tasks import ruler
from kvq_calib.tasks.ruler import Draw

ESSAYS = ruler.Haystack.of("essays", "0", ["A first sentence.  And a\nsecond? Yes!", "A last one."])


def words(text: str) -> int:
    return len(text.split())


def test_a_list_without_full_stops_is_parted_so_that_a_text_fills_its_length():
    """Else a prompt of needles in a book that opens with its chapters had a tenth of the tokens asked for."""
    book = ruler.Haystack.of(
        "book", "0", [" ".join(f"CHAPTER {number}" for number in range(2000)), "It began. It ended."]
    )
    assert max(len(one.split()) for one in book.sentences) == ruler.LONGEST
    assert " ".join(book.sentences).split()[:4] == ["CHAPTER", "0", "CHAPTER", "1"]
    made = ruler.fitted("niah_single_2", 0, 1000, 0.5, lambda text: len(text.split()), book)
    assert 1000 - ruler.LONGEST <= len((made.context + made.asked).split()) + made.steps <= 1000


def test_one_needle_is_asked_for_as_the_benchmark_does():
    made = ruler.niah_single_1(Draw(0, 2, 0.5))
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


def test_a_passkey_is_said_twice_at_its_depth():
    made = ruler.passkey(Draw(0, 4, 0.25))
    (key,) = made.references
    lines = made.context.splitlines()
    assert lines[0].startswith("There is an important info hidden inside a lot of irrelevant text. Find it")
    assert lines[2] == f"The pass key is {key}. Remember it. {key} is the pass key." and lines.count(ruler.NOISE) == 4
    assert len(key) == 5 and made.asked == "What is the pass key? The pass key is"


@pytest.mark.parametrize("task", ruler.TASKS)
def test_the_question_ends_before_its_answer_begins(task):
    """So that a chat's turn can end between them; the benchmark's prompt is both."""
    made = ruler.TASKS[task](Draw(0, 30, 0.5, haystack=ESSAYS))
    assert made.question.endswith(("?", ".")) and made.begun.startswith(" ") and made.begun.strip()
    assert made.asked == made.question + made.begun


def test_answers_can_be_kept_short():
    made = ruler.fitted("niah_single_1", 0, 700, 0.5, words, steps=12)
    assert made.steps == 12 and words(made.context) > words(ruler.fitted("niah_single_1", 0, 700, 0.5, words).context)
    assert ruler.fitted("passkey", 0, 300, 0.5, words, steps=99).steps == 16, "never more than the benchmark's"


def test_needles_lie_between_sentences_of_essays():
    assert ESSAYS.sentences == ("A first sentence.", "And a second?", "Yes!", "A last one.")
    made = ruler.niah_single_3(Draw(0, 6, 0.5, haystack=ESSAYS))
    (value,) = made.references
    key = made.asked.split(" for ")[1].split(" mentioned")[0]
    assert made.asked.startswith(f"What is the special magic uuid for {key} mentioned") and value.count("-") == 4
    assert made.context.splitlines()[1] == (
        f"A first sentence. And a second? Yes! One of the special magic uuids for {key} is: {value}. A last one. "
        "A first sentence. And a second?"
    )
    with pytest.raises(ValueError, match="the haystack is essays; give a Haystack"):
        ruler.niah_single_2(Draw(0, 6))


def test_several_are_asked_for_by_the_keys():
    made = ruler.niah_multiquery(Draw(1, 6, 0.0, haystack=ESSAYS))
    keys = made.asked.split("numbers for ")[1].split(" mentioned")[0].replace(" and ", " ").split(", ")
    assert len(set(keys)) == 4 and made.asked.startswith("What are all the special magic numbers for ")
    for key, value in zip(keys, made.references, strict=True):
        assert made.context.count(f"One of the special magic numbers for {key} is: {value}.") == 1
    made = ruler.niah_multivalue(Draw(1, 6, 0.0, haystack=ESSAYS))
    assert len(set(made.references)) == 4 and all(value in made.context for value in made.references)
    made = ruler.niah_multikey_1(Draw(1, 6, 0.0, haystack=ESSAYS))
    assert len(made.references) == 1 and made.context.count("One of the special magic numbers for ") == 4


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_variables_are_assigned_one_from_the_other_in_order(depth):
    made = ruler.vt(Draw(2, 9, depth))
    names = made.references
    value = made.asked.split("assigned the value ")[1].split(" ")[0]
    said = [
        f"VAR {names[0]} = {value}",
        *(f"VAR {new} = VAR {old}" for old, new in pairwise(names)),
    ]
    places = [made.context.index(one) for one in said]
    assert places == sorted(places) and len(names) == 5
    assert made.asked.endswith(f"5 variables are assigned the value {value}, they are: ") and made.steps == 30
    shown, about, asked = made.context.partition("\n\nMemorize and track")
    assert about and asked.count(f"{ruler.NOISE}\n") == 9 and shown.count(f"{ruler.NOISE}\n") == 15
    answer = shown.rpartition("they are:  ")[2].split()
    assert shown.startswith("Memorize and track") and [len(name) for name in answer] == [3] * 5
    assert all(f"VAR {new} = VAR {old} " in shown for old, new in pairwise(answer))


@pytest.mark.parametrize("length, often, seldom, shown", [(700, 6, 1, (3, 1)), (4096, 30, 3, (10, 3))])
def test_common_words_are_there_more_often(length, often, seldom, shown):
    made = ruler.cwe(Draw(5, 20, length=length))
    example, _, listed = made.context.rpartition("Below is a numbered list of words.")
    whole = listed.partition("often.\n")[2]
    entries = [entry.rstrip("0123456789 \n") for entry in whole.split(". ")[1:]]
    counts = Counter(entries)
    assert len(counts) == 30 and {counts[word] for word in made.references} == {often}
    assert {counts[word] for word in counts.keys() - set(made.references)} == {seldom}
    assert whole.startswith("1. ") and f" {len(entries)}. " in whole
    answered = example.rpartition("appear most often in the list are: ")[2]
    assert answered.startswith("1. ") and " 10. " in answered and answered.endswith("\n")
    assert len(example.partition("often.\n")[2].partition("\nQuestion")[0].split(". ")) - 1 in {
        (10 * shown[0] + 10 * shown[1]), (10 * shown[0] + 30 * shown[1])
    }  # fmt: skip
    assert made.asked == (
        "Question: What are the 10 most common words in the above list? Answer: The top 10 words that appear most "
        "often in the list are:"
    )
    assert made.steps == 120


def test_more_common_words_than_the_list_has_are_pairs():
    known = len(ruler._words("noun", "adjective", "verb"))
    made = ruler.cwe(Draw(0, known, length=4096))
    assert known > 8000 and all("-" in word for word in made.references)


def test_frequencies_of_made_up_words_fall_by_their_rank():
    made = ruler.fwe(Draw(0, 1000, length=2050))
    drawn = made.context.partition("coded words. ")[2].split()
    counts = Counter(drawn)
    assert counts["..."] == 607 and [counts[word] for word in made.references] == [151, 67, 37]
    assert all(times < 37 for word, times in counts.items() if word not in (*made.references, "..."))
    assert len(counts) == 24  # of 40 words the others would be there less than once
    assert made.asked.endswith("three most frequently appeared words are:") and made.steps == 50


@pytest.mark.parametrize("task", ruler.TASKS)
def test_a_prompt_is_the_longest_that_fits(task):
    made = ruler.fitted(task, 3, 900, 0.5, words, ESSAYS)
    assert made == ruler.fitted(task, 3, 900, 0.5, words, ESSAYS)
    draws = (Draw(3, size, 0.5, 900, ESSAYS) for size in count(1))
    texts = dropwhile(lambda text: text != made, map(ruler.TASKS[task], draws))
    more = next(text for text in texts if text != made)
    assert words(made.context + made.asked) + made.steps <= 900 < words(more.context + more.asked) + more.steps
    assert all(made.context.count(one) for one in made.references)
    with pytest.raises(ValueError, match=f"{task} in length=20 tokens; use at least"):
        ruler.fitted(task, 3, 20, 0.5, words, ESSAYS)


def test_the_score_is_the_share_of_references_in_the_answer():
    assert ruler.score(" 123, Abc and 9", ["123", "aBC", "77"]) == pytest.approx(2 / 3)
    assert ruler.score("", ["1"]) == 0
