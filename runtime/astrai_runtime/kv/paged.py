"""A shared pool of pages, handed out as sequences grow (PagedAttention, arXiv:2309.06180), with equal beginnings shared."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import PositiveInt, StrictBool, field_validator, model_validator

from astrai_runtime.batch import Batch, KVView
from astrai_runtime.kv._pages import PagePool
from astrai_runtime.kv._prefix import Edge, Identity, PrefixCache
from astrai_runtime.kv._table import SlotTable
from astrai_runtime.kv.base import KVConfig, KVMode, KVShape, KVStats
from astrai_runtime.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor


class PagedConfig(KVConfig):
    kind: Literal["paged"]
    page_size: PositiveInt  # tokens a page, a power of two
    n_tokens: PositiveInt | Literal["auto"]  # tokens in the pool, a whole number of pages; auto: the plan decides
    prefix_cache: StrictBool | Literal["auto"]  # share the pages of equal beginnings; auto: true

    @field_validator("page_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            lower = 1 << (value.bit_length() - 1)
            raise ValueError(f"page_size must be a power of two, not {value}; {lower} or {2 * lower} would work")
        return value

    @model_validator(mode="after")
    def _whole_pages(self) -> PagedConfig:
        if self.n_tokens != "auto" and self.n_tokens % self.page_size:
            below = self.n_tokens // self.page_size * self.page_size
            near = f"{below} or {below + self.page_size}" if below else f"{self.page_size}"
            raise ValueError(
                f"n_tokens must be whole pages of {self.page_size} tokens, not {self.n_tokens}; {near} would work"
            )
        return self


@dataclass(slots=True)
class _Row:
    """What an admitted sequence owns: its pages in order of position, of which those up to `tip` are in the cache."""

    pages: list[int] = field(default_factory=list)
    tip: Edge | None = None

    @property
    def n_shared(self) -> int:
        return self.tip.depth if self.tip is not None else 0

    @property
    def shares(self) -> bool:
        """False once its way was withdrawn: its pages are in doubt, and nobody else's business any more."""
        return self.tip is None or self.tip.alive


