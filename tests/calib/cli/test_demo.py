"""`make demo`: it publishes what it fits, says what it left out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvq_calib.cli import demo
from kvq_runtime.registry import resolve

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("protocols", [demo.SHORT.protocols, demo.REAL.protocols])
def test_it_publishes_what_it_measured_and_says_what_it_left_out(protocols, monkeypatch, capsys, tmp_path):
    small = replace(demo.SHORT, samples=8, windows=2, length=512, beside=(), write=2, protocols=protocols)
    monkeypatch.setattr(demo, "SHORT", small)
    monkeypatch.setenv("KVQ_HOME", str(tmp_path / "home"))
    assert demo.main(["--json", str(tmp_path / "demo.json")]) == 0
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "demo.json").read_text())
    version = resolve.open_registry().state("demo-aqua-2bit").versions["1.0.0"]
    assert version.sha256[:12] in said and found["published"] == ["demo-aqua-2bit"]
    assert [row["recipe"] for row in found["rows"]] == ["16 bit", "aqua-2bit"]
    assert ("in use, KL" in found["rows"][1]) == ("in-use" in protocols)
    assert small.left_out in said and "make demo DEMO_ARGS=--full" in said
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
