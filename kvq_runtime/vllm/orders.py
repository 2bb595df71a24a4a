"""Decide, where requests are scheduled, what of them is loaded from kept prefixes and what is kept: no tensor here.

A request is loaded from the longest prefix that every worker can load, as far as files were read and checked just now.
Of what was scheduled, whole blocks whose tokens are known are kept: a draft that may be refused is not.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvq_runtime.prefix.store import PrefixBlocks


@dataclass(frozen=True)
class Order:
    """Load, or keep, tokens `start` to `stop` of a request's text.

    tokens   the text's first `stop` token ids
    salt     of the request's tenant, or empty
    pages    of the engine, that hold tokens `start` to `stop`
    """

    request: str
    salt: str
    tokens: tuple[int, ...]
    start: int
    stop: int
    pages: tuple[int, ...]


@dataclass
class Orders:
    """The orders of a step: loads, which may take several steps, and what to keep once it has been computed."""

    loads: list[Order] = field(default_factory=list)
    keeps: list[Order] = field(default_factory=list)


@dataclass
class _Known:
    """A request that has pages: the end of what was ordered to be kept, and how often it was loaded."""

    request: Any
    kept: int = 0
    loads: int = 0


class Planner:
    """Plans for the requests of an engine.

    stores   one for each part of the model that workers hold
    page     tokens of one of the engine's pages; divides a block
    recent   newest tokens that are computed, to be exact
    """

    def __init__(self, stores: Sequence[PrefixBlocks], page: int, recent: int):
        self.stores, self.page, self.recent = stores, page, recent
        self.block = stores[0].block
        self.counts: defaultdict[str, float] = defaultdict(float)
        self._known: dict[str, _Known] = {}
        self._found: dict[str, tuple[int, int]] = {}  # by request that waits for pages: tokens start to stop are kept
        self._loads: dict[str, tuple[int, int]] = {}  # begun since the last step: start, stop

    def matched(self, request: Any, computed: int) -> int:
        """Return how many tokens, in whole pages, can be loaded beyond `computed`.

        vLLM asks again while there is no room.
        """
        name, known = request.request_id, self._known.get(request.request_id)
        if not wanted(request) or getattr(request, "skip_reading_prefix_cache", False):
            return 0
        if known is not None and known.loads > request.num_preemptions:
            return 0  # it was loaded, and something failed: it is computed
        if name not in self._found or self._found[name][0] > computed:
            tokens = list(request.all_token_ids)
            limit, start = len(tokens) - max(1, self.recent), computed // self.block * self.block
            self.counts["lookups"] += 1
            stores = [store.under(request.cache_salt or "") for store in self.stores]
            self._found[name] = start, min(store.checked(tokens, limit, start) for store in stores)
        return max(0, self._found[name][1] - computed)

    def allocated(self, request: Any, external: int) -> None:
        """The request has pages, and `external` tokens are to be loaded."""
        known = self._known.setdefault(request.request_id, _Known(request))
        _, stop = self._found.pop(request.request_id, (0, 0))
        if external:
            self.counts["hits"] += 1
            known.loads += 1
            self._loads[request.request_id] = stop - external, stop

    def orders(self, computed: Mapping[str, int], pages_of: Callable[[str], Sequence[int]]) -> Orders:
        """Return the orders that this step begins.

        computed   by request that is scheduled, tokens of it that are computed when the step has ended
        """
        made = Orders()
        for name, (start, stop) in self._loads.items():
            made.loads.append(self._order(name, start, stop, pages_of))
        self._loads.clear()
        for name, count in computed.items():
            known = self._known.get(name)
            if known is None or not wanted(known.request):
                continue
            stop = min(count, len(known.request.all_token_ids)) // self.block * self.block
            if stop > known.kept:
                made.keeps.append(self._order(name, known.kept, stop, pages_of))
                known.kept = stop
        return made

    def finished(self, names: Iterable[str]) -> None:
        """Forget requests."""
        for name in names:
            self._known.pop(name, None)
            self._found.pop(name, None)
            self._loads.pop(name, None)

    def take_counts(self) -> Mapping[str, float]:
        """Return the counts since the last call."""
        found, self.counts = self.counts, defaultdict(float)
        return with_tallies(found, self.stores)

    def _order(self, name: str, start: int, stop: int, pages_of: Callable[[str], Sequence[int]]) -> Order:
        request = self._known[name].request
        pages = tuple(pages_of(name)[start // self.page : stop // self.page])
        return Order(name, request.cache_salt or "", tuple(request.all_token_ids[:stop]), start, stop, pages)


def with_tallies(counts: defaultdict[str, float], stores: Iterable[PrefixBlocks]) -> dict[str, float]:
    """Counts, and beside them what stores have counted since the last call."""
    for store in stores:
        for name in ("beyond", "damaged", "unreadable"):
            counts[f"blocks_{name}"] += store.tally.pop(name, 0)
    return {name: count for name, count in counts.items() if count}


def wanted(request: Any) -> bool:
    """True if a request's keys and values follow from its token ids, its tenant and the model alone."""
    return (
        request.prompt_token_ids is not None
        and not request.mm_features
        and request.prompt_embeds is None
        and getattr(request, "prompt_is_token_ids", None) is None
        and request.lora_request is None
    )
