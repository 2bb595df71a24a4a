"""The option `--set` of every command that takes a recipe. Imports nothing that takes long."""

from argparse import ArgumentParser, _ArgumentGroup

EXPLAINED = """\
recipes
    NAME                       a recipe that comes with kvq (kvq recipes lists them)
    FILE.json                  one of your own: what kvq recipes NAME --json prints, edited
    NAME+PATH=VALUE+...        either, with other settings; --set PATH=VALUE is the same for all recipes of a command
    PATH is position, window.recent, key.quantize.bits, value.predict.ridge, key.feedback (a kind, or none),
    layers.0.key.quantize.bits, policies.heavy.share, name, ...: kvq recipes NAME prints all of them. A wrong one is
    answered with what is allowed there. A changed recipe has a name of its own: squat-2bit-key.feedback.rank-60."""


def add_settings(command: ArgumentParser | _ArgumentGroup, whose: str) -> None:
    """Add `--set`."""
    command.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE",
        help=f"another setting {whose}, as in key.feedback.rank=60 or window.recent=32; repeat for several",
    )  # fmt: skip
