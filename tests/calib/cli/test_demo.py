"""`make demo` publishes what it fits, measures it and loads it."""

import json

import pytest

from kvq_runtime.registry import resolve
from scripts import demo


@pytest.mark.slow
def test_the_demo_publishes_measures_and_loads(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo, "WRITTEN", 2)
    assert demo.main(["--json", str(tmp_path / "demo.json")]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "demo.json").read_text())
    version = resolve.open_registry().state("demo-aqua-2bit").versions["1.0.0"]
    assert version.sha256[:12] in out and found["published"][0]["artifact"] == "demo-aqua-2bit@1.0.0"
    assert [record["result"]["recipe"] for record in found["records"]] == ["aqua-2bit", "higgs-2bit"]
    assert "USABLE" in out and "times smaller than 16 bit" in out
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
