"""HumanEval's programs run apart from everything else, and answers come through the cache."""

import json
from pydoc_data.topics import topics

import pytest
from transformers import AutoTokenizer

from benchmarks import humaneval
from kvq_calib.evaluate.candidate import find
from kvq_calib.evaluate.record import Protocol, load_model
from kvq_calib.model import find as models

PROBLEM = {
    "task_id": "0", "entry_point": "double", "prompt": 'import math\n\n\ndef double(x):\n    """Twice x."""\n',
    "test": "def check(candidate):\n    assert candidate(3) == 6",
}  # fmt: skip
RIGHT = "def double(x):\n    return math.prod([2, x])\n```\nIt doubles."


def test_an_answer_is_tried_as_its_problem_says():
    assert humaneval.passes(humaneval.program(PROBLEM, RIGHT))
    assert not humaneval.passes(humaneval.program(PROBLEM, RIGHT.replace("2", "3")))


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


def test_an_exact_cache_answers_as_16_bit_and_a_coarse_one_is_read(monkeypatch: pytest.MonkeyPatch):
    files = models.resolve("demo")
    model, tokenizer = load_model(files), AutoTokenizer.from_pretrained(files.path, padding_side="left")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(humaneval, "NEW_TOKENS", 8)
    monkeypatch.setattr(humaneval, "BEGUN", "")
    batch = [{"prompt": topics["comparisons"][:size]} for size in (700, 900)]
    recipes = ["exact+window.block=32", "rtn-2bit+window.block=32"]
    candidates = [Protocol(recent=0).candidate(find(text, files)) for text in recipes]
    plain, exact, two = (humaneval.answers(model, tokenizer, one, batch) for one in (None, *candidates))
    assert [one[:2] for one in plain] == [one[:2] for one in exact] != [one[:2] for one in two]
    assert plain[0][2] is None and 0.7 < exact[0][2] == two[0][2] < 1


def test_recipes_are_compared_on_the_problems_that_all_have():
    rows = [
        {"recipe": name, "task": task, "passed": passed, "decoded": decoded, "seconds": 2.0}
        for name, decoded, solved in (("16 bit", None, (1, 1, 0)), ("a", 0.5, (1, 0)))
        for task, passed in enumerate(map(bool, solved))
    ]
    *_, exact, other = humaneval.table(json.loads(json.dumps(rows)))
    assert exact == "| `16 bit` | 2 of 2, 100.0% | 2 |  | 2 |" and other == "| `a` | 1 of 2, 50.0% | 1 | 50% | 2 |"
