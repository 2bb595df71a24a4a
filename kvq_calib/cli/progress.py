"""Show a run's progress: the layer and stage at work, then the evaluation; tokens per second, time left."""

import sys

from tqdm import tqdm

from kvq_calib.run import budget, sensitivity, share
from kvq_calib.run.plan import Plan
from kvq_calib.run.run import Progress


class Bar:
    """A progress listener that draws one bar per layer, and one for the evaluation, on standard error; silent where
    that is no terminal.

    A layer's work is its forward pass and, for each recipe, decoding its keys and its values, and measuring every
    setting of a budget: each counts its tokens.
    """

    def __init__(self, plan: Plan, quiet: bool = False):
        self._plan, self._off = plan, quiet or not sys.stderr.isatty()
        self._bar: tqdm | None = None
        self._at = (0, -2)

    def __call__(self, progress: Progress) -> None:
        whole = progress.layer < 0
        if (progress.round, progress.layer) != self._at:
            self.close()
            self._at = (progress.round, progress.layer)
            again = f"round {progress.round}, " if progress.round else ""
            self._bar = tqdm(
                total=progress.total if whole else self._work(progress.round),
                unit="tok",
                unit_scale=True,
                disable=self._off,
                desc=progress.stage if whole else f"{again}layer {progress.layer + 1}/{progress.layers}",
            )
        assert self._bar is not None
        if whole:
            self._bar.update(progress.tokens)
            return
        self._bar.set_postfix_str(progress.stage, refresh=False)
        self._bar.update(progress.tokens or len(self._plan.chunks[progress.done - 1]) * self._plan.seq_len)

    def _work(self, round: int) -> int:
        """Tokens of a layer, each as often as it is worked on; in later rounds of the budgets, at most."""
        plan = self._plan
        again = len(plan.budgets) + (sum(map(share.wanted, plan.recipes)) if round == 1 else 0)
        recipes = again if round else len(plan.recipes)
        measured = sum(len(plan.chunks[index]) for index in sensitivity.chunks(plan)) * plan.seq_len
        settings = 2 * (1 + len(budget.options(plan.geometry, "key"))) * len(plan.budgets)
        return (1 + 2 * recipes) * plan.tokens + settings * measured

    def close(self) -> None:
        """Finish the bar that is drawn."""
        if self._bar is not None:
            self._bar.close()
