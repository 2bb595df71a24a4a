"""The settings of a job have one name each, whichever group they are in."""

from dataclasses import fields

import pytest
from tiny_artifact import tiny

from kvq_calib.job.job import Evaluation, Job, Machine, Publication, Text, What
from kvq_calib.job.run import _publish
from kvq_runtime.artifact.artifact import to_bytes
from kvq_runtime.registry.resolve import open_registry

GIVEN = {"model": "demo", "bits": [2.5], "samples": 4, "device": "cuda", "push": "hf://org"}


def test_settings_by_name_and_by_group_are_the_same_job():
    grouped = Job(
        What("demo", bits=(2.5,)),
        Text(samples=4),
        Machine("cuda"),
        Evaluation(),
        Publication(push="hf://org"),
    )
    assert Job.from_settings(**GIVEN) == grouped == Job.from_settings(**grouped.settings)
    assert hash(grouped) == hash(Job.from_settings(**GIVEN)), "it is a key"


def test_changed_settings_leave_the_others():
    job = Job.from_settings(**GIVEN)
    changed = job.with_settings(samples=5, max_kl=0.5)
    assert (changed.text, changed.evaluation) == (Text(samples=5), Evaluation(max_kl=0.5))
    assert (changed.what, changed.machine, changed.publication) == (job.what, job.machine, job.publication)


def test_a_setting_is_of_one_group():
    names = [setting.name for group in (What, Text, Machine, Evaluation, Publication) for setting in fields(group)]
    assert len(set(names)) == len(names) == len(Job(What("demo")).settings)


def test_a_setting_that_is_none_is_refused():
    with pytest.raises(TypeError, match="a Job has no setting sampels, seqlen$"):
        Job.from_settings(model="demo", sampels=4, seqlen=128)


def test_bytes_of_a_withdrawn_version_that_are_published_again_stay_withdrawn(tmp_path):
    target, data = open_registry(tmp_path.as_uri()), to_bytes(tiny())
    given = target, "a", data, None, {"README.md": b"---\ntags: [kvq]\n---\n# a\n"}, None
    assert (first := _publish(*given)).new and first.yanked is None
    target.yank("a", "1.0.0", "wrong text")
    again = _publish(*given)
    assert (again.new, again.reference, again.yanked) == (False, "a@1.0.0", "wrong text")
