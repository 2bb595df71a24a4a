"""`kvq`: look at a registry of artifacts, check them, and move their aliases. Needs no calibration extra.

Exit codes
    0    done
    1    a check failed: a damaged file, event, lock or model mismatch; a fault found by doctor; the machine failed
    2    usage: unknown command or option, or text that is no reference, name or version
    3    not found: name, version, alias or file
    4    conflict: somebody else's change came first, or a change that contradicts what is there
    130  interrupted
"""

import argparse
import os
import re
import sys
import warnings
from collections.abc import Callable
from importlib import metadata

from kvq_runtime import commands, exchange, signatures
from kvq_runtime.errors import ArtifactError, Conflict, NotFound
from kvq_runtime.reference import PRODUCTION
from kvq_runtime.registries import search
from kvq_runtime.registries.upkeep import GRACE
from kvq_runtime.table import printable

EXIT_CODES = (__doc__ or "").partition("\n\n")[2]
EPILOG = f"""\
references
    NAME                production, else the newest version that is not yanked
    NAME@1.2.0          a version
    NAME@production     an alias
    NAME@sha256:HEX     bytes
    hf://ORG/NAME@...   each of these, in that registry
    PATH.safetensors    a file (show, verify, diff)

examples
    kvq recipes                                        what there is to calibrate or use
    kvq recipes aqua-2bit                              every setting of one
    kvq list                                           what is in your registry
    kvq show qwen2.5-7b-aqua-2bit                      settings, origin, errors, evaluations
    kvq promote qwen2.5-7b-aqua-2bit@1.2.0             make it production
    kvq rollback qwen2.5-7b-aqua-2bit                  and undo that
    kvq pull qwen2.5-7b-aqua-2bit -o out --lock kvq.lock
    kvq verify qwen2.5-7b-aqua-2bit --lock kvq.lock    every check, against the lock
    kvq push qwen2.5-7b-aqua-2bit@1.2.0 hf://my-org    to a Hugging Face Hub
    kvq copy --all hf://my-org file:///mnt/mirror      everything there, to a folder
    kvq search --corpus redpajama hf://my-org          what was made of a corpus, a model, a revision
    kvq list --json | jq '.[].name'                    every table is JSON too

{EXIT_CODES}
environment
    KVQ_HOME        where everything of yours is kept; default ~/.kvq, the registry is in its folder registry
    KVQ_REGISTRY    the registry, file:///folder or hf://org; --registry comes first
    HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE    as everywhere: the Hub, its token, its cache, no network
"""


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    try:
        args = parser().parse_args(argv)
        if not sys.stderr.isatty():
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when huggingface_hub is imported
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", UserWarning)  # ours; others' deprecations are not the user's to mend
            warnings.showwarning = lambda message, *_, **__: _say("warning", message)
            code = args.run(args)
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse: help, version or a usage error, printed already
        return stop.code if isinstance(stop.code, int) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output went away, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        return _say("kvq", f"{error.name} is not installed: pip install 'kvq-runtime[calib]'", 1)
    except NotFound as error:
        return _say("kvq", error, 3)
    except Conflict as error:
        return _say("kvq", error, 4)
    except ArtifactError as error:
        return _say("kvq", error, 1)
    except ValueError as error:
        return _say("kvq", error, 2)
    except (OSError, RuntimeError) as error:
        return _say("kvq", error, 1)


