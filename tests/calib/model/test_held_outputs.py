"""Models whose decoder makes what it calls a layer with of several outputs below: a pass goes through layers again
(Dory, Inkling 2 Loop), or layers read blocks of those below (Inkling 2), or the embeddings (Zamba).
"""

import copy
from functools import partial

import pytest
import torch
from architectures import random, stored
from models import prompt
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvq_calib.evaluate import perplexity
from kvq_calib.evaluate.caches import FullCache
from kvq_calib.model import find as models
from kvq_calib.model.carried import Carried
from kvq_calib.model.decoder import Decoder
from kvq_calib.model.files import ModelFiles
from kvq_calib.model.streamed import Stream
from kvq_runtime.geometry import filled
from kvq_runtime.hf.model import CACHE, settings_of
from kvq_runtime.ops import rope
from kvq_runtime.recipe import preset

HELD = {  # the outputs that each layer, and what is above, is made of with all that follows, the newest first
    "dory": [[-1], [0], [1, 0], [2, 0], [3], [4], [5]],
    "inkling2_text": [[-1], [0, -1], [1, -1], [2, 1, -1]],
    "inkling2_loop_text": [[-1], [0, -1], [1, 0, -1], [2, 1, 0, -1], [3, 2, 1, 0, -1], [4, 3, 0, -1],
                           [5, 4, 3, 0, -1], [6, 5, 0, -1], [7, 6, 5, 0, -1]],
    "zamba": [[-1], [0, -1], [1, -1], [2]],
}  # fmt: skip


@pytest.fixture(scope="module", params=HELD)
def model(request) -> PreTrainedModel:
    """With norms and queries of blocks that are random too: those of ones and zeros hide what is left out."""
    made = random(request.param)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return made


@pytest.fixture(scope="module")
def files(model, tmp_path_factory) -> ModelFiles:
    folder = tmp_path_factory.mktemp(model.config.model_type)
    model.save_pretrained(folder)
    return models.resolve(folder)


def test_outputs_that_are_carried(model, files):
    decoder = Decoder(copy.deepcopy(model.config), torch.float32)
    assert decoder.carried.held == HELD[model.config.model_type]
    assert files.carried == 64 * max(map(len, decoder.carried.held)) > Carried.of(settings_of(model.config)).width


class Noted(DynamicCache):
    """Transformers' own cache, of which what attention reads can be differentiated by."""

    def update(self, key_states, value_states, layer_idx, *args, **given):
        read = super().update(key_states, value_states, layer_idx, *args, **given)
        self.read = {**getattr(self, "read", {}), layer_idx: read}
        return read


def test_gradients_go_through_what_stands_between_layers(model, files):
    """Of all keys and values, down from the logits, as of the whole model by autograd."""
    ids, cache, stream = prompt(1, 24, seed=2), Noted(config=model.config), Stream(files, dtype=torch.float32)
    logits = model(input_ids=ids, **{CACHE: cache}).logits
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    places = [filled(files.config)[n] for n in files.attending]
    expected = torch.autograd.grad((logits * weight).sum(), [x for place in places for x in cache.read[place]])
    hidden = [stream.embed(ids)]
    for index in range(stream.layers):
        hidden.append(stream.layer(index).forward(hidden[-1]).h_BTE)
    top = hidden[-1].requires_grad_()
    (above,) = torch.autograd.grad((stream.head()._logits(top) * weight).sum(), top)
    tables = stream.rope(24)
    for index in reversed(range(stream.layers)):
        above, *pair = stream.layer(index).gradients(hidden[index], above)
        key, value = (x.unflatten(-1, (files.geometry.kv_heads, -1)) for x in pair)
        for found, one in zip((rope.rotate(key, *tables), value), expected[2 * index :], strict=False):
            one = one.transpose(1, 2)
            torch.testing.assert_close(found, one, rtol=0, atol=1e-3 * float(one.std()))


def test_an_evaluation_by_layer_is_that_of_the_whole_model(model, files):
    """Exact it loses nothing; and what is lost in a layer is in all that is made of it."""
    ids, stream = prompt(2, 256, seed=3), Stream(files, dtype=torch.float32)
    whole, blank = (
        {name: partial(FullCache, preset(name), one, {}, length=256) for name in ("exact", "rtn-2bit")}
        for one in (model, stream.blank)
    )
    found = perplexity.scores(model, ids, whole, step=256), perplexity.layered(stream, ids, blank)
    assert found[0]["exact"].kl < 1e-6 < found[0]["rtn-2bit"].kl
    for name in whole:
        assert found[1][name].kl == pytest.approx(found[0][name].kl, rel=1e-3, abs=1e-7)
        assert found[1][name].losses == pytest.approx(found[0][name].losses, rel=1e-4)


def test_what_is_noted_of_each_time_that_a_layer_is_run(model, files):
    """A chunk's hidden states do not depend on the others of its batch, and all that is cached is the whole model's."""
    ids, cache, stream = prompt(3, 40), DynamicCache(config=model.config), Stream(files, dtype=torch.float32)
    with torch.no_grad():
        model(input_ids=ids, **{CACHE: cache})
    one, all_ = stream.embed(ids[1:2]), stream.embed(ids)
    for index, n in enumerate(files.attending):
        layer = stream.layer(index)
        alone, seen = layer.forward(one), layer.forward(all_)
        one, all_ = alone.h_BTE, seen.h_BTE
        torch.testing.assert_close(one, all_[1:2], rtol=0, atol=1e-3 * float(one.std()))
        values = stored(model, cache, filled(files.config)[n])[1].transpose(1, 2).flatten(2)
        torch.testing.assert_close(seen.v_NTC, values, rtol=0, atol=1e-3 * float(values.std()))
