"""Python calls inside kvq: bounds that may fall, of a decode step and of a cache by name."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from models import prompt
from transformers import AutoModelForCausalLM

import kvq_runtime
from kvq_runtime.hf import KVQCache
from kvq_runtime.hf.model import CACHE

ROOT = str(Path(kvq_runtime.__file__).parent)
DEMO = Path(__file__).parents[2] / "artifacts" / "demo-model"


def calls(run: Callable[[], object]) -> int:
    """Count Python calls whose code is in kvq_runtime."""
    found = 0

    def count(frame, event, _given):
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(ROOT)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


def test_calls_of_a_cache_and_of_a_step():
    model = AutoModelForCausalLM.from_pretrained(DEMO, attn_implementation="kvq").eval()
    caches: list[KVQCache] = []
    assert calls(lambda: caches.append(KVQCache.from_recipe("kivi-4bit", model))) <= 800
    with torch.no_grad():
        for ids in (prompt(1, 300), prompt(1, 1), prompt(1, 1)):
            last = calls(lambda ids=ids: model(ids, **{CACHE: caches[0]}))
    assert last <= 300
