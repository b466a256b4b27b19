"""The allocator: which pages are free, how many sequences own each other one, and which are kept for later."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Pages by number, each with a count of owners and a mark that says whether the prefix cache keeps it.

    A page without owners is cached while it is kept, and free otherwise: `n_free + n_cached + owned == len(pool)`.
    """

    def __init__(self, n_pages: int) -> None:
        self.references = [0] * n_pages
        self.reset()

    def reset(self) -> None:
        """Takes every page back from whoever owns or keeps it."""
        n_pages = len(self.references)
        self.references[:] = [0] * n_pages
        self._kept = [False] * n_pages
        self._free = list(range(n_pages - 1, -1, -1))  # a stack: what was released last is warm and goes out first
        self._n_cached = 0

    def __len__(self) -> int:
        return len(self.references)

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_cached(self) -> int:
        """Pages that are kept and that nobody owns."""
        return self._n_cached

    def acquire(self, count: int) -> list[int] | None:
        """`count` free pages with one owner each. None, and nothing changed, when there are fewer."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        for page in pages:
            self.references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for each of these pages, which all are owned or kept already."""
        for page in pages:
            if self.references[page] == 0:
                assert self._kept[page], f"page {page} is free and cannot be shared"
                self._n_cached -= 1
            self.references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One owner less for each of these pages; those without owners become cached or free."""
        for page in pages:
            assert self.references[page] > 0, f"page {page} was released more often than acquired"
            self.references[page] -= 1
            if self.references[page] == 0:
                if self._kept[page]:
                    self._n_cached += 1
                else:
                    self._free.append(page)

    def keep(self, page: int) -> None:
        """From now on an owned page outlives its owners, until `drop`."""
        assert self.references[page] > 0, f"page {page} has no owner whose content could be kept"
        assert not self._kept[page], f"page {page} is kept already"
        self._kept[page] = True

    def drop(self, page: int) -> None:
        """Ends `keep`; a page without owners becomes free."""
        assert self._kept[page], f"page {page} is not kept"
        self._kept[page] = False
        if self.references[page] == 0:
            self._n_cached -= 1
            self._free.append(page)

    def check_integrity(self, owned: Iterable[int], kept: Iterable[int] = ()) -> None:
        """Proves the counts against every page that some owner holds, once for each owner, and those that are kept.

        Raises:
            AssertionError: a page is lost, free while owned, or counted wrong; the message names it.
        """
        expected = [0] * len(self.references)
        for page in owned:
            expected[page] += 1
        free = set(self._free)
        cached = [page for page in kept if expected[page] == 0]
        assert len(free) == len(self._free), "a page is in the free list twice"
        assert len(set(cached)) == len(cached) == self._n_cached, f"{self._n_cached} counted as cached, not {cached}"
        cached_once = set(cached)
        for page, (count, owners) in enumerate(zip(self.references, expected, strict=True)):
            assert count == owners, f"page {page} counts {count} owners but has {owners}"
            idle = owners == 0 and page not in cached_once
            assert (page in free) == idle, f"page {page} has {owners} owners but free is {page in free}"
        marked = [page for page, mark in enumerate(self._kept) if mark]
        assert marked == sorted(kept), f"pages {marked} are marked as kept, not {sorted(kept)}"
