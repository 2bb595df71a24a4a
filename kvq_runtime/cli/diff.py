"""The command `kvq diff`: compare two artifacts, first by what counts: losses on the same windows, bits, bytes."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.artifact.describe import diff as differences
from kvq_runtime.artifact.describe import relative
from kvq_runtime.cli.table import print_table
from kvq_runtime.registry import rating
from kvq_runtime.registry.evaluation_records import PROTOCOLS, SPOKEN, Record, TextRecord, readable, text_records
from kvq_runtime.registry.resolve import load_artifact, open_registry, resolve
from kvq_runtime.store.estimate import Sizes
from kvq_runtime.store.memory import asymptotic_bits

TOKENS = 4096
Records = Sequence[Record]


def diff(args: Namespace) -> int:
    """Print what differs between two artifacts."""
    a, b = (load_artifact(reference, args.registry) for reference in (args.a, args.b))
    found = differences(a, b)
    left_out = unlike(a, b) if any(row["part"] == "fit" for row in found) else None
    found = [row for row in found if left_out is None or row["part"] != "fit"]
    rows = [*compared(a, b, _evaluations(args.a, args), _evaluations(args.b, args)), *found] if found else []
    if args.json:
        print_table(rows, json=True)
    elif not rows:
        print(f"{args.a} and {args.b} are equal")
    else:
        names = {"a": args.a, "b": args.b, "change": "relative change"}
        shown = [row for row in rows if args.layers or row["part"] not in ("fit", "tensor")]
        if len(shown) < len(rows):
            print(f"{len(rows) - len(shown)} rows of the fit and of tensors are left out: --layers\n")
        if left_out:
            print(f"Errors of the fits are not compared: {left_out}\n")
        rows = shown
        print_table([{names.get(name, name): value for name, value in row.items()} for row in rows], json=False)
        print("\nrelative change: (b - a) / |a| of numbers, |b - a| / |a| of tensors, of codes the share that differs")
    return 0


def _evaluations(reference: str, args: Namespace) -> list[Record]:
    """Return a registry's evaluations of a version; a file has none."""
    resolved = resolve(reference, args.registry)
    if not resolved.registry:
        return []
    return readable(open_registry(resolved.registry).evaluations(resolved.sha256, resolved.name))


def compared(a: Artifact, b: Artifact, of_a: Records, of_b: Records) -> list[dict[str, Any]]:
    """Rows as `diff` has them, first of all verdicts and losses, then sizes.

    of_a, of_b   evaluation records; losses are compared on windows that both were measured on
    """
    found = [_row("evaluation", "verdict", rating.rate_records(of_a).word, rating.rate_records(of_b).word)]
    pairs = _pairs(of_a, of_b)
    if not pairs:
        found.append(_row("evaluation", "same windows", None, None) | {"a": "none", "b": "none: kvq eval A B"})
    for one, other in pairs[:1]:
        for protocol in PROTOCOLS:
            left, right = (record.figures(protocol) for record in (one, other))
            if left is not None and right is not None:
                for name in ("relative", "kl", "top1"):
                    found.append(
                        _row("evaluation", f"{SPOKEN[protocol]}: {name}", getattr(left, name), getattr(right, name))
                    )
    geometries = [made.fingerprint.geometry for made in (a, b)]
    bits = [round(asymptotic_bits(made.recipe, shape), 4) for made, shape in zip((a, b), geometries, strict=True)]
    sizes = [Sizes(made.recipe, made.fingerprint.geometry, sliding=made.fingerprint.sliding) for made in (a, b)]
    found.append(_row("size", "bits of one more token, per element", *bits))
    found.append(_row("size", f"bytes of {TOKENS} tokens", *(one.at(TOKENS).total for one in sizes)))
    found.append(_row("size", "smaller than 16 bit from", *(one.smaller_from() for one in sizes)))
    return found


def unlike(a: Artifact, b: Artifact) -> str | None:
    """The reason why errors of two fits cannot be compared; None: they are of the same held-out sequences."""
    held = [made.provenance.get("held_out") for made in (a, b)]
    names = ("model", "corpus", "samples", "seq_len", "seed", "held_out")
    if not all(held):
        return f"one was measured on the sequences of its own fit (held out: {held[0] or 0} and {held[1] or 0})"
    if any(a.provenance.get(name) != b.provenance.get(name) for name in names):
        return "they are of other held-out sequences"
    return None


def _pairs(of_a: Records, of_b: Records) -> list[tuple[TextRecord, TextRecord]]:
    """Records of the same text by the same protocol, of the most tokens first."""
    left, right = text_records(of_a), text_records(of_b)
    pairs = [(one, other) for one in left for other in right if _windows(one) and _windows(one) == _windows(other)]
    return sorted(pairs, key=lambda pair: -pair[0].protocol.windows * pair[0].protocol.length)


def _windows(record: TextRecord) -> Any:
    """Return what two records share if their figures can be compared; None: this one has no figures."""
    given = record.protocol
    digest = record.decisive and given.text.token_digest
    return digest and (digest, given.windows, given.length, given.step, given.recent)


def _row(part: str, name: str, a: Any, b: Any) -> dict[str, Any]:
    return {"part": part, "name": name, "a": a, "b": b, "change": relative(a, b)}
