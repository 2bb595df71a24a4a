"""The recall model's calibration text: its tasks written out, none of which an evaluation asks."""

from functools import lru_cache

from kvq_calib.tasks import symbols, synthetic

TEXTS = 400
LENGTH = 1280  # tokens of each
FIRST = 1 << 31  # seed: evaluations count from 0, training from 1 << 32


@lru_cache(maxsize=1)
def documents() -> list[tuple[str, str]]:
    """All texts as (name, text), in a fixed order: every task in turn, with its answers, at depths that are spread."""
    words, tasks = symbols.words(), list(synthetic.TASKS)
    found = []
    for number in range(TEXTS):
        task = tasks[number % len(tasks)]
        made = synthetic.TASKS[task](FIRST + number, LENGTH, (number + 0.5) / TEXTS)
        # the tokenizer itself begins a text
        found.append((f"{task}/{number}", " ".join(words[token] for token in made.tokens[1:])))
    return found
