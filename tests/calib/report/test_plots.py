"""Pictures can be read: looks differ, names stand free inside the axes, the frontier is one, numbers are plain."""

import dataclasses
import itertools
import random

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from kvq_calib.evaluate.subject import compared
from kvq_calib.report import looks as draw
from kvq_calib.report import panels, plots, tables
from kvq_calib.report.looks import families, looks
from kvq_runtime.cli.table import print_table
from kvq_runtime.recipe import family
from kvq_runtime.registry.measured import TextRecord
from kvq_runtime.registry.sound import read

BITS = {"asymptotic": 2.0, "at_length": 6.0, "at_4096": 3.0, "all_at_4096": 3.3}
GOOD = {
    "higgs-2bit": (2.125, 0.11),
    "kivi-2bit": (3.0, 0.073),
    "aqua-2bit": (2.46, 0.0056),
    "aqua-klt-1bit": (1.5, 0.0058),
}


def record(*given, **named) -> TextRecord:
    """`as_json`, read."""
    return read(as_json(*given, **named))


def as_json(
    recipe: str, bits: float, kl: float, relative: float | None = None, windows: int = 6, digest: str = ""
) -> dict:
    """A record with both protocols; windows differ by a tenth."""
    relative = kl if relative is None else relative
    kls = [kl * (1 + 0.1 * (number % 2)) for number in range(windows)]
    part = {"reference_perplexity": 20.0, "tokens": 100, "decoded": None, "perplexity": 20 * (1 + relative),
            "relative": relative, "relative_se": 0.001, "kl": kl, "top1": 0.9,
            "windows": {"loss": kls, "reference_loss": kls, "kl": kls}}  # fmt: skip
    layers = [
        {
            "layer": n,
            "key_error": kl * (n + 1),
            "value_error": kl,
            "attention_error": kl / 9,
            "attention_error_encoded": kl,
        }
        for n in range(3)
    ]
    result = {"recipe": recipe, "protocols": {"full": part, "in-use": part}, "bits": BITS | {"asymptotic": bits},
              "layers": layers, "window": {"block": 128}}  # fmt: skip
    text = {"source": "stories", "split": "held-out"}
    protocol = {"model": {"id": "tiny", "revision": None, "parameters": 4_070_000}, "step": 32, "windows": windows,
                "length": 512, "recent": None, "error_windows": 4, "text": text}  # fmt: skip
    return {"artifact": digest or recipe, "corpus": "1", "protocol": protocol, "environment": {}, "result": result}


def some(given: dict[str, tuple[float, float]] = GOOD) -> list[TextRecord]:
    return [record(name, *where) for name, where in given.items()]


def drawn(records: list[TextRecord], *measures: str) -> Figure:
    return plots.costs(records, measures or (panels.KL, panels.PERPLEXITY))


def written(axis) -> dict[str, Annotation]:
    """The names in an axis; lines to names have no text."""
    return {text.get_text(): text for text in axis.texts if isinstance(text, Annotation) and text.get_text()}


def test_every_family_has_its_own_look_in_every_picture():
    for one, other in itertools.combinations(families(), 2):
        assert families()[one] != families()[other], f"{one} and {other} look alike: give one another `look`"
    chosen = compared()
    alone = {name: looks([name])[0] for name in chosen}
    for name, look in zip(chosen[::-1], looks(chosen[::-1]), strict=True):
        assert (look.colour, look.marker) == (alone[name].colour, alone[name].marker) == families()[family(name)]


def test_no_two_lines_of_a_picture_are_alike():
    given = [*compared(), "mine", "yours", *["aqua-klt-1bit"] * 20]
    lines = [look.line for look in looks(given)]
    keys = ("color", "marker", "linestyle", "fillstyle")
    assert len({tuple(line[key] for key in keys) for line in lines}) == len(given)


def test_no_picture_has_more_lines_than_can_be_told_apart():
    """Of many recipes a few are in colour, ours and the frontier among them; the others are grey, as one in the key."""
    given = {f"mine-{number}": (3.0 + number / 10, 0.1 + number) for number in range(20)}
    given |= {"auto-2.1bit": (2.1, 0.001), "aqua-metric-2bit": (1.7, 0.002)}
    figure = plots.error_by_layer.__wrapped__(some(given))
    (legend,) = figure.legends
    said = {text.get_text() for text in legend.get_texts()}
    assert len(said) == plots.LINES + 1 and {"mine-0", "auto-2.1bit", "aqua-metric-2bit", "others"} <= said
    for axis in figure.axes:
        assert len(axis.lines) == 22 and sum(line.get_color() == "0.8" for line in axis.lines) == 22 - plots.LINES
    few = plots.error_by_layer.__wrapped__(some())
    assert "others" not in {text.get_text() for text in few.legends[0].get_texts()}


