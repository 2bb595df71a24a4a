"""Read from the mask of a forward pass which tokens are padding, where they stand, and whether one sees a later one.

A model of text hands its decoder [B, all tokens]; a model of images hands it a mask by the type of layer, [B, 1, T, all
tokens], bool or what is added to scores, or [B, all tokens] under flash attention.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.hf.model import FULL


def real_tokens(mask: Any, count: int) -> Tensor | None:
    """Which of the newest tokens are no padding, bool [B, count]; None: all, or it is not told.

    mask   as the model gets it, [B, all tokens]; or as its decoder does from a model of images, by the type of layer
    """
    if isinstance(mask, Mapping):
        mask = mask.get(FULL)
        if mask is not None and not isinstance(mask, Tensor):
            raise RuntimeError("this attention hands a cache no mask of a model of images; use sdpa or eager attention")
        if mask is not None and mask.ndim == 4:
            mask = _visible(mask)[:, 0, -1]  # to the newest query, which sees all that is real
    if mask is None or mask.ndim != 2:
        return None
    return mask[:, -count:].bool()


def _visible(mask: Tensor) -> Tensor:
    """A mask as bool, of one that is added to scores too."""
    return mask if mask.dtype == torch.bool else mask >= 0


def looks_ahead(mask: Mapping[str, Any], count: int) -> bool:
    """True if one of the newest tokens sees a later one, as those of an image may."""
    whole = mask.get(FULL)
    if count < 2 or not isinstance(whole, Tensor) or whole.ndim != 4:
        return False
    return bool(_visible(whole)[..., -count:].triu(1).any())


def numbered(mask: Any, length: int, cos: Tensor) -> Tensor:
    """Positions of a pass of text, [B, T], in a row behind `length` tokens, or behind the row's padding."""
    rows, count = cos.shape[-3:-1]
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] == length + count:
        return (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -count:]
    return torch.arange(length, length + count, device=cos.device).expand(rows, count)
