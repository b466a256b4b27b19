"""The allocator: which pages are free, and how many owners each other one has."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Pages by number, each with a reference count. A page without owners is free."""

    def __init__(self, n_pages: int) -> None:
        self.references = [0] * n_pages
        self._free = list(range(n_pages - 1, -1, -1))  # a stack: what was released last is warm and goes out first

    def __len__(self) -> int:
        return len(self.references)

    @property
    def n_free(self) -> int:
        return len(self._free)

    def reset(self) -> None:
        """Frees every page, whoever owns it."""
        self.references = [0] * len(self.references)
        self._free = list(range(len(self.references) - 1, -1, -1))

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
        """One more owner for each of these pages, which all have one already."""
        for page in pages:
            assert self.references[page] > 0, f"page {page} is free and cannot be shared"
            self.references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One owner less for each of these pages; those without owners become free."""
        for page in pages:
            assert self.references[page] > 0, f"page {page} was released more often than acquired"
            self.references[page] -= 1
            if self.references[page] == 0:
                self._free.append(page)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Proves the counts against every page that some owner holds, once for each owner.

        Raises:
            AssertionError: a page is lost, free while owned, or counted wrong; the message names it.
        """
        expected = [0] * len(self.references)
        for page in owned:
            expected[page] += 1
        free = set(self._free)
        assert len(free) == len(self._free), "a page is in the free list twice"
        for page, (count, owners) in enumerate(zip(self.references, expected, strict=True)):
            assert count == owners, f"page {page} counts {count} owners but has {owners}"
            assert (page in free) == (owners == 0), f"page {page} has {owners} owners but free is {page in free}"
