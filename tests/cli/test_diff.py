"""What leads a comparison of two artifacts: losses on the same windows, bits, bytes; never fits that cannot be held
against each other."""

import pytest
import tiny_artifact as tiny

from kvq_runtime.registry import resolve

NAME = "tiny-2bit"


def record(sha256: str, relative: float, digest: str = "d" * 64, windows: int = 4, step: int = 32) -> dict:
    figures = {"perplexity": 12 * (1 + relative), "relative": relative, "kl": relative / 10, "top1": 0.9}
    text = {"source": "book", "seed": 0, "token_digest": digest}
    about = {"windows": windows, "length": 512, "step": step, "text": text}
    result = {"recipe": "tiny", "protocols": {"full": figures}}
    return {"artifact": sha256, "corpus": "c" * 64, "protocol": about, "environment": {}, "result": result}


@pytest.fixture
def store():
    store = resolve.open_registry()
    for seed, relative in enumerate((0.22, 0.349)):
        version = store.publish(NAME, tiny.data(seed))
        store.add_evaluation(record(version.sha256, relative), NAME)
    return store


def test_losses_bits_and_bytes_lead_and_layers_are_asked_for(store, kvq, as_json):
    rows = as_json("diff", f"{NAME}@1.0.0", f"{NAME}@1.0.1")
    assert [row["part"] for row in rows[:4]] == ["evaluation"] * 4 and rows[0]["a"] == "too lossy"
    assert next(row for row in rows if row["name"] == "full encode: relative")["b"] == 0.349
    assert {row["name"].partition(" of")[0] for row in rows if row["part"] == "size"} >= {"bits", "bytes"}
    _, out, _ = kvq("diff", f"{NAME}@1.0.0", f"{NAME}@1.0.1")
    assert "layers.0.key" not in out and "left out: --layers" in out
    assert "layers.0.key" in kvq("diff", f"{NAME}@1.0.0", f"{NAME}@1.0.1", "--layers")[1]


def test_fit_errors_of_unlike_held_out_parts_are_never_shown(store, as_json):
    import dataclasses

    from kvq_runtime.artifact import artifact

    made = [artifact.from_bytes(tiny.data(seed)) for seed in (0, 1)]
    for held, seed, wanted in ((0, 0, False), (2, 0, True), (2, 1, False)):
        for number, one in enumerate(made):
            fit = {"layers": [{"key": {"relative_error": 0.1 + number}}] * one.fingerprint.geometry.layers}
            said = {"samples": 9, "held_out": 2 * number or held, "seed": seed * number}
            changed = dataclasses.replace(one, provenance=said, fit=fit)
            store.publish(f"fit-{held}-{seed}-{number}", artifact.to_bytes(changed))
        rows = as_json("diff", f"fit-{held}-{seed}-0@1.0.0", f"fit-{held}-{seed}-1@1.0.0")
        assert any(row["part"] == "fit" for row in rows) == wanted


def test_the_longest_measurement_that_both_have_is_compared(store, as_json):
    for version, relative in zip(("1.0.0", "1.0.1"), (0.23, 0.36), strict=True):
        digest = resolve.resolve(f"{NAME}@{version}").sha256
        store.add_evaluation(record(digest, relative, "f" * 64, windows=9), NAME)
        store.add_evaluation(record(digest, relative / 2, "e" * 64, windows=2), NAME)
    rows = as_json("diff", f"{NAME}@1.0.0", f"{NAME}@1.0.1")
    (found,) = (row for row in rows if row["name"] == "full encode: relative")
    assert (found["a"], found["b"]) == (0.23, 0.36)


@pytest.mark.parametrize("other", [{"digest": "e" * 64}, {"step": 64}, {"windows": 5}], ids=str)
def test_of_other_windows_nothing_is_compared(other, store, as_json):
    version = store.publish("other", tiny.data(7))
    store.add_evaluation(record(version.sha256, 0.01, **other), "other")
    rows = as_json("diff", f"{NAME}@1.0.0", "other@1.0.0")
    names = [row["name"] for row in rows if row["part"] == "evaluation"]
    assert names == ["verdict", "same windows"]
