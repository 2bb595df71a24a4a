"""Pages that are encoded whole, when they are full: a query reads its own exact, in whatever chunks tokens come."""

import pytest
import torch
from paged_server import SIZE, PagedServer, queries_of

from kvq_runtime.recipe import preset
from kvq_runtime.vllm import attend, exact, served
from kvq_runtime.vllm.exact import Tail, Tails

RECIPES = [
    "kivi-2bit-r32", "gear-2bit+all.quantize.group=32+all.correct.rank=2+window.block=32", "gear-4bit+window.block=16",
    "squat-2bit-paper+window.recent=32+window.block=32", "squat-pre-2bit-paper+window.recent=32+window.block=32",
     "kvquant-3bit+window.block=16", "kivi-2bit-r32+value.quantize.bits=4",
    "svdq-2bit+window.block=32", "zipcache-2bit+window.block=32",
]  # fmt: skip


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("name", RECIPES)
def test_attention_is_the_codecs_and_exact_in_its_own_page(name: str, sinks: int, monkeypatch):
    """A prompt in chunks, a short one, one that shares pages; then single steps of all, over the end of a page."""
    monkeypatch.setattr(attend, "TOKENS", 64)
    server = PagedServer(name, sinks)
    page = server.page
    long, short = server.add(7 * page + 3), server.add(page + 2)
    sharing = server.add(4 * page, like=long, shared=3)
    queries = {i: queries_of(len(server.texts[i][0])) for i in (long, short, sharing)}
    found = {i: torch.full_like(q, torch.nan) for i, q in queries.items()}
    ends = {long: 7 * page - 2, short: page - 3, sharing: 4 * page - 5}
    steps = [{long: (0, page // 2), short: (0, 2)}, {long: (page // 2, 5 * page + 3), short: (2, ends[short])}]
    steps += [{long: (5 * page + 3, ends[long]), sharing: (3 * page, ends[sharing])}]
    steps += [{i: (ends[i] + n, ends[i] + n + 1) for i in queries} for n in range(5)]
    for parts in steps:
        for i, out in server.step(parts, queries).items():
            found[i][slice(*parts[i])] = out
    for i in queries:
        begun = 3 * page if i == sharing else 0
        expected = server.expected(i, queries[i])[begun : ends[i] + 5]
        error = (found[i][begun : ends[i] + 5] - expected).norm() / expected.norm()
        assert error < 5e-3, f"request {i}: {error}"


def test_refused_drafts_leave_no_trace():
    """Drafts that fill a page, and are refused: what is encoded in the end are the tokens that were accepted."""
    server = PagedServer("kivi-2bit-r32", drafts=4)
    text = server.add(50)
    queries = {text: queries_of(50)}
    server.step({text: (0, 30)}, queries)
    right = [x.clone() for x in server.texts[text]]
    for x in server.texts[text]:
        x[30:34] = 9 * torch.randn(4, SIZE.width)
    server.step({text: (30, 34)}, queries)  # of which the last three are refused
    for x, kept in zip(server.texts[text], right, strict=True):
        x[31:34] = kept[31:34]
    outs = [server.step({text: (n, n + 1)}, queries)[text] for n in range(31, 50)]
    expected = server.expected(text, queries[text])[31:]
    assert (torch.cat(outs) - expected).norm() < 5e-3 * expected.norm()


def test_a_tail_that_was_settled_is_taken_up_again(monkeypatch):
    """A request that no step had for long, whose entry another one needs: its newest tokens become decoded ones."""
    monkeypatch.setattr(exact, "IDLE", 2)
    server = PagedServer("kivi-4bit-g128+window.block=16+key.quantize.group=16")
    text, other, third = server.add(40), server.add(40), server.add(40)
    queries = {i: queries_of(40) for i in (text, other, third)}
    server.step({text: (0, 30)}, queries)
    for n in range(4):
        server.step({other: (n, n + 1)}, queries)
    server.step({third: (0, 3)}, queries)
    assert server.tails is not None and server.tails.held == 2
    found = server.step({text: (30, 31)}, queries)[text]
    expected = server.expected(text, queries[text])[30:31]
    error = (found - expected).norm() / expected.norm()
    assert 1e-3 < error < 0.2, "decoded from 4 bits, and not lost"


@pytest.mark.parametrize("filled", [3, 10])
def test_first_tokens_of_a_tail_that_is_taken_up_again_are_exact(filled: int, monkeypatch):
    """Codes of a first page know nothing of them: attention to them is neither lost nor counted twice."""
    monkeypatch.setattr(exact, "IDLE", 2)
    server = PagedServer("kivi-4bit-g128+window.block=16+key.quantize.group=16", sinks=4)
    text, other, third = server.add(40), server.add(40), server.add(40)
    for x in server.texts[text]:
        x[:4] *= 8  # as sinks are: unlike all others
    queries = {i: queries_of(40) for i in (text, other, third)}
    server.step({text: (0, filled)}, queries)
    for n in range(4):
        server.step({other: (n, n + 1)}, queries)
    server.step({third: (0, 3)}, queries)
    assert server.tails is not None and server.tails.held == 2, "the text has its entry still"
    found = server.step({text: (filled, filled + 1)}, queries)[text]
    expected = server.expected(text, queries[text])[filled : filled + 1]
    error = (found - expected).norm() / expected.norm()
    assert error < 0.1, f"{error}"


def test_entries_are_those_of_requests_that_go_on():
    """An entry is given back when its page is full, and when the page is another text's; none is for whole pages."""
    kept = Tails(16)
    made = kept.step([0, 40], [40, 16], [40, 16], [[7, 3, 9], [5]])
    assert made.entries == [-1, -1, 0, -1] and made.full == [(0, 7), (1, 3), (3, 5)]
    assert made.kept == [(0, 32 + place, place) for place in range(8)]
    assert [[tuple(piece) for piece in each] for each in made.pieces] == [
        [(0, 16, 0), (16, 32, 1), (32, 40, 2)], [(0, 16, 3)],
    ]  # fmt: skip
    made = kept.step([0], [8], [48], [[7, 3, 9]])
    assert made.entries == [0] and made.full == [(0, 9)]
    assert made.kept == [(0, place, 8 + place) for place in range(8)]
    assert kept.step([0], [3], [3], [[11]]).entries == [0]
    assert kept.step([0], [2], [2], [[11]]).entries == [0] and kept.held == 1  # page 11 has another text
    for _ in range(exact.IDLE + 1):
        made = kept.step([0], [1], [18], [[1, 2]]) if kept.held == 2 else kept.step([0], [2], [18], [[1, 2]])
    assert kept.step([0], [1], [1], [[12]]).settled == [Tail(0, 11, 0, 2)]


def test_a_page_of_another_length_is_refused():
    with pytest.raises(ValueError, match="encodes blocks of 128 tokens, and a page has 16: --block-size 128"):
        served.paged(preset("kivi-2bit"), SIZE, 16)
