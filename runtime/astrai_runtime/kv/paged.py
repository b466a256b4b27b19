"""A shared pool of pages, handed out as sequences grow (PagedAttention, arXiv:2309.06180)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import PositiveInt, StrictBool, field_validator, model_validator

from astrai_runtime.batch import Batch, KVView
from astrai_runtime.kv._pages import PagePool
from astrai_runtime.kv._table import SlotTable
from astrai_runtime.kv.base import KVConfig, KVMode, KVShape, KVStats
from astrai_runtime.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor


class PagedConfig(KVConfig):
    kind: Literal["paged"]
    page_size: PositiveInt  # tokens a page, a power of two
    n_tokens: PositiveInt | Literal["auto"]  # tokens in the pool, a whole number of pages; auto: the plan decides
    prefix_cache: StrictBool | Literal["auto"]  # share the pages of equal prompt beginnings

    @field_validator("page_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            lower = 1 << (value.bit_length() - 1)
            raise ValueError(f"page_size must be a power of two, not {value}; {lower} or {2 * lower} would work")
        return value

    @field_validator("prefix_cache")
    @classmethod
    def _no_sharing_yet(cls, value: bool | Literal["auto"]) -> bool | Literal["auto"]:
        if value is True:
            raise ValueError("this version cannot share prefixes yet; use prefix_cache: auto or prefix_cache: false")
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


class PagedKV(KVMode):
    """Sequences own whole pages and get them on demand, so that short ones leave their room to others."""

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
        declared = config.prefix_cache is False
        return False, "switched off in the configuration" if declared else "this version cannot share prefixes yet"

    def __init__(self, config: KVConfig, shape: KVShape) -> None:
        super().__init__(config, shape)
        assert isinstance(config, PagedConfig)
        self.page_size = config.page_size
        assert shape.n_tokens % self.page_size == 0, f"{shape.n_tokens} is no whole number of pages"
        self._pool = PagePool(shape.n_tokens // self.page_size)
        self._table = SlotTable(shape.max_batch_size, shape.context)
        self._pages: dict[int, list[int]] = {}  # row -> its pages, in order of position
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
        sequence.row, sequence.n_computed, sequence.n_cached = row, 0, 0
        self._pages[row] = []
        return True

    def extend(self, sequence: Sequence, length: int) -> bool:
        assert sequence.row is not None, f"sequence {sequence.id} is not admitted"
        assert length <= self.shape.context, f"{length} tokens pass the context of {self.shape.context}"
        owned = self._pages[sequence.row]
        missing = self._pages_for(length) - len(owned)
        if missing <= 0:
            return True
        pages = self._pool.acquire(missing)
        if pages is None:
            return False
        self._table.write(sequence.row, len(owned) * self.page_size, self._slots_of(pages))
        owned.extend(pages)
        return True

    def _slots_of(self, pages: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return (np.asarray(pages, dtype=np.int32)[:, None] * np.int32(self.page_size) + self._in_page).ravel()

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        if sequence.row is None:
            return
        self._pool.release(self._pages.pop(sequence.row))
        self._table.give_row(sequence.row)
        sequence.row, sequence.n_computed = None, 0

    def reset(self) -> None:
        self._table.reset()
        self._pool.reset()
        self._pages.clear()

    def stats(self) -> KVStats:
        free = self._pool.n_free * self.page_size
        return KVStats(free=free, held=self.shape.n_tokens - free, cached=0, total=self.shape.n_tokens)

    def check_integrity(self, admitted: Iterable[Sequence]) -> None:
        rows = [sequence.row for sequence in admitted]
        assert len(set(rows)) == len(rows), f"a row is owned twice: {rows}"
        assert set(rows) == set(self._pages), f"rows {sorted(self._pages)} are held, but {rows} are admitted"
        everyone = set(range(self.shape.max_batch_size))
        assert self._table.free_rows == everyone - set(self._pages), f"free rows are {sorted(self._table.free_rows)}"
        self._pool.check_integrity(page for pages in self._pages.values() for page in pages)
        for row, pages in self._pages.items():
            expected = self._slots_of(pages)[: self.shape.context]
            written = self._table.slots[row, : len(expected)]
            assert np.array_equal(written, expected), f"row {row} points at slots that its pages {pages} do not have"

    def attach(self, k_buffer: Tensor, v_buffer: Tensor) -> None:
        self._table.attach(self.shape, k_buffer, v_buffer)

    def place(self, batch: Batch) -> KVView:
        for chunk in batch.chunks:
            row = chunk.sequence.row
            assert row is not None, f"sequence {chunk.sequence.id} is not admitted"
            covered = len(self._pages[row]) * self.page_size
            assert chunk.end <= covered, f"sequence {chunk.sequence.id} has no slots up to {chunk.end}"
        return self._table.view(batch)


PART = PagedKV
