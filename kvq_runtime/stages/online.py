"""Fit what would be calibrated to each row's own first tokens, in the cache that holds them.

Nothing is encoded before they have arrived. What was fitted stays as it is for as long as the row does, and every later
token, of the prompt or generated, is encoded with it; it is held beside the blocks, and billed with them.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True)
class FirstTokens:
    """The tokens to fit on.

    fit_tokens   of each row, padding not counted, its sinks counted but left out; "prompt": those of the first forward
                 pass. A prompt that is too short for any block to be due is fitted with the tokens after it, up to the
                 pass in which one is; so is a batch in which a row has come no further than a block
    """

    kind: ClassVar[str] = "first_tokens"
    fit_tokens: int | Literal["prompt"] = "prompt"

    def __post_init__(self):
        given = self.fit_tokens
        if given != "prompt" and (not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= 1 << 20):
            raise ValueError(f'fit_tokens={given!r}; use "prompt", or 1 to {1 << 20}')

    def enough(self, sinks: int, block: int) -> int:
        """The tokens that every row must have."""
        return max(sinks + 1, block if self.fit_tokens == "prompt" else self.fit_tokens)


KINDS = (FirstTokens,)
