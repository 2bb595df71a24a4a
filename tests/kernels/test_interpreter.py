"""Triton's interpreter computes the same when it is spared what it repeats, and leaves nothing behind."""

import pytest
import torch
from attention_case import FAMILIES, Case, run

pytest.importorskip("triton")
from triton import language
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU")


@pytest.mark.parametrize("name", ["kivi-2", "higgs-2-16"])
def test_spared_and_not_it_computes_the_same(name, monkeypatch):
    asked, spared = [], interpreter._patch_lang
    members = interpreter._patch_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *given: asked.append(given) or members(*given))
    with monkeypatch.context() as patch:
        patch.setattr(interpreter, "_get_np_dtype", interpreter._get_np_dtype.__wrapped__)
        patch.setattr(TritonSemantic, "broadcast_impl_value", TritonSemantic.broadcast_impl_value.__wrapped__)
        patch.setattr(interpreter, "_patch_lang", spared.__wrapped__)
        wanted, many = run(Case(*FAMILIES[name])), len(asked)
    left = dict(vars(language)), dict(vars(language.tensor))
    assert all(map(torch.equal, run(Case(*FAMILIES[name])), wanted))
    assert 0 < len(asked) - many < many / 10
    assert (vars(language), vars(language.tensor)) == left