def test_the_frontier_is_what_no_other_recipe_beats():
    chance = random.Random(3)
    for _ in range(50):
        given = [panels.Point("", "", chance.randint(1, 6) / 2, chance.randint(1, 9) / 100) for _ in range(12)]
        beaten = [
            one for one in given for other in given
            if other.bits <= one.bits and other.cost <= one.cost and (other.bits, other.cost) != (one.bits, one.cost)
        ]  # fmt: skip
        kept = {(one.bits, one.cost) for one in given} - {(one.bits, one.cost) for one in beaten}
        assert [(one.bits, one.cost) for one in panels.frontier(given)] == sorted(kept)
    axis = drawn(some()).axes[0]
    (stairs,) = [line for line in axis.lines if line.get_label() == "frontier"]
    assert [tuple(place) for place in stairs.get_xydata()[:-1]] == [(1.5, 0.0058), (2.46, 0.0056)]


@pytest.mark.slow
def test_names_stand_inside_the_axes_and_cover_nothing():
    chance, given = random.Random(5), {}
    for number in range(plots.NAMED):  # half of them within a few points of each other
        near = number % 2
        given[f"mine-number-{number}"] = (
            2 + near * chance.random() + chance.random() / 20,
            0.01 * 10 ** (near * chance.random()),
        )
    figure = drawn(some(given))
    for axis in figure.axes:
        found, bounds = written(axis), axis.get_window_extent()
        assert set(given) <= set(found)
        boxes = {name: text.get_window_extent() for name, text in found.items() if name in given}
        for name, box in boxes.items():
            assert bounds.x0 <= box.x0 and box.x1 <= bounds.x1 and bounds.y0 <= box.y0 and box.y1 <= bounds.y1, name
        for one, other in itertools.combinations(boxes, 2):
            assert not boxes[one].overlaps(boxes[other]), (one, other)
        centres = axis.transData.transform([line.get_xydata()[0] for line in axis.lines if len(line.get_xydata()) == 1])
        for name, box in boxes.items():
            assert not any(box.x0 < x < box.x1 and box.y0 < y < box.y1 for x, y in centres), name


def test_no_name_covers_a_mark_or_a_ring():
    """Nor comes so near that its halo would: of points that are crowded, stars among them, which are wide."""
    given = {"auto-2.1bit": (2.1, 0.0005), "aqua-metric-2bit": (2.14, 0.00045), "aqua-2bit": (2.46, 0.0048),
             "aqua-3bit": (2.46, 0.0061), "h2o": (2.5, 0.005), "aqua-metric-1bit": (2.1, 0.00062)}  # fmt: skip
    found = [
        dataclasses.replace(one, here=one.recipe == "aqua-3bit")
        for one in panels.points(some(given), panels.KL, "full")
    ]
    figure = plots.scatter(found)
    (axis,) = figure.axes
    lines = [line for line in axis.lines if len(line.get_xydata()) == 1 and line.get_marker() not in ("None", "_")]
    marks = [line.get_window_extent() for line in lines]  # but caps of whiskers
    assert len(marks) == len(given) + 2 and max(mark.width for mark in marks) > figure.dpi * 14 / 72
    room = figure.dpi * 2 / 72
    for name, text in written(axis).items():
        assert not any(text.get_window_extent().overlaps(mark.padded(room)) for mark in marks), name
    assert {"aqua-3bit (this version)", "auto-2.1bit (recommended)", "aqua-2bit"} <= set(written(axis))


def test_a_name_without_a_free_place_is_left_out():
    figure = Figure(figsize=(2, 2))
    axis = figure.subplots()
    axis.set(xlim=(0, 1), ylim=(0, 1))
    given = [panels.Label(0.5, 0.5, f"a name that is far too long for such axes {number}") for number in range(9)]
    assert panels.place(axis, given, [(0.5, 0.5, 3.5)]) == []
    assert len(panels.place(axis, [panels.Label(0.5, 0.5, "short")] * 3, [(0.5, 0.5, 3.5)])) == 3


def test_one_bad_recipe_does_not_flatten_the_rest():
    figure = drawn([*some(), record("higgs-1bit", 1.0, 9.0, 8.0)])
    for axis in figure.axes:
        high = axis.get_window_extent().height
        places = {name: axis.transData.transform(text.xy)[1] for name, text in written(axis).items()}
        assert abs(places["kivi-2bit"] - places["aqua-2bit"]) > 0.2 * high
    marks = [text.get_text() for text in figure.axes[1].texts]
    assert "linear from -0.1% to 0.1%" in marks and "16 bit" in marks


