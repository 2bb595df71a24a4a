"""What leads a comparison of two artifacts: losses on the same windows, bits, bytes; never fits that cannot be held
against each other."""

import pytest
import tiny_artifact as tiny

from kvq_runtime.registry import resolve

NAME = "tiny-2bit"


def record(sha256: str, relative: float, digest: str = "d" * 64) -> dict:
    figures = {"perplexity": 12 * (1 + relative), "relative": relative, "kl": relative / 10, "top1": 0.9}
    about = {"windows": 4, "length": 512, "step": 32, "text": {"source": "book", "seed": 0, "token_digest": digest}}
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
    for held, wanted in ((0, False), (2, True)):
        for number, one in enumerate(made):
            fit = {"layers": [{"key": {"relative_error": 0.1 + number}}] * one.fingerprint.geometry.layers}
            changed = dataclasses.replace(one, provenance={"samples": 9, "held_out": 2 * number or held}, fit=fit)
            store.publish(f"fit-{held}-{number}", artifact.to_bytes(changed))
        rows = as_json("diff", f"fit-{held}-0@1.0.0", f"fit-{held}-1@1.0.0")
        assert any(row["part"] == "fit" for row in rows) == wanted


def test_of_other_windows_nothing_is_compared(store, as_json):
    version = store.publish("other", tiny.data(7))
    store.add_evaluation(record(version.sha256, 0.01, "e" * 64), "other")
    rows = as_json("diff", f"{NAME}@1.0.0", "other@1.0.0")
    names = [row["name"] for row in rows if row["part"] == "evaluation"]
    assert names == ["verdict", "same windows"]
