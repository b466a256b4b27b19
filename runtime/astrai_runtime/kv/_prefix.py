"""The prefix cache: complete, computed pages, found again by the exact tokens of everything up to their end.

A tree with one page an edge (RadixAttention, arXiv:2312.07104). An edge is found in its parent by its page's tokens, so
equal pages after different beginnings are different edges. Keys are compared token by token; digests are for people.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

from astrai_runtime.kv._pages import PagePool

Tokens = tuple[int, ...]
Identity = tuple[str, ...]  # what else keys and values depend on, or may not be shared across: see Prompt


def page_digest(parent: str, tokens: tuple[object, ...]) -> str:
    """A name for a page after its parent's, for people who look at the cache. Nothing is ever decided by it."""
    return hashlib.sha256(f"{parent}:{tokens}".encode()).hexdigest()[:16]


class Edge:
    """One page of tokens after its parent's."""

    __slots__ = ("alive", "children", "depth", "last_used", "page", "parent", "queued", "tokens")

    def __init__(self, parent: Edge | None, tokens: Tokens, page: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.page = page
        self.depth: int = parent.depth + 1 if parent is not None else 0  # pages from the root to this one's end
        self.children: dict[Tokens, Edge] = {}
        self.last_used = 0
        self.queued = False  # waits in the queue of what may be evicted
        self.alive = True  # False once it left the tree, whoever still owns its page


class Root(Edge):
    """Where the ways of one identity begin; it has no page."""

    __slots__ = ("identity",)

    def __init__(self, identity: Identity) -> None:
        super().__init__(None, (), -1)
        self.identity = identity


@dataclass(frozen=True, slots=True)
class Entry:
    """What there is to see of an edge."""

    digest: str
    parent: str
    depth: int
    tokens: Tokens
    page: int


class PrefixCache:
    """Keeps pages of a pool beyond their owners, and gives up the least recently used ones, leaves first.

    Whoever owns an edge's page owns its whole way from the root. So cached pages, which nobody owns, never have owned
    ones below them, and every one of them can be evicted.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._roots: dict[Identity, Root] = {}
        self._clock = itertools.count(1)
        self._queue: list[tuple[int, int, Edge]] = []  # a heap of (last_used, push, edge), at most one for each edge

    def find(self, identity: Identity, tip: Edge | None, tokens: Many[int], n_pages: int) -> list[Edge]:
        """The edges that follow `tip` (None: the root) with exactly these tokens, at most to a depth of `n_pages`."""
        at: Edge | None = self._roots.get(identity) if tip is None else tip
        if at is None or not at.children:
            return []
        found: list[Edge] = []
        for page_tokens in self._pages(tokens, at.depth, n_pages):
            at = at.children.get(page_tokens)
            if at is None:
                break
            found.append(at)
        if found:
            self.touch(found[-1])
        return found

    def insert(self, identity: Identity, tip: Edge | None, tokens: Many[int], pages: Many[int], n_pages: int) -> list[Edge]:
        """The edges that follow `tip` with these tokens to a depth of `n_pages`, of which the missing ones are made.

        `pages` are those of all `tokens` from the beginning; those that become edges are kept. An edge that was there
        already has another page than its entry in `pages`: the caller has computed the same thing again.
        """
        at: Edge = self._roots.setdefault(identity, Root(identity)) if tip is None else tip
        way: list[Edge] = []
        for page_tokens in self._pages(tokens, at.depth, n_pages):
            edge = at.children.get(page_tokens)
            if edge is None:
                edge = at.children[page_tokens] = Edge(at, page_tokens, pages[at.depth])
                self._pool.keep(edge.page)
            way.append(edge)
            at = edge
        self.touch(at)
        return way

    def _pages(self, tokens: Many[int], first: int, end: int) -> Iterator[Tokens]:
        """The tokens of pages from `first` to `end`, cut without a Python loop over tokens."""
        some = iter(tokens[first * self._page_size : end * self._page_size])
        return zip(*[some] * self._page_size, strict=False)

    def touch(self, edge: Edge) -> None:
        """It was used just now, and so was its way from the root, which cannot leave before it does."""
        edge.last_used = next(self._clock)

    def offer(self, edge: Edge) -> None:
        """Its page may have lost its last owner: when it is a leaf as well it may be evicted from now on."""
        if self._evictable(edge) and not edge.queued:
            edge.queued = True
            heapq.heappush(self._queue, (edge.last_used, next(self._clock), edge))

    def _evictable(self, edge: Edge) -> bool:
        return edge.alive and edge.parent is not None and not edge.children and not self._pool.references[edge.page]

    def evict(self, count: int) -> None:
        """Frees this many cached pages, of which there must be as many.

        Whatever was last used by way of the leaf that leaves is as old as that, and goes next.
        """
        assert count <= self._pool.n_cached, f"{count} pages to evict, and {self._pool.n_cached} are cached"
        while count:
            used, _, edge = heapq.heappop(self._queue)
            edge.queued = False
            if used != edge.last_used:
                self.offer(edge)
            elif self._evictable(edge):
                self._remove(edge)
                count -= 1

    def _remove(self, leaf: Edge) -> None:
        parent = leaf.parent
        assert parent is not None
        leaf.alive = False
        del parent.children[leaf.tokens]
        self._pool.drop(leaf.page)
        self.offer(parent)
        if isinstance(parent, Root) and not parent.children:
            del self._roots[parent.identity]

    def withdraw(self, edge: Edge) -> None:
        """Takes the whole way through `edge`, and all that follows its first page, out of the tree.

        Owners keep their pages, for themselves.
        """
        if not edge.alive:
            return
        while edge.parent is not None and not isinstance(edge.parent, Root):
            edge = edge.parent
        for below in reversed(list(_below(edge))):
            self._remove(below)
        self._queue = [waiting for waiting in self._queue if waiting[2].alive]
        heapq.heapify(self._queue)

    def forget(self) -> None:
        """Takes everything out of the tree; cached pages become free."""
        for root in list(self._roots.values()):
            for edge in reversed(list(_below(root))):
                if edge is not root:
                    self._remove(edge)
        self._queue.clear()

    def entries(self) -> Iterator[Entry]:
        """Every edge, parents first, with its digest."""
        for identity, root in self._roots.items():
            names: dict[Edge, str] = {root: page_digest("", identity)}
            for edge in _below(root):
                if edge.parent is not None:
                    parent = names[edge.parent]
                    names[edge] = page_digest(parent, edge.tokens)
                    yield Entry(names[edge], parent, edge.depth, edge.tokens, edge.page)

    def check_integrity(self) -> list[int]:
        """Proves the tree against itself and against the pool's owners. Returns the pages that it keeps.

        Raises:
            AssertionError: a link, a depth or the queue is wrong, or an owned page hangs below one that nobody owns.
        """
        pages: list[int] = []
        for identity, root in self._roots.items():
            assert root.children, f"the root {identity} has no pages and should be gone"
            for edge in _below(root):
                for tokens, child in edge.children.items():
                    linked = child.alive and child.parent is edge and child.tokens == tokens
                    assert linked, f"page {child.page} hangs in a wrong place"
                    assert child.depth == edge.depth + 1, f"page {child.page} has depth {child.depth}"
                    assert len(tokens) == self._page_size, f"page {child.page} is not complete: {tokens}"
                if edge.parent is None:
                    continue
                pages.append(edge.page)
                assert edge.queued or not self._evictable(edge), f"page {edge.page} can never be evicted"
                above, owners = edge.parent.page, self._pool.references[edge.page]
                alone = owners and not isinstance(edge.parent, Root) and not self._pool.references[above]
                assert not alone, f"page {edge.page} is owned, and page {above} before it is not"
        assert len(set(pages)) == len(pages), "a page is in the tree twice"
        return pages


def _below(edge: Edge) -> Iterator[Edge]:
    """An edge and everything under it, parents first; without recursion: with pages of one token ways are long."""
    waiting = [edge]
    while waiting:
        one = waiting.pop()
        yield one
        waiting.extend(one.children.values())