def _say(who: str, message: object, code: int = 0) -> int:
    print(f"{who}: {printable(str(message))}", file=sys.stderr)
    return code


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        "kvq",
        description="Artifacts for compressed KV caches: find, check, move, undo.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=_version())
    commands_of = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add = _adder(commands_of)

    _where(add("list", commands.list_names, "names in the registry", "kvq list --json"))
    command = add("search", commands.search_names, "versions by what they were made of", "kvq search --model qwen2.5")
    _where(command)
    for field in search.FIELDS:
        command.add_argument(f"--{field}", metavar="PATTERN", help=f"a part of the {field}, or all of it with * and ?")
    command = add("show", commands.show, "settings, origin, errors and evaluations of a version", "kvq show NAME@1.2.0")
    _reference(command, "NAME, NAME@VERSION, NAME@ALIAS, NAME@sha256:HEX or a .safetensors file")
    _lock(command, "the reference means what this lock file pins")
    command = add(
        "pull", commands.pull, "copy a version and its files, checked", "kvq pull NAME@1.2.0 -o out --lock kvq.lock"
    )
    _reference(command, "NAME, NAME@VERSION, NAME@ALIAS or NAME@sha256:HEX")
    command.add_argument("-o", "--output", metavar="DIR", help="folder to write to (default: NAME)")
    _lock(command, "write a lock file that pins what was pulled")
    command.add_argument("--locked", metavar="FILE", help="pull what this lock file pins, or fail")
    command.add_argument(
        "--key", metavar="FILE", help="public key; demand its signature, now and whenever the lock is used"
    )
    command.add_argument("--lowest", metavar="VERSION", help="with --key: accept no version older than this")
    command.add_argument(
        "--follow", action="store_true", help="with --key: the lock does not pin, it lets the alias move"
    )
    command = add(
        "verify", commands.verify, "make every check of an artifact", "kvq verify out/kvq.safetensors --lock kvq.lock"
    )
    _reference(command, "a reference or a .safetensors file")
    _lock(command, "check digest and size against this lock file too")
    command.add_argument("--key", metavar="FILE", help="public key: check its signature of name, version and bytes")
    text = "sign a version with an elliptic-curve key (extra `sign`; $KVQ_KEY_PASSWORD)"
    command = add("sign", signatures.sign, text, "kvq sign NAME@1.2.0 --key private.pem")
    _reference(command, "NAME@VERSION, NAME@ALIAS or NAME@sha256:HEX")
    command.add_argument("--key", required=True, metavar="FILE", help="private key, PEM")
    text = "copy a version to another registry, as it is"
    command = add("push", exchange.push, text, "kvq push NAME@1.2.0 hf://my-org --dry-run")
    _reference(command, "NAME@VERSION, NAME@ALIAS or NAME@sha256:HEX")
    _to(command)
    text = "copy a version, or everything, from any registry to any other"
    command = add("copy", exchange.copy, text, "kvq copy --all hf://my-org file:///mnt/mirror")
    _reference(command, "a version, as in hf://ORG/NAME@1.2.0; with --all a NAME, hf://ORG/NAME or a registry")
    command.add_argument("--all", action="store_true", help="every version, alias and yank of it")
    _to(command)
    command = add("promote", commands.promote, "point an alias to a version", "kvq promote NAME@1.2.0 --expect 1.1.0")
    _reference(command, "NAME@VERSION, NAME@ALIAS or NAME@sha256:HEX")
    _alias(command)
    command.add_argument(
        "--expect", metavar="VERSION", help='fail with 4 unless the alias has this version now ("none": is new)'
    )
    command = add("rollback", commands.rollback, "point an alias to the version it had before", "kvq rollback NAME")
    command.add_argument("name", metavar="NAME", help="or hf://ORG/NAME")
    _alias(command)
    command = add("yank", commands.yank, "withdraw a version", "kvq yank NAME@1.2.0 --reason 'wrong corpus'")
    _reference(command, "NAME@VERSION or NAME@sha256:HEX; it stays, and is chosen only by number or digest")
    command.add_argument("--reason", required=True, metavar="TEXT", help="why, in one line")
    command = add("history", commands.history, "every change of a name", "kvq history NAME")
    command.add_argument("name", metavar="NAME", help="or hf://ORG/NAME")
    command = add("diff", commands.diff, "what differs between two artifacts", "kvq diff NAME@1.1.0 NAME@1.2.0")
    command.add_argument("a", metavar="A", help="a reference or a .safetensors file")
    command.add_argument("b", metavar="B", help="another")
    text = "remove temporary files, and blobs or files that no event names"
    command = add("gc", commands.gc, text, "kvq gc --grace 7d --dry-run")
    _where(command)
    command.add_argument(
        "--grace", type=seconds, default=GRACE, metavar="TIME", help="only older ones: 90m, 24h (default), 7d"
    )
    command.add_argument("--dry-run", action="store_true", help="say what would be removed")
    _where(add("doctor", commands.doctor, "find what is wrong with the registry, and say what to do", "kvq doctor"))
    text = "every recipe that comes with kvq (bits: Qwen2.5-7B)"
    command = add("recipes", commands.recipes, text, "kvq recipes aqua-2bit", registry=False)
    command.add_argument("name", metavar="NAME", nargs="?", help="all settings of this one")
    for command in sorted(metadata.entry_points(group="kvq.commands"), key=lambda command: command.name):
        try:
            command.load()(commands_of)
        except ModuleNotFoundError:  # the runtime alone: the package that offers the command is not there
            continue
    return top


def _adder(subparsers) -> Callable[..., argparse.ArgumentParser]:
    def add(
        name: str, run: Callable[[argparse.Namespace], int], idea: str, example: str, registry: bool = True
    ) -> argparse.ArgumentParser:
        command = subparsers.add_parser(
            name,
            help=idea,
            description=f"{idea[0].upper()}{idea[1:]}.",
            epilog=f"example\n    {example}\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--json", action="store_true", help="print JSON")
        if registry:
            text = "file:///folder or hf://org (default: $KVQ_REGISTRY, else $KVQ_HOME/registry)"
            command.add_argument("--registry", metavar="URL", help=text)
        command.set_defaults(run=run)
        return command

    return add


def _where(command: argparse.ArgumentParser) -> None:
    command.add_argument("where", metavar="REGISTRY", nargs="?", help="as --registry")


def _to(command: argparse.ArgumentParser) -> None:
    command.add_argument("to", metavar="TO", help="the registry to copy to: hf://org or file:///folder")
    command.add_argument("--private", action="store_true", help="repositories that are created on a Hub are private")
    command.add_argument(
        "--dry-run", action="store_true", help="check everything, write nothing, say what would be done"
    )


def _reference(command: argparse.ArgumentParser, text: str) -> None:
    command.add_argument("reference", metavar="REFERENCE", help=text)


def _lock(command: argparse.ArgumentParser, text: str) -> None:
    command.add_argument("--lock", metavar="FILE", help=text)


def _alias(command: argparse.ArgumentParser) -> None:
    command.add_argument("--alias", default=PRODUCTION, help=f"which alias (default: {PRODUCTION})")


def seconds(text: str) -> float:
    """A time span as 90m, 24h or 7d, in seconds."""
    match = re.fullmatch(r"([0-9]{1,6})([smhd])", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}; use a number and s, m, h or d, as in 24h")
    return int(match[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}[match[2]]


def _version() -> str:
    try:
        return f"kvq-runtime {metadata.version('kvq-runtime')}"
    except metadata.PackageNotFoundError:
        return "kvq-runtime, not installed"


if __name__ == "__main__":
    sys.exit(main())
