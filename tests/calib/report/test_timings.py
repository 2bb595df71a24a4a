"""The picture of a benchmark: a row of panels a batch, a line a cache, what has no figures left out."""

from kvq_calib.report import timings


def row(cache: str, recipe: str, context: int, batch: int, measured: bool = True) -> dict:
    figures = {"tokens_per_s": 1e4 / context, "cache_bytes": context << 20, "first_token_s": context / 1e3}
    return {"cache": cache, "recipe": recipe, "context": context, "batch": batch, "measured": measured} | (
        figures if measured else {}
    )


def some() -> list[dict]:
    caches = (("16 bit", ""), ("hqq-2bit", ""), ("rtn-4bit", "rtn-4bit"), ("mine@1.0.0", "rtn-2bit"))
    found = [row(*cache, context, batch) for context in (64, 256) for batch in (1, 4) for cache in caches]
    return [*found, row("quanto-2bit", "", 64, 1, measured=False)]


def test_a_line_a_cache_and_no_two_alike():
    figure = timings.picture.__wrapped__(some(), ["what was measured"])
    assert [axis.get_title("left").rpartition(", ")[2] for axis in figure.axes] == ["batch 1"] * 3 + ["batch 4"] * 3
    lines = {line.get_label(): line for line in figure.axes[1].lines}
    assert list(lines) == ["16 bit", "hqq-2bit", "rtn-4bit", "mine@1.0.0"]
    assert [tuple(point) for point in lines["rtn-4bit"].get_xydata()] == [(64, 64), (256, 256)]
    seen = {
        (line.get_color(), line.get_marker(), str(line.get_linestyle()), line.get_fillstyle())
        for line in lines.values()
    }
    assert len(seen) == 4
    assert {text.get_text() for text in figure.legends[0].get_texts()} == set(lines)


def test_nothing_measured_is_said():
    figure = timings.picture.__wrapped__([row("16 bit", "", 64, 1, measured=False)], [])
    assert [text.get_text() for text in figure.axes[0].texts] == ["nothing was measured"]
