"""Pictures of measurements: the same numbers give the same bytes, and names are no markup."""

from dataclasses import replace

import many_versions as many
import pytest

from kvq_calib.report import plots
from kvq_runtime.registry.evaluation_records import parse


def records():
    given = (("kivi-2bit", 0.1, 2.5), ("higgs-2bit", 0.02, 2.1))
    return [parse(many.record(name, kl, recipe=name, bits=bits)) for name, kl, bits in given]


def test_the_same_numbers_give_the_same_pictures():
    first, second = (plots.png(plots.cost_by_bits(records())) for _ in range(2))
    assert first == second and first.startswith(b"\x89PNG")


def test_points_are_the_figures_of_the_records():
    exact = parse(many.record("exact", 0.0, recipe="exact", bits=16))
    full, relative, in_use, _ = plots.cost_by_bits([*records(), exact]).axes
    drawn = {text.get_text(): text.xy for text in full.texts}
    assert drawn == {"kivi-2bit": (2.5, pytest.approx(0.1)), "higgs-2bit": (2.1, pytest.approx(0.02))}
    assert relative.texts[0].xy[1] == pytest.approx(100 * records()[0].figures("full").relative)
    assert in_use.texts[0].xy[1] == pytest.approx(0.01)


def test_any_name_is_drawn_as_it_is():
    name = "$x^ and $<script>alert(1)</script>\u202e\x1b[31m" + 500 * "a"
    picture = plots.svg(plots.cost_by_bits([replace(records()[0], name=name)])).decode()
    assert "<script" not in picture and "\u202e" not in picture and "\x1b" not in picture
