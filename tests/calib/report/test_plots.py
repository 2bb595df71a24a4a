"""Pictures of measurements: the same numbers give the same bytes, and names are no markup."""

from dataclasses import replace

import many_versions as many
import pytest

from kvq_calib.report import plots
from kvq_calib.report.plots import KL, PERPLEXITY, Point
from kvq_runtime.registry.evaluation_records import parse


def records():
    return [
        parse(many.record(name, kl, recipe=name, bits=bits))
        for name, kl, bits in (("kivi-2bit", 0.1, 2.5), ("higgs-2bit", 0.02, 2.1))
    ]


@pytest.mark.parametrize("draw", [plots.error_by_layer, plots.perplexity_by_bits])
def test_the_same_numbers_give_the_same_picture(draw):
    given = records()
    picture = draw(given)
    assert picture.startswith(b"\x89PNG") and picture == draw(records()) != draw(given[:1])


def test_points_are_the_figures_of_the_records():
    (first, second) = plots.points(records(), KL, "full")
    assert (first.name, first.bits, first.cost) == ("kivi-2bit", 2.5, pytest.approx(0.1))
    assert second.cost == pytest.approx(0.02) and second.spread is not None
    (one, _) = plots.points(records(), PERPLEXITY, "full")
    assert one.cost == pytest.approx(100 * records()[0].figures("full").relative)


def test_what_was_not_measured_or_is_exact_is_left_out():
    axis = plots.divergence_by_bits([Point("exact", 16.0, 0.0), Point("none", 2.0, 0.0), Point("a", 2.0, 0.1)]).axes[0]
    assert [text.get_text() for text in axis.texts] == ["a"]
    assert plots.png(plots.layer_errors({"": []})) and plots.png(plots.divergence_by_bits([]))


@pytest.mark.parametrize("name", ["$x^", "<script>alert(1)</script>\u202e\x1b[31m", "名前", "a" * 500])
def test_any_name_is_drawn_as_it_is(name):
    given = [replace(one, name=name) for one in records()]
    assert plots.perplexity_by_bits(given) and plots.error_by_layer(given)
    said = plots.svg(plots.divergence_by_bits([Point(name, 2.0, 0.1)])).decode()
    assert "<script" not in said and "\u202e" not in said and "\x1b" not in said


def test_bars_are_the_bits_of_keys_and_values():
    figure = plots.bits_by_layer([{"layer": 0, "keys": 2.0, "values": 3.0}, {"layer": 1, "keys": 4.0, "values": 1.0}])
    assert [bar.get_height() for bar in figure.axes[0].patches] == [2.0, 4.0, 3.0, 1.0]
