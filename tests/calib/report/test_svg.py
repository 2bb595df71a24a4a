"""A figure in a page: names as they are, nothing that its policy refuses, colours that follow light and dark."""

import re
import warnings
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from kvq_calib.report import answered, fit_plots, plots
from kvq_calib.report.looks import names_as_they_are
from kvq_calib.report.page.html import svg
from kvq_calib.report.panels import Point
from kvq_runtime.registry.measured import Cell

NAMES = ["$\\frac{a}$", "\u6f22\u5b57", 'a\x00\u202e<b>&"', "<script>alert(1)</script>", "kivi-2bit", "higgs-2bit"]


def some() -> Figure:
    with names_as_they_are():
        points = [Point(name, name, 2 + n / 3, 0.1 / 2**n, 0.001, here=n == 0) for n, name in enumerate(NAMES)]
        return plots.scatter(points)


@pytest.fixture(scope="module")
def picture() -> str:
    with names_as_they_are():
        return svg(some(), "losses")


def test_names_are_text_and_no_formula_or_markup(picture):
    read = ElementTree.fromstring(picture)
    said = [part.text or "" for part in read.iter("text")]
    shown = ["$\\frac{a}$ (this version)", *NAMES[1:2], 'a\\x00\\u202e<b>&"', *NAMES[3:]]
    assert set(shown) <= set(said)
    assert {part.tag for part in read.iter()} <= {
        "svg",
        "g",
        "defs",
        "path",
        "use",
        "text",
        "clipPath",
        "rect",
        "title",
    }
    titles = [part.text or "" for part in read.iter("title")]
    assert f"{shown[3]}: 3 bits, 0.0125 ± 0.001 nats" in titles and len(titles) == len(NAMES)


def test_a_picture_has_no_style_and_links_to_itself_alone(picture):
    read = ElementTree.fromstring(picture)
    known = {part.get("id") for part in read.iter() if part.get("id")}
    assert known and not any("style" in part.attrib for part in read.iter())
    links = re.findall(r'href="([^"]*)"', picture) + re.findall(r"url\(([^)]*)\)", picture)
    assert links and {link.removeprefix("#") for link in links} <= known and all(link[0] == "#" for link in links)
    assert "http" not in picture


def test_the_same_figure_is_the_same_text_and_another_label_has_other_identifiers(picture):
    with warnings.catch_warnings(), names_as_they_are():
        again, other = svg(some(), "losses"), svg(some(), "others")
    assert again == picture
    assert not set(re.findall(r' id="([^"]*)"', picture)) & set(re.findall(r' id="([^"]*)"', other))


def test_colours_follow_light_and_dark_but_those_of_cells():
    rows = [{"layer": n, "keys": 2.0, "values": 3.0} for n in range(2)]
    errors = [{name: 0.1 for name in plots.ERRORS}, dict.fromkeys(plots.ERRORS)]
    style = {"color": "#0072B2", "marker": "o"}
    for given in (fit_plots.layer_bits(rows, 10, 3), plots.layer_errors([errors], [style]), some()):
        with names_as_they_are():
            assert not re.findall(r'(?:fill|stroke)="#', svg(given, "x"))
    cells = [Cell("needle", 64, 0.5, 0.25)]
    text = svg(answered.grid([("in use", cells)], ["needle"], [64], [0.5]), "x")
    assert f'fill="{answered.LIGHT}"' in text and "64 tokens, depth 0.5: 25%" in text and "<image" not in text


def test_each_marker_of_a_line_says_its_value_and_a_gap_has_none():
    rows = [{"key_error": value} for value in (0.5, None, 0.0, 0.25)]
    text = svg(plots.layer_errors([rows], [{"color": "#0072B2", "marker": "o"}]), "x")
    assert re.findall(r"<title>(.*?)</title>", text) == ["layer 0, keys: 0.5", "layer 3, keys: 0.25"]
