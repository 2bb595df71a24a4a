"""HumanEval's programs run apart from everything else, and answers to all tasks come through the cache."""

import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from transformers import AutoTokenizer

from benchmarks import answers, chats, humaneval, work
from kvq_calib.evaluate.record import load_model
from kvq_calib.model import find as models

PROBLEM = {
    "task_id": "0", "entry_point": "double", "prompt": 'import math\n\n\ndef double(x):\n    """Twice x."""\n',
    "test": "def check(candidate):\n    assert candidate(3) == 6",
}  # fmt: skip
RIGHT = "    return math.prod([2, x])\n"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def test_an_answer_is_tried_as_its_problem_says():
    assert humaneval.solves(PROBLEM, RIGHT)
    assert not humaneval.solves(PROBLEM, RIGHT.replace("2", "3"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(99)",
        "bytearray(1 << 31)",
        "open('x', 'w').write('a' * (1 << 22))",
        "import socket; socket.create_connection(('127.0.0.1', PORT), 2)",
        "open('FOLDER/x', 'w')",
        "import os; os.remove('FOLDER/here')",
    ],
)
def test_a_program_is_limited(code: str, tmp_path, monkeypatch: pytest.MonkeyPatch):
    import socket

    if not humaneval.isolation():
        pytest.skip("unshare does not work here: programs have limits alone")
    (tmp_path / "here").touch()
    monkeypatch.setattr(humaneval, "SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = code.replace("PORT", str(server.getsockname()[1])).replace("FOLDER", str(tmp_path))
        assert humaneval.passes("import os; assert not os.listdir('.'); open('x', 'w').write('a')")
        assert not humaneval.passes(code, patience=3)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.fixture(scope="module")
def demo():
    files = models.resolve("demo")
    model, tokenizer = load_model(files), AutoTokenizer.from_pretrained(files.path, padding_side="left")
    tokenizer.chat_template = TEMPLATE
    answers.pack(model)
    return files, model, tokenizer


def run(demo, sheet: answers.Sheet, recipe: str | None, rows: slice = slice(None)) -> tuple[list[str], float]:
    files, model, tokenizer = demo
    ours = answers.Answers(model, tokenizer, sheet)
    prompts = answers.Prompts.read(model, tokenizer, sheet.contexts[rows])
    tokens = ours.to(prompts, None if recipe is None else answers.through(recipe, files))
    return [ours.text(one) for one in tokens], ours.reads.decoded / max(1, ours.reads.pairs)


def test_an_exact_cache_answers_as_16_bit_and_a_coarse_one_is_read(demo):
    tasks = [answers.Task(str(n), bool) for n in range(3)]
    sheet = answers.Sheet([topics["comparisons"][:size] for size in (500, 700, 900)], tasks, most=8, stops=["e "])
    plain, exact, two = (run(demo, sheet, recipe) for recipe in (None, "exact", "rtn-2bit"))
    assert plain[0] == exact[0] != two[0] and len({*map(len, plain[0])}) > 1
    assert 0.7 < exact[1] == two[1] < 1 and plain[1] == 0
    assert [run(demo, sheet, None, slice(n, n + 1))[0][0] for n in range(3)] == plain[0]  # one by one


@pytest.mark.parametrize("turns", [False, True])
def test_questions_follow_a_context_or_the_answers_before_them(demo, turns: bool):
    asked = ["Is it so?", "Why is it?"]
    context = topics["comparisons"][:600]
    sheet = answers.Sheet([context], [answers.Task(q, bool, q) for q in asked], most=6, turns=turns)
    plain, exact = (run(demo, sheet, recipe)[0] for recipe in (None, "exact"))
    alone = [answers.Sheet([context + q], [answers.Task("", bool)], most=6) for q in asked]
    first, second = (run(demo, one, None)[0][0] for one in alone)
    assert plain == exact and plain[0] == first and (plain[1] == second) is not turns


def test_contexts_hold_what_is_asked_for(demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(work, "LENGTHS", (1024,))
    tokenizer = demo[2]
    (tmp_path / "text").write_text(topics["comparisons"])
    (needles,) = work.needle_sheets(tokenizer, tmp_path / "text", 1)
    assert 700 < len(tokenizer(needles.contexts[0]).input_ids) <= 1024 and len(needles.tasks) == work.NEEDLES
    (chat,) = work.chat_sheets(tokenizer, Path(humaneval.__file__), 1)
    for sheet in (needles, chat):
        assert len({task.question for task in sheet.tasks}) == len(sheet.tasks)
        assert all(task.right(sheet.contexts[0]) and not task.right("") for task in sheet.tasks)


def test_recipes_are_compared_on_the_tasks_that_all_have():
    rows = [
        {"recipe": name, "task": task, "passed": passed, "decoded": decoded, "seconds": 2.0}
        for name, decoded, solved in (("16 bit", None, (1, 1, 0)), ("a", 0.5, (1, 0)))
        for task, passed in enumerate(map(bool, solved))
    ]
    *_, exact, other = work.table(json.loads(json.dumps(rows)))
    assert exact == "| `16 bit` | 2 of 2, 100.0% | 2 |  | 2.0 |"
    assert other == "| `a` | 1 of 2, 50.0% | 1 | 50% | 2.0 |"


def test_chats_are_of_whole_turns_in_the_model_s_template(demo, tmp_path, monkeypatch: pytest.MonkeyPatch):
    problem = {"question": "How many?", "answer": "So <<1+1=2>>2.\n#### 2"}
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(problem)}\n" * 300)
    monkeypatch.setattr(chats.AutoTokenizer, "from_pretrained", lambda _: demo[2])
    chats.main("demo", tmp_path / "train.jsonl", tmp_path / "chats.jsonl")
    texts = [json.loads(line)["text"] for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    assert len(texts) % 3 == 0 and min(map(len, texts)) >= chats.LEAST
    sums, code, explained = texts[0], texts[len(texts) // 3], texts[-1]
    assert sums.startswith("user: How many?\nassistant: So 2.\n#### 2\nuser:")
    head, _, whole = code.removeprefix("user: Complete this Python function:\n").partition("\nassistant: ")
    assert whole.startswith(head.rstrip("`\n")) and len(head) < len(whole)
    assert explained.startswith("user: Explain scikit-learn's ")
