"""Decide, where requests are scheduled, what of them is loaded from kept prefixes and what is kept: no tensor here.

A request is loaded from the longest prefix that every worker can load, as far as files were read and checked just now.
Of what was scheduled, whole blocks whose tokens are known are kept: a draft that may be refused is not.

A page that was loaded holds decoded tokens, for as long as the engine shares it, until something is computed into it.
If its block has left the folder meanwhile, it is not encoded once more, which would add a loss each time.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvq_runtime.prefix.store import PrefixBlocks


@dataclass(frozen=True)
class Text:
    """A request, as far as its prefix goes.

    tokens   its token ids, a list that grows while it is answered
    salt     of its tenant, or empty
    plain    its keys and values follow from tokens, tenant and model alone; else it is neither loaded nor kept
    reads    it may be loaded
    resets   how often it has lost its pages; it is loaded once, and once more after each
    """

    name: str
    tokens: Sequence[int]
    salt: str
    plain: bool
    reads: bool = True
    resets: int = 0


def text_of(request: Any) -> Text:
    """A request of vLLM as it is planned for, by what of it decides its keys and values."""
    plain = (
        request.prompt_token_ids is not None
        and not request.mm_features
        and request.prompt_embeds is None
        and getattr(request, "prompt_is_token_ids", None) is None
        and request.lora_request is None
    )
    reads = not getattr(request, "skip_reading_prefix_cache", False)
    salt, resets = request.cache_salt or "", request.num_preemptions
    return Text(request.request_id, request.all_token_ids, salt, plain, reads, resets)


@dataclass(frozen=True)
class Order:
    """Load, or keep, tokens `start` to `stop` of a request's text.

    tokens   the text's first `stop` token ids
    salt     of the request's tenant, or empty
    pages    of the engine, that hold tokens `start` to `stop`
    decoded  blocks to keep, by number in the text, that were loaded themselves: what has their tokens is not exact
    """

    request: str
    salt: str
    tokens: tuple[int, ...]
    start: int
    stop: int
    pages: tuple[int, ...]
    decoded: frozenset[int] = frozenset()


@dataclass
class Orders:
    """The orders of a step: loads, which may take several steps, and what to keep once it has been computed."""

    loads: list[Order] = field(default_factory=list)
    keeps: list[Order] = field(default_factory=list)


@dataclass
class _Known:
    """A request that has pages: the end of what was ordered to be kept, and how often it was loaded."""

    text: Text
    kept: int = 0
    loads: int = 0


@dataclass(frozen=True)
class _Found:
    """Tokens `start` to `stop` of a request are kept."""

    start: int = 0
    stop: int = 0


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
        self._found: dict[str, _Found] = {}  # by request that waits for pages
        self._loads: dict[str, tuple[int, _Found]] = {}  # begun since the last step, from this token on
        self._decoded = set[int]()  # pages that were loaded, and not computed since

    def matched(self, text: Text, computed: int) -> int:
        """Return how many tokens can be loaded beyond `computed`.

        An engine may ask again while there is no room.
        """
        known = self._known.get(text.name)
        if not text.plain or not text.reads:
            return 0
        if known is not None and known.loads > text.resets:
            return 0  # it was loaded, and something failed: it is computed
        if text.name not in self._found or self._found[text.name].start > computed:
            self.counts["lookups"] += 1
            self._found[text.name] = self._find(text, computed // self.block * self.block)
        return max(0, self._found[text.name].stop - computed)

    def _find(self, text: Text, start: int) -> _Found:
        tokens = list(text.tokens)
        limit, stores = len(tokens) - max(1, self.recent), [store.under(text.salt) for store in self.stores]
        return _Found(start, min(store.checked(tokens, limit, start) for store in stores))

    def allocated(self, text: Text, external: int) -> None:
        """The request has pages, and `external` tokens are to be loaded."""
        known = self._known.setdefault(text.name, _Known(text))
        found = self._found.pop(text.name, _Found())
        if external:
            self.counts["hits"] += 1
            known.loads += 1
            self._loads[text.name] = found.stop - external, found

    def orders(self, computed: Mapping[str, tuple[int, int]], pages_of: Callable[[str], Sequence[int]]) -> Orders:
        """Return the orders that this step begins.

        computed   by request that is scheduled, how many tokens of it are computed before and after the step
        """
        made = Orders()
        for name, (first, found) in self._loads.items():
            start = first // self.page * self.page  # tokens of a page are written together
            made.loads.append(self._order(name, start, found.stop, pages_of))
            self._decoded.update(made.loads[-1].pages)
        self._loads.clear()
        for name, (before, count) in computed.items():
            begun = slice(-(-before // self.page), -(-count // self.page))
            if self._decoded and begun.start < begun.stop:
                self._decoded.difference_update(pages_of(name)[begun])
            known = self._known.get(name)
            if known is None or not known.text.plain:
                continue
            stop = min(count, len(known.text.tokens)) // self.block * self.block
            if stop > known.kept:
                made.keeps.append(self._marked(self._order(name, known.kept, stop, pages_of)))
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

    def _marked(self, order: Order) -> Order:
        """An order to keep, with the blocks that were decoded."""
        places = range(order.start // self.page, order.stop // self.page)
        held = zip(places, order.pages, strict=False)
        return replace(
            order, decoded=frozenset(place * self.page // self.block for place, page in held if page in self._decoded)
        )

    def _order(self, name: str, start: int, stop: int, pages_of: Callable[[str], Sequence[int]]) -> Order:
        text = self._known[name].text
        pages = tuple(pages_of(name)[start // self.page : stop // self.page])
        return Order(name, text.salt, tuple(text.tokens[:stop]), start, stop, pages)


def with_tallies(counts: defaultdict[str, float], stores: Iterable[PrefixBlocks]) -> dict[str, float]:
    """Counts, and beside them what stores have counted since the last call."""
    for store in stores:
        for name in ("damaged", "unreadable"):
            counts[f"blocks_{name}"] += store.tally.pop(name, 0)
    return {name: count for name, count in counts.items() if count}
