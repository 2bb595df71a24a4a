"""Copies of caches and of models: what is pickled, saved or copied goes on as the original would."""

import copy
import io
import pickle

import pytest
import torch
from generating import kvq
from models import prompt, random_model
from tiers import some

WAYS = some(
    [("exact-pre", "sdpa"), ("rtn-2bit", "kvq"), ("aqua-2bit", "sdpa"), ("aqua-2bit", "kvq"),
     ("h2o-higgs-2bit", "kvq"), ("subkv-2bit-by-layer", "kvq"), ("svdq-online-2bit", "kvq")],
    ("rtn-2bit", "kvq"), ("aqua-2bit", "sdpa"), ("svdq-online-2bit", "kvq"),
)  # fmt: skip


def saved(thing):
    """Through torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"pickle": lambda thing: pickle.loads(pickle.dumps(thing)), "torch.save": saved, "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("way", WAYS)
def test_copies_of_a_cache_go_on_as_it_does(way):
    """Right after a prompt, in which encoding has left views of its window behind, and again, through a step each."""
    (name, attention), ids = way, prompt(2, 200)
    model = random_model("llama", attention)
    with torch.no_grad():
        cache = kvq(name, model)
        model(ids[:, :150], past_key_values=cache)
        copies = [one(cache) for one in COPIES.values()]
        for a, b in ((150, 151), (151, 180), (180, 200)):
            expected = model(ids[:, a:b], past_key_values=cache).logits
            for made, other in zip(COPIES, copies, strict=True):
                assert torch.equal(model(ids[:, a:b], past_key_values=other).logits, expected), made
    assert cache.blocks.layers[1].blocks > 0
    wanted = cache.memory_report()
    for other in copies:
        report = other.memory_report()
        assert report.parts == wanted.parts and report.shared_bytes == wanted.shared_bytes


def test_a_pass_that_stopped_midway_is_not_copied():
    model, ids = random_model("llama"), prompt(2, 60)

    def fail(*_):
        raise KeyboardInterrupt

    with torch.no_grad():
        cache = kvq("exact", model)
        model(ids[:, :40], past_key_values=cache)
        hook = model.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 40:], past_key_values=cache)
        hook.remove()
        other = pickle.loads(pickle.dumps(cache))
        assert other.get_seq_length() == 40
        assert torch.equal(
            model(ids[:, 40:], past_key_values=other).logits, model(ids[:, 40:], past_key_values=cache).logits
        )


@pytest.mark.parametrize("made", COPIES)
def test_a_model_is_copied_with_its_hooks(made):
    model, ids = random_model("llama"), prompt(2, 60)
    kvq("aqua-2bit", model)
    other = COPIES[made](model)
    hooks = [len(module._forward_pre_hooks) for module in other.modules()]
    caches = kvq("aqua-2bit", model), kvq("aqua-2bit", other)
    assert hooks == [len(module._forward_pre_hooks) for module in other.modules()] and sum(hooks) == 1
    with torch.no_grad():
        for a, b in ((0, 40), (40, 60)):
            one, two = (m(ids[:, a:b], past_key_values=c).logits for m, c in zip((model, other), caches, strict=True))
            assert torch.equal(one, two)
