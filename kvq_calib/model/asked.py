"""Have a function of ours answer attention that a model computes by code of its own, where that asks PyTorch's.

transformers takes no function in the place of such code (Falcon). What it calls, scaled_dot_product_attention, is seen.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from kvq_runtime.hf.model import LISTED, own_code

Answer = Callable[..., tuple[Tensor, Any]]  # as transformers' AttentionInterface has them
ASKING = "sdpa"  # the attention under which models ask PyTorch's


def asks(model: Any) -> bool:
    """True if a model attends by code of its own that asks PyTorch's attention."""
    return own_code(model) is not None and model.config._attn_implementation == ASKING


@contextmanager
def answered(modules: Iterable[nn.Module], answer: Answer) -> Iterator[None]:
    """Have a function answer, for a while, what attention modules ask of PyTorch's."""
    asking = list(modules)
    before = [vars(module).get("forward") for module in asking]
    for module in asking:
        answer_by(module, answer)
    try:
        yield
    finally:
        for module, forward in zip(asking, before, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward


def answer_by(module: Any, answer: Answer) -> None:
    """The same for good."""
    # a module that held itself would keep its weights until the next garbage collection
    held, own, method = weakref.ref(module), vars(module).get("forward"), type(module).forward

    def seen(*args: Any, **given: Any) -> Any:
        asking: Any = held()
        with _Asked(asking, answer):
            return method(asking, *args, **given) if own is None else own(*args, **given)

    module.forward = seen


class _Asked(TorchFunctionMode):
    """Answer calls of scaled_dot_product_attention; all others are PyTorch's."""

    def __init__(self, module: nn.Module, answer: Answer):
        super().__init__()
        self._module, self._answer = module, answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._asked(*args, **(kwargs or {}))

    def _asked(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if enable_gqa:
            raise ValueError(
                f"{type(self._module).__name__} has PyTorch's attention share heads of keys (enable_gqa), which is not "
                f"known here; use a recipe that needs no fit; {LISTED}"
            )
        found = self._answer(
            self._module, query, key, value, attn_mask, scaling=scale, is_causal=is_causal, dropout=dropout_p
        )[0]
        return found.transpose(1, 2)