class PagedKV(KVMode):
    """Sequences own whole pages and get them on demand, so that short ones leave their room to others.

    Pages that are complete and computed enter the prefix cache at once, and whoever computed the same page meanwhile
    takes the one that is there. A partial last page stays private.
    """

    Config = PagedConfig

    @staticmethod
    def pool_tokens(config: KVConfig, max_batch_size: int, context: int, affordable: int) -> int:
        assert isinstance(config, PagedConfig)
        if config.n_tokens != "auto":
            return config.n_tokens
        # A sequence's last page may be partly used: a full house needs every context rounded up to pages.
        pages = min(affordable // config.page_size, max_batch_size * -(-context // config.page_size))
        return pages * config.page_size

    @staticmethod
    def sharing(config: KVConfig) -> tuple[bool, str]:
        """Whether prefixes are shared, and why: the resolved `prefix_cache`, for the plan."""
        assert isinstance(config, PagedConfig)
        if config.prefix_cache is False:
            return False, "switched off in the configuration"
        return True, f"equal beginnings are computed once, in whole pages of {config.page_size} tokens"

    def __init__(self, config: KVConfig, shape: KVShape) -> None:
        super().__init__(config, shape)
        assert isinstance(config, PagedConfig)
        self.page_size = config.page_size
        assert shape.n_tokens % self.page_size == 0, f"{shape.n_tokens} is no whole number of pages"
        self._pool = PagePool(shape.n_tokens // self.page_size)
        self._table = SlotTable(shape.max_batch_size, shape.context)
        shares, _ = self.sharing(config)
        self._prefixes = PrefixCache(self._pool, self.page_size) if shares else None
        self._rows: dict[int, _Row] = {}
        self._in_page = np.arange(self.page_size, dtype=np.int32)

    def _pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.page_size)

    def refuses(self, n_tokens: int) -> str | None:
        if n_tokens > self.shape.context:
            return f"it needs {n_tokens} tokens, and one sequence holds at most {self.shape.context}"
        if self._pages_for(n_tokens) > len(self._pool):
            return (
                f"it needs {self._pages_for(n_tokens)} pages of {self.page_size} tokens, "
                f"and the whole pool has {len(self._pool)}"
            )
        return None

    def reserve(self, sequence: Sequence) -> bool:
        assert sequence.row is None, f"sequence {sequence.id} is admitted already"
        row = self._table.take_row()
        if row is None:
            return False
        sequence.row, sequence.n_computed = row, 0
        if sequence.preemptions == 0:
            sequence.n_cached = 0
        self._rows[row] = _Row()
        self.reuse(sequence)
        return True

    def reuse(self, sequence: Sequence) -> None:
        assert sequence.row is not None, f"sequence {sequence.id} is not admitted"
        row = self._rows[sequence.row]
        if self._prefixes is None or not self._at_reusable_page(sequence, row):
            return
        usable = (len(sequence.tokens) - 1) // self.page_size
        found = self._prefixes.find(_identity(sequence), row.tip, sequence.tokens, usable)
        if not found:
            return
        self._take_over(sequence.row, found)
        sequence.n_computed = row.n_shared * self.page_size
        if sequence.preemptions == 0:
            sequence.n_cached += len(found) * self.page_size

    def next_page(self, sequence: Sequence, length: int) -> Hashable | None:
        assert sequence.row is not None, f"sequence {sequence.id} is not admitted"
        row, start, end = self._rows[sequence.row], sequence.n_computed, sequence.n_computed + self.page_size
        if self._prefixes is None or length < self.page_size or not self._at_reusable_page(sequence, row):
            return None
        return row.tip or _identity(sequence), tuple(sequence.tokens[start:end])

    def _at_reusable_page(self, sequence: Sequence, row: _Row) -> bool:
        """Its next token begins a page after those that it shares, and is not in the page of its last token."""
        done = row.n_shared * self.page_size
        return row.shares and sequence.n_computed == done and len(sequence.tokens) - 1 >= done + self.page_size

    def record(self, sequence: Sequence) -> None:
        assert sequence.row is not None, f"sequence {sequence.id} is not admitted"
        row = self._rows[sequence.row]
        complete = sequence.n_computed // self.page_size
        if self._prefixes is None or not row.shares or complete <= row.n_shared:
            return
        way = self._prefixes.insert(_identity(sequence), row.tip, sequence.tokens, row.pages, complete)
        self._take_over(sequence.row, way)

    def _take_over(self, row: int, way: list[Edge]) -> None:
        """Makes a row own the edges that follow its tip, instead of the pages that it has at these positions."""
        owner = self._rows[row]
        start = owner.n_shared
        before, after = owner.pages[start : start + len(way)], [edge.page for edge in way]
        owner.tip = way[-1]
        if before != after:
            self._pool.share(after)
            self._pool.release(before)
            owner.pages[start : start + len(way)] = after
            self._table.write(row, start * self.page_size, self._slots_of(after))

    def extend(self, sequence: Sequence, length: int) -> bool:
        assert sequence.row is not None, f"sequence {sequence.id} is not admitted"
        assert length <= self.shape.context, f"{length} tokens pass the context of {self.shape.context}"
        owned = self._rows[sequence.row].pages
        missing = self._pages_for(length) - len(owned)
        if missing <= 0:
            return True
        pages = self._acquire(missing)
        if pages is None:
            return False
        self._table.write(sequence.row, len(owned) * self.page_size, self._slots_of(pages))
        owned.extend(pages)
        return True

    def _acquire(self, count: int) -> list[int] | None:
        """Free pages, and cached ones when those are not enough. None, and nothing evicted, when both are not."""
        short = count - self._pool.n_free
        if self._prefixes is not None and 0 < short <= self._pool.n_cached:
            self._prefixes.evict(short)
        return self._pool.acquire(count)

    def _slots_of(self, pages: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return (np.asarray(pages, dtype=np.int32)[:, None] * np.int32(self.page_size) + self._in_page).ravel()

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        if sequence.row is None:
            return
        if keep:
            self.record(sequence)
        row = self._rows.pop(sequence.row)
        if self._prefixes is not None and row.tip is not None and not keep:
            self._prefixes.withdraw(row.tip)
        self._pool.release(row.pages)
        if self._prefixes is not None and row.tip is not None:
            self._prefixes.offer(row.tip)
        self._table.give_row(sequence.row)
        sequence.row, sequence.n_computed = None, 0

    def reset(self) -> None:
        self._table.reset()
        self._pool.reset()
        self._rows.clear()
        self._prefixes = PrefixCache(self._pool, self.page_size) if self._prefixes is not None else None

    def forget(self) -> None:
        if self._prefixes is not None:
            self._prefixes.forget()

    def stats(self) -> KVStats:
        free, cached = self._pool.n_free * self.page_size, self._pool.n_cached * self.page_size
        total = self.shape.n_tokens
        return KVStats(free=free, held=total - free - cached, cached=cached, total=total)

    def check_integrity(self, admitted: Iterable[Sequence]) -> None:
        sequences = list(admitted)
        rows = [sequence.row for sequence in sequences]
        assert len(set(rows)) == len(rows), f"a row is owned twice: {rows}"
        assert set(rows) == set(self._rows), f"rows {sorted(self._rows)} are held, but {rows} are admitted"
        everyone = set(range(self.shape.max_batch_size))
        assert self._table.free_rows == everyone - set(self._rows), f"free rows are {sorted(self._table.free_rows)}"
        kept = self._prefixes.check_integrity() if self._prefixes is not None else []
        self._pool.check_integrity((page for row in self._rows.values() for page in row.pages), kept)
        for number, row in self._rows.items():
            expected = self._slots_of(row.pages)[: self.shape.context]
            written = self._table.slots[number, : len(expected)]
            assert np.array_equal(written, expected), f"row {number} has slots that its pages {row.pages} do not have"
        for sequence in sequences:
            if sequence.row is not None:
                self._check_way(sequence, self._rows[sequence.row])

    def _check_way(self, sequence: Sequence, row: _Row) -> None:
        """A row that shares owns the pages of its way through the tree, under its own tokens."""
        edge, size = row.tip, self.page_size
        if not row.shares:
            return
        while edge is not None and edge.parent is not None:
            at = edge.depth - 1
            assert row.pages[at] == edge.page, f"sequence {sequence.id} has not the cache's page {edge.page} at {at}"
            tokens = tuple(sequence.tokens[at * size : edge.depth * size])
            assert tokens == edge.tokens, f"sequence {sequence.id} owns page {edge.page} of tokens {edge.tokens}"
            edge = edge.parent

    def attach(self, k_buffer: Tensor, v_buffer: Tensor) -> None:
        self._table.attach(self.shape, k_buffer, v_buffer)

    def place(self, batch: Batch) -> KVView:
        for chunk in batch.chunks:
            row = chunk.sequence.row
            assert row is not None, f"sequence {chunk.sequence.id} is not admitted"
            covered = len(self._rows[row].pages) * self.page_size
            assert chunk.end <= covered, f"sequence {chunk.sequence.id} has no slots up to {chunk.end}"
        return self._table.view(batch)


def _identity(sequence: Sequence) -> Identity:
    """What keys and values depend on besides tokens, and the tenant that must not see others' timing."""
    return (sequence.prompt.cache_salt, *sequence.prompt.cache_identity)


PART = PagedKV
