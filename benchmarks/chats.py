"""Write chats in a model's template: text to fit a chat model on, beside other text.

    python -m benchmarks.chats build/qwen2.5-coder-0.5b gsm8k/train.jsonl chats.jsonl

A line a chat of several turns, all of one kind: problems of GSM8K and their solutions, scikit-learn's functions
completed, its estimators explained. Each kind has the same number of chats.
"""

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from sklearn.utils.discovery import all_estimators, all_functions
from transformers import AutoTokenizer

LEAST = 6_000  # characters of a chat: over 1,024 tokens
LONGEST = 10_000  # of an answer
FUNCTION = "Complete this Python function:\n```python\n{}\n```"
Turn = tuple[str, str]  # what a user asks, and the answer


def problems(path: Path) -> Iterator[Turn]:
    """Yield problems of arithmetic, without the marks of a calculator."""
    for line in path.read_text(encoding="utf-8").splitlines():
        problem = json.loads(line)
        yield problem["question"], "".join(part.rpartition(">>")[2] for part in problem["answer"].split("<<"))


def functions() -> Iterator[Turn]:
    """Yield heads of functions, to the end of their docstrings, and the whole functions."""
    for _, function in all_functions():
        source = inspect.getsource(inspect.unwrap(function))
        source = source[source.index("def ") :]
        yield FUNCTION.format('"""'.join([*source.split('"""')[:2], ""])), f"```python\n{source}```"


def explanations() -> Iterator[Turn]:
    """Yield names of estimators, and their docstrings."""
    for name, estimator in all_estimators():
        yield f"Explain scikit-learn's {name}.", inspect.getdoc(estimator) or ""


def chats(turns: Iterator[Turn]) -> Iterator[list[dict[str, str]]]:
    """Join turns to chats."""
    chat: list[dict[str, str]] = []
    for question, answer in turns:
        if len(answer) <= LONGEST:
            chat += {"role": "user", "content": question}, {"role": "assistant", "content": answer}
        if sum(len(said["content"]) for said in chat) >= LEAST:
            yield chat
            chat = []


def main(model: str, data: Path, out: Path) -> None:
    """Write the file."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    kinds = [list(chats(turns)) for turns in (problems(data), functions(), explanations())]
    count = min(map(len, kinds))
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for kind in kinds for chat in kind[:count]]
    out.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts), encoding="utf-8")
    print(f"{out}: {count} chats of each kind")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