@pytest.mark.parametrize("low, high", [(1e-6, 1e-4), (0.03, 0.05), (1e-5, 3000.0), (0.9, 1.2)])
def test_ticks_are_plain_numbers(low, high):
    figure = Figure()
    left, right = figure.subplots(1, 2)
    draw.log_scale(left, low, high)
    draw.symlog_scale(right, -low, 10 * high, 0.001)
    draw.canvas(figure).draw()
    for axis in (left, right):
        said = [label.get_text() for label in axis.get_yticklabels()]
        assert len(said) >= 3 and len(set(said)) == len(said)
        assert not any("e" in text or text.rstrip("%").endswith(".0") or "−" in text for text in said), said
        for text, place in zip(said, axis.get_yticks(), strict=True):
            assert float(text.rstrip("%")) == pytest.approx(place, rel=1e-9, abs=1e-12)


@pytest.mark.slow
def test_captions_say_what_was_measured():
    other = [as_json(name, *where) for name, where in GOOD.items()]
    for one in other:
        one["protocol"]["texts"] = {"web": {"windows": 3, "length": 256, "text": {"source": "web.txt"}}}
        one["result"]["texts"] = {"web": {"protocols": one["result"]["protocols"]}}
    other = [read(one) for one in other]
    figures = (
        drawn(some()),
        drawn(other),
        plots.error_by_layer.__wrapped__(some()),
        plots.frontier.__wrapped__([some(), other], True, 9, 5),
    )
    for number, figure in enumerate(figures):
        said = " ".join(figure._supxlabel.get_text().split())
        assert "tiny (4.07M parameters), 6 held-out windows of 512 tokens of stories" in said
        assert "every token but the sinks is encoded before it is read" in said
        assert ("web: 3 held-out windows of 256 tokens of web.txt" in said) == (number in (1, 3))
        box = figure._supxlabel.get_window_extent()
        assert box.x1 <= figure.bbox.x1 and box.y0 >= 0
        assert all(axis.get_legend() is None for axis in figure.axes), "no legend lies over data"
    for alone in (plots.frontier.__wrapped__([other], False, 9, 5), plots.error_by_layer.__wrapped__(other)):
        assert "web" not in alone._supxlabel.get_text(), "it is not in the picture"
    titles = [axis.get_title(loc="left") for axis in figures[-1].axes]
    model = "tiny (4.07M parameters)"
    assert titles == [model, f"{model}, in domain", f"{model}, web"]


def test_texts_stand_side_by_side_on_the_same_axes():
    records = [as_json(name, *where) for name, where in GOOD.items()]
    for number, one in enumerate(records):
        one["protocol"]["texts"] = {"web": {"windows": 6, "length": 512, "text": {"source": "web.txt"}}}
        full = one["result"]["protocols"]["full"]
        one["result"]["texts"] = {"web": {"protocols": {"full": full | {"kl": full["kl"] / 10**number}}}}
    left, right = plots.frontier.__wrapped__([[read(one) for one in records]], True, 12, 5).axes
    assert left.get_ylim() == right.get_ylim() and left.get_xlim() == right.get_xlim()
    for axis in (left, right):
        (low, high), names = axis.get_ylim(), written(axis)
        assert set(GOOD) <= set(names) and all(low < text.xy[1] < high for text in names.values())
    assert left.get_position().y0 == right.get_position().y0 and left.get_position().x1 < right.get_position().x0


def test_two_windows_give_no_standard_error():
    few, many = record("aqua-2bit", 2.4, 0.01, windows=2), record("aqua-2bit", 2.4, 0.01, windows=3)
    part = many.figures("full")
    assert (
        panels.points([few], panels.KL, "full")[0].spread
        is None
        is panels.points([few], panels.PERPLEXITY, "full")[0].spread
    )
    assert panels.points([many], panels.PERPLEXITY, "full")[0].spread == 100 * part.relative_se
    mean = sum(part.windows.kl) / 3
    expected = (sum((one - mean) ** 2 for one in part.windows.kl) / 2 / 3) ** 0.5
    assert panels.points([many], panels.KL, "full")[0].spread == pytest.approx(expected)
    assert [tables.table([one])[1]["vs 16 bit"] for one in (few, many)] == ["+1.00%", "+1.00% ± 0.10%"]
    assert tables.table([record("x", 2.4, 0.01, -0.00001, windows=2)])[1]["vs 16 bit"] == "0.00%"


