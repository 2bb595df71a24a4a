"""SnapKV: let the last queries of a prompt vote which of its tokens are held; all later tokens are.

    votes_t = Σ over layers, query heads and the `newest` queries of softmax(q kᵀ · scale)_t     of each earlier token t
    score_t = the largest, or the mean, of the votes of `kernel` tokens around t

The earlier tokens with the largest scores are held, and those that vote, `tokens` together; sinks are among them.
The prompt is the first forward pass. A shorter one is held whole.

`snapkv` holds 1024 tokens of a prompt in 16 bit, the paper's smallest budget. Any recipe stores the tokens so:
`aqua-2bit+policies.votes=on+policies.votes.tokens=256`.

Tokens are evicted before encoding, and fits do not depend on it. Bits are of generated tokens, which are all held.

Source: Li et al., 2024 (SnapKV, arXiv 2404.14469), section 4; 16 to 64 queries vote there, 32 here. The paper's listing
leaves the pooling open; the authors' code averages 5 tokens by default, or takes the largest.
Differs: one set for all layers and heads, so that votes are summed over them before they are pooled; theirs are by
layer and head. Exact sinks are always held; theirs have to be voted for. A prompt that comes in several forward passes
is chosen from in the first alone.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor
from torch.nn import functional

from kvq_runtime.geometry import Window
from kvq_runtime.policies.evict import Evicting
from kvq_runtime.recipe import Family, Recipe
from kvq_runtime.recipes import exact

POOLS = {"max": functional.max_pool1d, "avg": functional.avg_pool1d}


@dataclass(frozen=True)
class PromptVotes(Evicting):
    """Hold the tokens of a prompt that its last queries attend to, SnapKV's.

    tokens   of a prompt that are held
    newest   of these, whose queries vote
    kernel   odd number of tokens that are pooled;   pool   how: "max" or "avg"
    """

    kind: ClassVar[str] = "votes"
    once: ClassVar[bool] = True
    tokens: int = 1024
    newest: int = 32
    kernel: int = 7
    pool: Literal["max", "avg"] = "max"

    def __post_init__(self):
        if not 1 <= self.newest < self.tokens or self.kernel < 1 or self.kernel % 2 == 0 or self.pool not in POOLS:
            raise ValueError(f'{self}; use newest=1 or more, more tokens, an odd kernel, and the pool "max" or "avg"')

    def budget(self, tokens: int, window: Window) -> tuple[int, int]:
        """Count the tokens before the newest, and those of them that the newest leave room for: sinks at least."""
        old = max(0, tokens - self.newest)
        return old, min(old, max(self.tokens - self.newest, window.sinks))

    def score(self, mass_BT: Tensor, queries_BT: Tensor) -> Tensor:
        return POOLS[self.pool](mass_BT[:, None], self.kernel, 1, self.kernel // 2)[:, 0]

    def held_share(self) -> float:
        return 1.0  # of the tokens after the prompt


def snapkv(name: str) -> Recipe:
    """1024 tokens of a prompt, in 16 bit."""
    summary = "16 bit, over the 1024 tokens of a prompt that SnapKV holds"
    return replace(exact.exact(name, "post"), policies=(PromptVotes(),), summary=summary)


FAMILY = Family(
    presets={"snapkv": snapkv},
    compared=("snapkv",),
)
