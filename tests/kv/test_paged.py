"""Pages: sizes that are accepted, growth on demand, a full pool, and reuse in any order."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from astrai_runtime.batch import Batch, Chunk
from astrai_runtime.kv._pages import PagePool
from astrai_runtime.kv.base import KVShape
from astrai_runtime.kv.paged import PagedConfig, PagedKV
from tests.kv.test_contract import admit, make, storage
from tests.model.running import sequence_of

VALID: dict[str, Any] = {"kind": "paged", "dtype": "auto", "page_size": 16, "n_tokens": "auto", "prefix_cache": "auto"}


def config(**changes: Any) -> PagedConfig:
    return PagedConfig(**{**VALID, **changes})


@pytest.mark.parametrize("size", [1, 2, 16, 256])
def test_powers_of_two_are_page_sizes(size: int) -> None:
    assert config(page_size=size).page_size == size


@pytest.mark.parametrize(
    ("size", "advice"), [(0, "greater than 0"), (-1, "greater than 0"), (3, "2 or 4"), (48, "32 or 64")]
)
def test_other_page_sizes_are_refused_with_advice(size: int, advice: str) -> None:
    with pytest.raises(ValidationError, match=advice):
        config(page_size=size)


def test_pool_must_be_whole_pages() -> None:
    assert config(n_tokens=64).n_tokens == 64
    with pytest.raises(ValidationError, match="96 or 112 would work"):
        config(n_tokens=100)
    with pytest.raises(ValidationError, match="16 would work"):
        config(n_tokens=5)


@pytest.mark.parametrize("page_size", [1, 16])
def test_prefixes_are_shared_unless_that_is_switched_off(page_size: int) -> None:
    for wish in (True, "auto"):
        on, why = PagedKV.sharing(config(page_size=page_size, prefix_cache=wish))
        assert on
        assert f"{page_size} tokens" in why
    assert PagedKV.sharing(config(prefix_cache=False)) == (False, "switched off in the configuration")


def test_pool_is_what_memory_affords_and_never_more_than_can_be_used() -> None:
    assert PagedKV.pool_tokens(config(), max_batch_size=4, context=100, affordable=10_000) == 4 * 112
    assert PagedKV.pool_tokens(config(), max_batch_size=4, context=100, affordable=250) == 240
    assert PagedKV.pool_tokens(config(n_tokens=512), max_batch_size=4, context=100, affordable=10) == 512


def test_pages_are_taken_only_when_a_sequence_grows_into_them() -> None:
    kv = make("paged", 4)
    sequence = sequence_of(range(20))
    assert kv.reserve(sequence)
    assert kv.stats().held == 0
    for length, held in ((1, 4), (4, 4), (5, 8), (20, 20)):
        assert kv.extend(sequence, length)
        assert kv.stats().held == held


def test_a_full_pool_refuses_growth_and_changes_nothing() -> None:
    kv = make("paged", 4, affordable=24)
    first, second = admit(kv, 20, 16), admit(kv, 20, 4)
    before = kv.stats()
    assert before.free == 4
    assert not kv.extend(second, 12)
    assert kv.stats() == before
    assert kv.extend(second, 8)
    kv.check_integrity([first, second])
    kv.release(first)
    assert kv.extend(second, 20)


def test_a_sequence_larger_than_the_pool_is_refused_with_both_numbers() -> None:
    kv = PagedKV(config(page_size=4, n_tokens=8), KVShape(1, 1, 4, "float32", 2, 100, 8))
    assert kv.refuses(8) is None
    reason = kv.refuses(9)
    assert reason is not None
    assert "3 pages" in reason
    assert "has 2" in reason


def test_reused_pages_come_in_any_order_and_are_still_correct() -> None:
    kv = make("paged", 2)
    kv.attach(storage(kv), storage(kv))
    first, second, third = admit(kv, 20, 6), admit(kv, 20, 4), admit(kv, 20, 6)
    kv.release(second)
    kv.release(first)
    assert kv.extend(third, 20)
    slots = kv.place(Batch((Chunk(third, 0, 20, True),))).out_cache_loc.tolist()
    assert len(set(slots)) == 20
    assert slots != sorted(slots)
    kv.check_integrity([third])


def test_a_chunk_past_its_pages_is_a_programming_error() -> None:
    kv = make("paged", 4)
    kv.attach(storage(kv), storage(kv))
    sequence = admit(kv, 20, 4)
    with pytest.raises(AssertionError, match="no slots up to 5"):
        kv.place(Batch((Chunk(sequence, 0, 5, True),)))


def test_shared_pages_become_free_with_their_last_owner() -> None:
    pool = PagePool(3)
    pages = pool.acquire(2)
    assert pages is not None
    pool.share(pages[:1])
    pool.release(pages)
    assert pool.n_free == 2
    pool.check_integrity(pages[:1])
    pool.release(pages[:1])
    assert pool.n_free == 3
    with pytest.raises(AssertionError, match="more often"):
        pool.release(pages[:1])
    assert pool.acquire(4) is None
    assert pool.acquire(0) == []


def test_integrity_check_names_a_lost_page() -> None:
    pool = PagePool(3)
    pages = pool.acquire(1)
    assert pages is not None
    with pytest.raises(AssertionError, match=f"page {pages[0]} counts 1 owners but has 0"):
        pool.check_integrity([])