def test_versions_of_an_artifact_have_their_references():
    pair = [record("aqua-2bit", 2.4, 0.01, digest="a" * 64), record("aqua-2bit", 2.3, 0.02, digest="b" * 64)]
    asked = ["demo-aqua@1.0.0", "demo-aqua@1.1.0"]
    found = tables.named([*pair, *some({"higgs-2bit": (2.1, 0.1)})], [*asked, "higgs-2bit"])
    assert {row["recipe"] for row in tables.table(found)} == {"16 bit", *asked, "higgs-2bit"}
    assert {*asked, "higgs-2bit"} <= set(written(drawn(found).axes[0]))
    legend = plots.error_by_layer.__wrapped__(found).legends[0]
    assert {text.get_text() for text in legend.get_texts()} == {*asked, "higgs-2bit"}
    unasked = set(written(drawn(pair).axes[0]))
    assert {"aqua-2bit (aaaaaaaa)", "aqua-2bit (bbbbbbbb)"} <= unasked
    path = tables.named(pair, ["/a/long/way/one/kvq.safetensors", "two/kvq.safetensors"])
    assert [one.name for one in path] == ["one/kvq.safetensors", "two/kvq.safetensors"]


def test_our_recommendation_is_marked():
    figure = plots.frontier.__wrapped__([[*some(), record("auto-2.1bit", 2.1, 0.001)]], True, 9, 5)
    assert "auto-2.1bit (recommended)" in written(figure.axes[0])
    assert "Ringed: recommended." in " ".join(figure._supxlabel.get_text().split())
    assert not any("recommended" in name for name in written(drawn(some({"kivi-2bit": (3.0, 0.1)})).axes[0]))


def test_of_many_recipes_the_frontier_and_one_of_each_family_are_named():
    chance = random.Random(1)
    given = {name: (1 + 3 * chance.random(), 10 ** -(1 + 2 * chance.random())) for name in compared()}
    figure = plots.frontier.__wrapped__([some(given)], True, 10, 6)
    (axis,) = figure.axes
    best = {one.recipe for one in panels.frontier(panels.points(some(given), panels.KL, "full"))}
    said = set(written(axis)) & set(given)
    assert best <= said and {family(name) for name in said} == {family(name) for name in given}
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {family(name) for name in given}


def test_one_recipe_alone_has_a_scale_the_16_bit_model_and_a_hint():
    figure = drawn(some({"aqua-2bit": (2.4, 0.01)}))
    left, right = figure.axes[:2]
    assert left.get_ylim()[1] > 10 * left.get_ylim()[0] and len(left.get_yticks()) >= 3
    assert {"aqua-2bit", "16 bit"} <= set(written(right)) and right.get_ylim()[0] < 0 < right.get_ylim()[1]
    hint = "No other recipe was measured beside it"
    assert hint in " ".join(figure._supxlabel.get_text().split())
    assert hint not in " ".join(drawn(some())._supxlabel.get_text().split())


def test_an_exact_cache_is_named_below_the_picture():
    figure = drawn([*some(), record("exact", 16.0, 0.0)])
    assert not any("exact" in written(axis) or axis.get_xlim()[1] > 4 for axis in figure.axes)
    assert "Not drawn, for it is exact: exact." in " ".join(figure._supxlabel.get_text().split())


def test_a_record_without_a_divergence_is_no_mark_and_is_said():
    last = as_json("rtn-2bit", 2.0, 0.2)
    for part in last["result"]["protocols"].values():
        part["kl"] = None
        part["windows"] = {**part["windows"], "kl": []}
    given = [*some(), read(last)]
    for figure in (drawn(given, panels.KL), plots.frontier.__wrapped__([given], True, 9.0, 5.4)):
        assert not any("rtn-2bit" in written(axis) for axis in figure.axes)
        assert "not measured: rtn-2bit." in " ".join(figure.get_supxlabel().split())
    assert "not measured" not in plots.frontier.__wrapped__([some()], True, 9.0, 5.4).get_supxlabel()
    near = [one.result.recipe for one in tables.by_bits([given[-1], record("higgs-2bit", 2.0, 0.1)])]
    assert near == ["higgs-2bit", "rtn-2bit"], "what was not measured comes last"


def test_the_decisive_columns_of_a_comparison_fit_a_terminal():
    given = [*some(), record("auto-2.1bit", 2.1, 0.0034, 0.0123)]
    wide, rows = tables.comparison(given), tables.narrow(given)
    assert list(rows[0]) == ["recipe", "bits", "full", "full KL", "in use", "in use KL"]
    assert rows == [{name: row[name] for name in rows[0]} for row in wide] and set(rows[0]) < set(wide[0])
    assert rows[0]["full"] == "20.000" and rows[-1]["full"] == "+1.23% ± 0.10%", "of 16 bit the perplexity itself"
    assert rows[-1]["in use KL"] == 0.0034
    one = as_json("higgs-2bit", 2.125, 0.11)
    del one["result"]["protocols"]["in-use"]
    assert list(tables.narrow([read(one)])[0]) == ["recipe", "bits", "full", "full KL"]


def test_the_table_of_a_comparison_has_at_most_100_columns(capsys):
    print_table(tables.narrow([record("mean-higgs-head-3bit-post", 3.1234, 0.01234, 0.1234)]), False)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100
