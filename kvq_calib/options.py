"""What options of commands are read as. Imports nothing that takes long: `--help` must not wait for it."""

import argparse


def count(text: str) -> int:
    """A number of things, of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; use a whole number of at least 1")
    return int(text)
