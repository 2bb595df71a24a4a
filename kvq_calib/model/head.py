"""Run what is above the last layer, the last norm and the output head, as the model itself runs it.

E = hidden width · V = vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from kvq_calib.model.carried import Carried
from kvq_runtime.hf.model import decoder_of, layers_of


class Head:
    """The last norm and the output head on the device, as the model itself runs them."""

    def __init__(self, around: Any, carried: Carried):
        self._around, self._carried = around, carried

    @property
    def device(self) -> torch.device:
        return self._around.get_output_embeddings().weight.device

    @torch.no_grad()
    def __call__(self, h_BTE: Tensor) -> Tensor:
        """Logits, [B, T, V], in the dtype of the stream."""
        return self._logits(h_BTE)

    def gradient(self, h_TE: Tensor, uniform_T2: Tensor) -> Tensor:
        """∂/∂h Σ (log p(y) - log p(y')) / √2, y and y' the tokens at which the running sum of p passes `uniform`.

        With respect to the logits that is 1 at y and -1 at y', over √2: p cancels. No graph goes through the logits but
        what the model does to each of them (a multiplier, a soft cap).
        """
        seen: list[Tensor] = []

        def cut(_module: Any, inputs: tuple, out: Tensor) -> Tensor:
            seen.extend((inputs[0], out.detach().requires_grad_()))
            return seen[1]

        h_TE, output = h_TE.detach().requires_grad_(), self._around.get_output_embeddings()
        handle = output.register_forward_hook(cut)
        try:
            with torch.enable_grad():
                logits_TV = self._logits(h_TE[None])[0]
                normed_TE, projected_TV = seen
                slope_TV = None
                if logits_TV.data_ptr() != projected_TV.data_ptr():
                    (slope_TV,) = torch.autograd.grad(logits_TV.sum(), projected_TV)
        finally:
            handle.remove()
        running_TV = logits_TV.detach().float().softmax(-1).cumsum_(-1)
        rows_VE = output.get_parameter("weight")
        drawn_T2 = torch.searchsorted(running_TV, uniform_T2 * running_TV[:, -1:]).clamp(max=len(rows_VE) - 1)
        drawn_T2E = rows_VE[drawn_T2]
        if slope_TV is not None:
            drawn_T2E = drawn_T2E * slope_TV.view_as(logits_TV).gather(1, drawn_T2)[..., None]
        first_TE, second_TE = drawn_T2E.unbind(1)
        return torch.autograd.grad(normed_TE, h_TE, ((first_TE - second_TE) / 2**0.5).view_as(normed_TE))[0]

    def _logits(self, h_BTE: Tensor) -> Tensor:
        last = layers_of(decoder_of(self._around))[-1]
        last.out, _ = self._carried.unpack(h_BTE)
        try:
            nothing = h_BTE.new_zeros(()).expand(*h_BTE.shape[:-1], self._carried.hidden)
            return self._around(inputs_embeds=nothing, use_cache=False).logits
        finally:
            last.out = last.under = None
