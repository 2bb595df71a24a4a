"""A job is its settings; bytes that are published again are no new version."""

import re

import pytest
from pydantic import TypeAdapter
from tiny_artifact import tiny

from kvq_calib.evaluate.quality_checks import DriftCheck
from kvq_calib.job.job import Job
from kvq_calib.job.run import _publish
from kvq_runtime.artifact.artifact import to_bytes
from kvq_runtime.registry.resolve import open_registry


def test_settings_are_what_json_holds_and_a_key():
    given = {"model": "demo", "bits": [2.5], "samples": 4}
    assert Job(**given) == Job("demo", bits=(2.5,), samples=4) and hash(Job(**given))
    with pytest.raises(TypeError, match="sampels"):
        Job(**given | {"sampels": 4})


WRONG = [
    ({"model": "nosuch"}, "model 'nosuch': no such folder"),
    ({"recipes": ["aqua-2bit"]}, "model\n  Field required"),
    ({"model": "demo", "sampels": 4}, "sampels\n  Unexpected keyword argument"),
    ({"model": "demo", "samples": "many"}, "samples\n  Input should be a valid integer"),
    ({"model": "demo", "recipes": "aqua-2bit"}, "recipes\n  'str' instances are not allowed"),
    ({"model": "demo", "recipes": ["aqua-9bit"]}, "no recipe 'aqua-9bit'"),
    ({"model": "demo", "corpus": "nosuch.txt"}, "corpus nosuch.txt: no such file; use demo, demo-code, a file or"),
    ({"model": "demo", "max_kl": -1}, "--max-kl -1.0; use a number above 0"),
    ({"model": "demo", "registry": "s3://x"}, "registry s3://x; use"),
    ({"model": "demo", "device": "gpu"}, "device 'gpu'; use"),
]


def test_a_wrong_setting_is_found_without_the_model():
    for wrong, message in WRONG:
        with pytest.raises(ValueError, match=re.escape(message)):
            TypeAdapter(Job).validate_python(wrong).check()
    given = {"model": "demo", "recipes": ["auto", "aqua-2bit"], "bits": [2], "corpus": "demo + demo-code", "max_kl": 1}
    job = TypeAdapter(Job).validate_python(given)
    job.check()
    assert job == Job(**given)
    for wrong in ({"model": "demo"}, {"model": "demo", "artifacts": ["a"], "max_perplexity_ratio": None}):
        with pytest.raises(ValueError, match="artifacts\n  Field required|a drift check needs a bound"):
            TypeAdapter(DriftCheck).validate_python(wrong).check()


def test_bytes_of_a_withdrawn_version_that_are_published_again_stay_withdrawn(tmp_path):
    target, data = open_registry(tmp_path.as_uri()), to_bytes(tiny())
    given = target, "a", data, None, {"README.md": b"---\ntags: [kvq]\n---\n# a\n"}, None
    assert (first := _publish(*given)).new and first.yanked is None
    target.yank("a", "1.0.0", "wrong text")
    again = _publish(*given)
    assert (again.new, again.reference, again.yanked) == (False, "a@1.0.0", "wrong text")
