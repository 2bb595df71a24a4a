"""A job is its settings; bytes that are published again are no new version."""

import pytest
from tiny_artifact import tiny

from kvq_calib.job.job import Job
from kvq_calib.job.run import _publish
from kvq_runtime.artifact.artifact import to_bytes
from kvq_runtime.registry.resolve import open_registry


def test_settings_are_what_json_holds_and_a_key():
    given = {"model": "demo", "bits": [2.5], "samples": 4}
    assert Job(**given) == Job("demo", bits=(2.5,), samples=4) and hash(Job(**given))
    with pytest.raises(TypeError, match="sampels"):
        Job(**given | {"sampels": 4})


def test_bytes_of_a_withdrawn_version_that_are_published_again_stay_withdrawn(tmp_path):
    target, data = open_registry(tmp_path.as_uri()), to_bytes(tiny())
    given = target, "a", data, None, {"README.md": b"---\ntags: [kvq]\n---\n# a\n"}, None
    assert (first := _publish(*given)).new and first.yanked is None
    target.yank("a", "1.0.0", "wrong text")
    again = _publish(*given)
    assert (again.new, again.reference, again.yanked) == (False, "a@1.0.0", "wrong text")
