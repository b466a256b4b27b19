"""The prefix cache: what is found again, what never is, and what leaves first."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from astrai_runtime.batch import Batch, Chunk
from astrai_runtime.kv import _prefix
from astrai_runtime.kv.base import KVMode
from astrai_runtime.kv.paged import PagedKV
from astrai_runtime.request import Prompt
from astrai_runtime.sequence import Sequence
from astrai_runtime.stream import Stream
from tests.kv.chain import ask, compute, continuation, likeliest
from tests.model.running import Silent
from tests.provider.reading import make_kv

A, B = list(range(40, 60)), list(range(70, 90))


def pool(page_size: int = 4, n_tokens: int = 64, **options: Any) -> PagedKV:
    kv = make_kv("paged", rows=6, context=64, page_size=page_size, n_tokens=n_tokens, **options)
    assert isinstance(kv, PagedKV)
    return kv


def life(prompt: Prompt | list[int], count: int = 1) -> Sequence:
    asked = prompt if isinstance(prompt, Prompt) else ask(prompt, count)
    return Sequence(asked, Stream(16), Silent(), count)


def compute_to(kv: KVMode, sequence: Sequence, end: int) -> None:
    """Computes tokens up to `end`, and samples one more when that is all there are."""
    assert kv.extend(sequence, end)
    last = end == len(sequence.tokens)
    contexts = compute(Batch((Chunk(sequence, sequence.n_computed, end - sequence.n_computed, last),)), kv)
    sequence.n_computed = end
    kv.record(sequence)
    if last:
        sequence.tokens.append(likeliest(contexts[0]))


def admit(kv: KVMode, prompt: Prompt | list[int], computed: int | None = None, count: int = 1) -> Sequence:
    sequence = life(prompt, count)
    assert kv.reserve(sequence)
    compute_to(kv, sequence, sequence.n_prompt if computed is None else computed)
    return sequence


def run(kv: KVMode, prompt: Prompt | list[int], count: int = 4, *, keep: bool = True) -> Sequence:
    """A whole life; the sequence afterwards."""
    sequence = admit(kv, prompt, count=count)
    while sequence.n_generated < count:
        compute_to(kv, sequence, len(sequence.tokens))
    kv.release(sequence, keep=keep)
    kv.check_integrity([])
    return sequence


def cached(kv: KVMode, prompt: Prompt | list[int]) -> int:
    """How much of a prompt would come from the cache."""
    sequence = life(prompt)
    assert kv.reserve(sequence)
    kv.release(sequence, keep=True)
    return sequence.n_cached


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("pages", [0, 1, 3])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_k01_shared_beginnings_are_reused_in_whole_pages_and_change_nothing(page_size: int, pages: int, more: int) -> None:
    shared = max(0, pages * page_size + more)
    dice = random.Random(shared)
    beginning = [dice.randrange(40, 90) for _ in range(shared)]
    prompts = [[*beginning, 91, 92, 93], [*beginning, 94, 95]]
    for first, second in itertools.permutations(prompts):
        kv = make_kv("paged", rows=2, context=128, page_size=page_size, n_tokens=256)
        cold, warm, again = run(kv, first), run(kv, second), run(kv, second)
        assert cold.n_cached == 0
        assert warm.n_cached == shared // page_size * page_size
        assert again.n_cached == (len(second) - 1) // page_size * page_size
        for sequence in (cold, warm, again):
            assert sequence.tokens[sequence.n_prompt :] == continuation(sequence.prompt, 4)


class Clash(int):
    """An integer whose hash says nothing."""

    def __hash__(self) -> int:
        return 7


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_k02_pages_with_equal_hashes_are_never_mixed_up(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_prefix, "page_digest", lambda parent, tokens: "constant")
    dice = random.Random(page_size)
    prompts = [[Clash(dice.choice([-1, -2, 0, 1, 41, 42])) for _ in range(dice.randint(5, 12))] for _ in range(20)]
    on = pool(page_size, n_tokens=1024)
    off = pool(page_size, n_tokens=1024, prefix_cache=False)
    for prompt in prompts * 2:
        assert run(on, prompt).tokens == run(off, prompt).tokens
    assert on.stats().cached > 0
    assert on._prefixes is not None
    assert {entry.digest for entry in on._prefixes.entries()} == {"constant"}


def test_k02_minus_one_and_minus_two_are_different_tokens() -> None:
    assert hash((-1,)) == hash((-2,))
    kv = pool()
    run(kv, [-1, -1, -1, -1, 50])
    assert cached(kv, [-2, -2, -2, -2, 50]) == 0
    assert cached(kv, [-1, -1, -1, -1, 50]) == 4


def test_full_page_is_shared_only_under_same_prefix() -> None:
    kv = pool()
    run(kv, A[:4] + B[:4] + [99])
    assert cached(kv, A[:4] + B[:4] + [98]) == 8
    assert cached(kv, [*B[:4], 98]) == 0
    assert cached(kv, A[4:8] + B[:4] + [98]) == 0


def test_digests_name_pages_after_their_whole_way() -> None:
    kv = pool()
    run(kv, A[:4] + B[:4] + [99], count=1)
    run(kv, A[4:8] + B[:4] + [99], count=1)
    assert kv._prefixes is not None
    entries = list(kv._prefixes.entries())
    assert [entry.depth for entry in entries] == [1, 2, 1, 2]
    assert len({entry.digest for entry in entries}) == 4
    assert {entry.parent for entry in entries if entry.depth == 2} < {entry.digest for entry in entries}


def test_partial_last_page_stays_private_and_is_freed() -> None:
    kv = pool()
    run(kv, A[:7], count=1)
    assert kv.stats().cached == 4
    assert kv.stats().held == 0


def test_generated_tokens_are_recorded_but_the_last_sampled_one_is_not() -> None:
    kv = pool()
    sequence = run(kv, A[:4], count=5)  # 4 + 5 tokens, of which the last never passed through the model
    assert cached(kv, sequence.tokens) == 8
    short = run(pool(), A[:4], count=4)  # 4 + 4 tokens: the second page lacks its last one
    assert cached(kv, [*short.tokens[:8], 99]) == 8
    other = pool()
    run(other, A[:4], count=4)
    assert cached(other, [*short.tokens[:8], 99]) == 4


@pytest.mark.parametrize(("page_size", "expected"), [(1, 15), (4, 12), (16, 0)])
def test_fully_cached_prompt_still_computes_its_last_token(page_size: int, expected: int) -> None:
    kv = pool(page_size)
    run(kv, A[:16])
    sequence = life(A[:16])
    assert kv.reserve(sequence)
    assert (sequence.n_cached, sequence.n_computed) == (expected, expected)
    compute_to(kv, sequence, 16)
    assert sequence.tokens[16:] == continuation(sequence.prompt, 1)
    kv.release(sequence)
    kv.check_integrity([])


def test_pages_are_shared_while_their_first_owner_still_runs() -> None:
    kv = pool()
    first = admit(kv, A[:13], computed=8)
    second = life(A[:13])
    assert kv.reserve(second)
    assert (second.n_computed, second.n_cached) == (8, 8)
    assert kv.stats().held == 8  # two owners, no copy
    compute_to(kv, first, 13)
    kv.reuse(second)
    assert (second.n_computed, second.n_cached) == (12, 12)
    kv.check_integrity([first, second])
    kv.release(first)
    compute_to(kv, second, 13)
    assert second.tokens == first.tokens
    kv.release(second)
    kv.check_integrity([])


def test_page_that_was_begun_is_finished_by_who_began_it() -> None:
    kv = pool()
    first, second = admit(kv, A, computed=6), admit(kv, A, computed=16)
    kv.reuse(first)
    assert (first.n_computed, first.n_cached) == (6, 0)
    compute_to(kv, first, 8)
    kv.reuse(first)
    assert (first.n_computed, first.n_cached) == (16, 8)
    kv.check_integrity([first, second])


def test_who_computed_a_page_a_second_time_takes_the_first() -> None:
    kv = pool()
    first, second = life(A[:9]), life(A[:9])
    assert kv.reserve(first)
    assert kv.reserve(second)
    compute_to(kv, first, 9)
    assert kv.stats().held == 12
    compute_to(kv, second, 9)
    assert kv.stats().held == 16  # two pages in common, and each one's last
    kv.check_integrity([first, second])
    for _ in range(3):
        compute_to(kv, second, len(second.tokens))
    assert second.tokens[9:] == continuation(second.prompt, 4)


def test_next_page_has_one_name_for_everybody_who_would_compute_it() -> None:
    kv = pool()
    first, second, other = life(A[:12]), life(A[:12]), life(B[:12])
    for sequence in (first, second, other):
        assert kv.reserve(sequence)
    name = kv.next_page(first, 4)
    assert name is not None
    assert name == kv.next_page(second, 8)
    assert name != kv.next_page(other, 4)
    assert kv.next_page(first, 3) is None  # completes nothing
    compute_to(kv, first, 8)
    assert kv.next_page(first, 4) is None  # its last page is its own
    assert kv.next_page(second, 4) == name


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({}, {"cache_salt": "a"}),
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({}, {"cache_identity": ("adapter:1",)}),
        ({"cache_identity": ("adapter:1",)}, {"cache_identity": ("adapter:2",)}),
        ({"cache_identity": ("x", "y")}, {"cache_identity": ("y", "x")}),
        ({"cache_salt": "x"}, {"cache_identity": ("x",)}),
    ],
)
def test_nothing_is_shared_across_identities(here: dict[str, Any], there: dict[str, Any]) -> None:
    kv = pool()
    run(kv, ask(A, **here))
    assert cached(kv, ask(A, **there)) == 0
    sequence = run(kv, ask(A, **there))
    assert sequence.tokens[20:] == continuation(sequence.prompt, 4)
    assert cached(kv, ask(A, **here)) == cached(kv, ask(A, **there)) == 16


def test_forgotten_identities_leave_nothing_behind() -> None:
    kv = pool()
    for number in range(50):
        run(kv, ask(A[:8], cache_salt=f"tenant {number}"))
    assert kv._prefixes is not None
    assert len(kv._prefixes._roots) <= 16
    kv.forget()
    assert not kv._prefixes._roots


@pytest.mark.parametrize("page_size", [1, 4])
def test_failure_withdraws_what_it_computed_and_what_it_used(page_size: int) -> None:
    kv = pool(page_size, n_tokens=256)
    run(kv, A[:8])
    neighbour = admit(kv, A, computed=16)
    broken = admit(kv, A[:8] + B[:8])
    assert cached(kv, A[:8] + B) == 16
    kv.release(broken, keep=False)
    kv.check_integrity([neighbour])
    assert cached(kv, A) == cached(kv, A[:8] + B) == 0
    compute_to(kv, neighbour, 20)
    assert neighbour.tokens[20:] == continuation(neighbour.prompt, 1)
    kv.release(neighbour)
    kv.check_integrity([])
    assert kv.stats().free == kv.stats().total  # pages in doubt do not come back


def test_least_recently_used_leaves_go_first() -> None:
    kv = pool(n_tokens=48)
    run(kv, A[:13], count=1)  # three pages
    run(kv, A[:8] + B[:5], count=1)  # two of them, and one more
    run(kv, B[:13], count=1)  # three
    assert cached(kv, A[:13]) == 12  # used once more
    assert kv.stats().cached == 28
    hog = admit(kv, [99] * 24)
    assert kv.stats().cached == 24
    assert cached(kv, A[:8] + B[:5]) == 8
    compute_to(kv, hog, 25)
    assert kv.stats().cached == 20
    assert (cached(kv, B[:13]), cached(kv, A[:13])) == (8, 12)
    kv.check_integrity([hog])


def test_page_that_was_just_matched_is_never_evicted_by_the_same_admission() -> None:
    kv = pool(n_tokens=32)
    run(kv, A[:9], count=1)  # the oldest pages
    run(kv, B[:17], count=1)
    assert kv.stats().free == 8
    sequence = life(A[:8] + [99] * 24)
    assert kv.reserve(sequence)
    assert sequence.n_cached == 8
    assert kv.extend(sequence, 32)
    kv.check_integrity([sequence])
    compute_to(kv, sequence, 32)
    assert sequence.tokens[32:] == continuation(sequence.prompt, 1)
    assert kv.stats() == type(kv.stats())(free=0, held=32, cached=0, total=32)


def test_full_pool_of_cache_is_as_good_as_an_empty_one() -> None:
    kv = pool(n_tokens=64)
    for number in range(8):
        run(kv, [number] * 16)
    assert kv.stats().free < 16
    sequence = life(A * 3)
    assert kv.reserve(sequence)
    assert kv.extend(sequence, 64)
    kv.check_integrity([sequence])


def test_no_room_evicts_nothing() -> None:
    kv = pool(n_tokens=32)
    run(kv, A[:17], count=1)
    holder = admit(kv, B[:9])
    before = kv.stats()
    assert before.cached == 16
    other = life([99] * 24)
    assert kv.reserve(other)
    assert not kv.extend(other, 24)
    assert kv.stats() == before
    assert kv.extend(other, 20)
    kv.check_integrity([holder, other])


def test_preempted_sequence_resumes_from_its_own_pages_which_are_no_saving() -> None:
    kv = pool()
    sequence = admit(kv, A[:10], count=8)
    for _ in range(4):
        compute_to(kv, sequence, len(sequence.tokens))
    kv.release(sequence)
    sequence.preemptions += 1
    assert kv.reserve(sequence)
    assert (sequence.n_computed, sequence.n_cached) == (12, 0)
    while sequence.n_generated < 8:
        compute_to(kv, sequence, len(sequence.tokens))
    assert sequence.tokens[10:] == continuation(sequence.prompt, 8)


def test_k05_duplicates_that_finish_together_do_not_leak() -> None:
    kv = pool()
    sequences = [life(A[:9]) for _ in range(6)]
    for sequence in sequences:
        assert kv.reserve(sequence)
    for sequence in sequences:
        compute_to(kv, sequence, 9)
    for sequence in sequences:
        kv.release(sequence)
        kv.check_integrity(other for other in sequences if other.row is not None)
    assert kv.stats().held == 0
    assert kv.stats().cached == 8
    kv.forget()
    assert kv.stats().free == kv.stats().total


def test_switched_off_cache_keeps_nothing() -> None:
    kv = pool(prefix_cache=False)
    run(kv, A)
    assert cached(kv, A) == 0
    assert kv.stats().free == kv.stats().total
    kv.forget()


def test_integrity_check_notices_a_page_whose_way_is_owned_by_nobody() -> None:
    kv = pool()
    sequence = admit(kv, A[:13])
    kv.check_integrity([sequence])
    row = kv._rows[sequence.row or 0]
    kv._pool.release([row.pages[0]])
    with pytest.raises(AssertionError, match="before it is not"):
        kv.check_integrity([sequence])
