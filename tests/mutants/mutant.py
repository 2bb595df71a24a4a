"""What a mutant is: one change to a file that a test has to notice."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """One change that a test has to notice.

    breaks          what is wrong after it, in a sentence
    before, after   text that stands once in `file`, and what it becomes
    tests           files of tests/, those that ought to see it first
    """

    name: str
    breaks: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def place(self, root: Path) -> Path:
        """The file to change in a checkout; a ValueError where `before` does not stand in it once."""
        path = root / self.file
        if not path.is_file() or path.read_text().count(self.before) != 1:
            raise ValueError(f"{self.name}: {self.file} has not once the text {self.before!r}; say where it is now")
        return path
