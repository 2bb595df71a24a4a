"""Show a run's progress: the layer and stage at work, then the evaluation; tokens per second, time left."""

import sys

from tqdm import tqdm

from kvq_calib.plan import Plan
from kvq_calib.run import Progress


class Bar:
    """A progress listener that draws one bar per layer, and one for the evaluation, on standard error; silent where
    that is no terminal.

    A layer's work is its forward pass and, for each recipe, decoding its keys and its values: each counts its tokens.
    """

    def __init__(self, plan: Plan, quiet: bool = False):
        self._plan, self._off = plan, quiet or not sys.stderr.isatty()
        self._bar: tqdm | None = None
        self._layer: int | None = None

    def __call__(self, progress: Progress) -> None:
        whole = progress.layer < 0
        if progress.layer != self._layer:
            self.close()
            self._layer = progress.layer
            passes = 1 + 2 * len(self._plan.recipes)
            self._bar = tqdm(
                total=progress.total if whole else passes * self._plan.tokens,
                unit="tok",
                unit_scale=True,
                disable=self._off,
                desc=progress.stage if whole else f"layer {progress.layer + 1}/{progress.layers}",
            )
        assert self._bar is not None
        if whole:
            self._bar.update(progress.tokens)
            return
        self._bar.set_postfix_str(progress.stage, refresh=False)
        self._bar.update(len(self._plan.chunks[progress.done - 1]) * self._plan.seq_len)

    def close(self) -> None:
        """Finish the bar that is drawn."""
        if self._bar is not None:
            self._bar.close()
