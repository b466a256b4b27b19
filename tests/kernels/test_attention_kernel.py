"""Attention over the paged pool: right against float64, and the same bits whatever shares the step, pages or threads.

Whatever was not written is NaN, and table entries that a step must not look at point outside memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from astrai_runtime.kernels.base import Format, Isa
from astrai_runtime.kernels.cpu import KV, Layer, Library, Pool, Step

Floats = npt.NDArray[np.float32]
FORMATS: tuple[Format, ...] = ("float32", "bfloat16")
OUTSIDE = 2**30  # a slot that no pool has
LANES = 16


@dataclass(frozen=True)
class Shape:
    n_heads: int
    n_kv_heads: int
    head_dim: int
    window: int = 0


@dataclass(frozen=True)
class Text:
    """One sequence: keys, values and queries of all its positions, and how many tokens the step brings."""

    q: Floats
    k: Floats
    v: Floats
    fresh: int

    @property
    def first(self) -> int:
        return len(self.q) - self.fresh


def texts(shape: Shape, *lengths: tuple[int, int], seed: int = 0) -> list[Text]:
    """(context, fresh tokens among it) of each sequence. A text's numbers do not depend on the other texts."""

    def numbers(i: int, n: int, heads: int) -> Floats:
        return np.random.default_rng((seed, i, heads)).standard_normal((n, heads, shape.head_dim)).astype(np.float32)

    heads, kv = shape.n_heads, shape.n_kv_heads
    return [
        Text(numbers(i, n, heads), numbers(i + 100, n, kv), numbers(i + 200, n, kv), m) for i, (n, m) in enumerate(lengths)
    ]


def bfloat16(x: Floats) -> npt.NDArray[np.uint16]:
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def kept(x: Floats, format: Format) -> npt.NDArray[np.float64]:
    """What a pool of that format keeps of x."""
    if format == "float32":
        return x.astype(np.float64)
    return (bfloat16(x).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


class Memory:
    """A pool of blocks as astrai_cpu.h lays them out, full of NaN."""

    def __init__(self, library: Library, shape: Shape, format: Format, n_slots: int, n_layers: int) -> None:
        blocks, kv, dim = -(-n_slots // LANES), shape.n_kv_heads, shape.head_dim
        number: type = np.float32 if format == "float32" else np.uint16
        size = blocks * kv * dim * LANES
        self.format, self.layer_bytes = format, size * np.dtype(number).itemsize
        k_form, v_form = ((dim, 16), (16, dim)) if format == "float32" else ((dim // 2, 16, 2), (8, dim, 2))
        self.k = library.allocate(n_layers * self.layer_bytes).view(number).reshape(n_layers, blocks, kv, *k_form)
        self.v = library.allocate(n_layers * self.layer_bytes).view(number).reshape(n_layers, blocks, kv, *v_form)
        for memory in (self.k, self.v):
            memory[...] = np.nan if format == "float32" else 0x7FC0

    def put(self, slots: npt.NDArray[np.int32], k: Floats, v: Floats, layer: int) -> None:
        """Writes [n, K, D] without the kernel."""
        block, lane = slots // LANES, slots % LANES
        if self.format == "float32":
            self.k[layer, block, :, :, lane] = k
            self.v[layer, block, :, lane, :] = v
        else:
            self.k[layer, block, :, :, lane, :] = bfloat16(k).reshape(*k.shape[:2], k.shape[2] // 2, 2)
            self.v[layer, block, :, lane // 2, :, lane % 2] = bfloat16(v)


Places = Callable[[int, int], npt.NDArray[np.int32]]  # (number of texts, longest context) -> slots [texts, context]


def scattered(page: int, seed: int = 0) -> Places:
    """Pages of so many slots in random order."""

    def places(n: int, longest: int) -> npt.NDArray[np.int32]:
        each = -(-longest // page)
        pages = np.random.default_rng(seed).permutation(n * each).reshape(n, each, 1)
        return (pages * page + np.arange(page)).reshape(n, -1)[:, :longest].astype(np.int32)

    return places


def contiguous(context: int) -> Places:
    """Each text in a row of its own of so many slots."""
    return lambda n, longest: (np.arange(n)[:, None] * context + np.arange(longest)).astype(np.int32)


class Attending:
    """Texts in a pool, and the steps that are taken over them."""

    def __init__(
        self,
        library: Library,
        isa: Isa,
        pool: Pool,
        shape: Shape,
        format: Format,
        of: Sequence[Text],
        places: Places,
        layer: int = 0,
    ) -> None:
        self.library, self.isa, self.pool, self.shape, self.of, self.layer = library, isa, pool, shape, of, layer
        longest = max(len(text.q) for text in of)
        self.slots = places(len(of), longest)
        self.memory = Memory(library, shape, format, int(self.slots.max()) + 1, layer + 2)  # the last is nobody's
        for text, slots in zip(of, self.slots, strict=True):
            seen = max(0, text.first - shape.window + 1) if shape.window else 0  # older ones may be gone
            self.memory.put(slots[seen : text.first], text.k[seen : text.first], text.v[seen : text.first], layer)
        self.table = np.full((len(of) + 1, longest), OUTSIDE, np.int32)

    def step(self, *pieces: tuple[int, int, int]) -> list[Floats]:
        """(text, first position, tokens) of each sequence of the step: [tokens, H, D] of each."""
        shape, longest = self.shape, self.table.shape[1]
        self.table[...] = OUTSIDE
        rows = np.array([len(self.of) - i for i, _, _ in pieces], np.int32)
        for row, (i, first, n) in zip(rows, pieces, strict=True):
            self.table[row, : first + n] = self.slots[i, : first + n]
            if shape.window:
                self.table[row, : max(0, first - shape.window + 1)] = OUTSIDE
        positions = np.concatenate([np.arange(first, first + n) for _, first, n in pieces]).astype(np.int32)
        starts = np.cumsum([0, *(n for _, _, n in pieces)]).astype(np.int32)
        q, k, v = (
            np.concatenate([getattr(self.of[i], name)[first : first + n] for i, first, n in pieces])
            for name in ("q", "k", "v")
        )
        kv = KV(
            k=self.memory.k.ctypes.data,
            v=self.memory.v.ctypes.data,
            layer_stride=self.memory.layer_bytes,
            table=self.table.ctypes.data,
            table_stride=longest,
        )
        step = Step(
            n_tokens=len(positions),
            n_sequences=len(pieces),
            positions=positions.ctypes.data,
            starts=starts.ctypes.data,
            rows=rows.ctypes.data,
            kv=kv,
        )
        layer = Layer(
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            head_dim=shape.head_dim,
            window=shape.window,
            scale=shape.head_dim**-0.5,
        )
        out = self.library.attention(self.isa, self.pool, layer, self.memory.format, self.layer, step, q, k, v)
        return np.split(out, starts[1:-1])

    def all_at_once(self) -> list[Floats]:
        return self.step(*((i, text.first, text.fresh) for i, text in enumerate(self.of)))


def expected(text: Text, shape: Shape, format: Format) -> npt.NDArray[np.float64]:
    """The fresh tokens' results in float64, from what the pool keeps."""
    group = shape.n_heads // shape.n_kv_heads
    k, v = (np.repeat(kept(x, format), group, axis=1) for x in (text.k, text.v))
    scores = np.einsum("thd,shd->hts", text.q[text.first :].astype(np.float64), k) * shape.head_dim**-0.5
    position, seen = np.arange(text.first, len(text.q))[:, None], np.arange(len(text.q))[None]
    hidden = (seen > position) | ((seen <= position - shape.window) if shape.window else False)
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)


def check(found: Floats, text: Text, shape: Shape, format: Format) -> None:
    wanted = expected(text, shape, format)
    relative = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert relative < (2e-6 if format == "float32" else 4e-3)
    assert np.abs(found - wanted).max() < (1e-5 if format == "float32" else 3e-2)


MIXED = ((300, 1), (17, 17), (131, 40), (1, 1), (128, 2), (129, 1))  # decoding, a whole prompt, chunks, borders of 128


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "head_dim"),
    [(14, 2, 64), (4, 1, 256), (9, 3, 64), (3, 3, 80), (8, 1, 96), (12, 2, 128), (5, 1, 16), (2, 2, 48), (70, 1, 32)],
)
def test_results_are_those_of_float64(
    library: Library, isa: Isa, pool: Pool, format: Format, n_heads: int, n_kv_heads: int, head_dim: int
) -> None:
    for window in (0, 37):
        shape = Shape(n_heads, n_kv_heads, head_dim, window)
        of = texts(shape, *MIXED)
        for found, text in zip(
            Attending(library, isa, pool, shape, format, of, scattered(16)).all_at_once(), of, strict=True
        ):
            check(found, text, shape, format)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("window", [0, 1, 2, 16, 33, 127, 128, 129, 512])
def test_window_ends_where_it_should(library: Library, isa: Isa, pool: Pool, format: Format, window: int) -> None:
    shape = Shape(4, 2, 32, window)
    of = texts(shape, *MIXED, (200, 30))
    for found, text in zip(Attending(library, isa, pool, shape, format, of, scattered(4)).all_at_once(), of, strict=True):
        check(found, text, shape, format)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("window", [0, 50])
def test_pages_change_no_bit(library: Library, isa: Isa, pool: Pool, format: Format, window: int) -> None:
    shape = Shape(14, 2, 64, window)
    of = texts(shape, *MIXED)
    wanted = Attending(library, isa, pool, shape, format, of, scattered(16)).all_at_once()
    for places in (
        scattered(1),
        scattered(2),
        scattered(4),
        scattered(32),
        contiguous(320),
        contiguous(301),
        contiguous(307),
    ):
        for found, one in zip(Attending(library, isa, pool, shape, format, of, places).all_at_once(), wanted, strict=True):
            np.testing.assert_array_equal(found.view(np.uint32), one.view(np.uint32))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [Shape(14, 2, 64), Shape(4, 1, 256, 60), Shape(3, 3, 48, 7)], ids=str)
def test_neighbours_change_no_bit(library: Library, isa: Isa, pool: Pool, format: Format, shape: Shape) -> None:
    of = texts(shape, *MIXED)
    together = Attending(library, isa, pool, shape, format, of, scattered(4)).all_at_once()
    alone = Attending(library, isa, pool, shape, format, of, scattered(4))
    for i, (text, wanted) in enumerate(zip(of, together, strict=True)):
        (found,) = alone.step((i, text.first, text.fresh))
        np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [Shape(14, 2, 64), Shape(4, 1, 128, 60)], ids=str)
@pytest.mark.parametrize("sizes", [(1,), (7, 1, 30), (128,), (100, 1)], ids=str)
def test_chunks_of_a_prompt_change_no_bit(
    library: Library, isa: Isa, pool: Pool, format: Format, shape: Shape, sizes: tuple[int, ...]
) -> None:
    of = texts(shape, (150, 150))
    (whole,) = Attending(library, isa, pool, shape, format, of, scattered(16)).all_at_once()
    in_chunks, parts, first = Attending(library, isa, pool, shape, format, of, scattered(16)), [], 0
    while first < 150:
        n = min(sizes[len(parts) % len(sizes)], 150 - first)
        parts += in_chunks.step((0, first, n))
        first += n
    np.testing.assert_array_equal(np.concatenate(parts).view(np.uint32), whole.view(np.uint32))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("lengths", [((900, 1),), ((700, 3), (20, 1)), MIXED], ids=["one", "two", "six"])
@pytest.mark.parametrize("window", [0, 300])
def test_threads_change_no_bit(
    library: Library, isa: Isa, format: Format, lengths: tuple[tuple[int, int], ...], window: int
) -> None:
    shape = Shape(7, 1, 64, window)
    of = texts(shape, *lengths)
    results = []
    for n in (1, 2, 3, 4):
        with library.pool_open(n, 0) as pool:
            results.append(np.concatenate(Attending(library, isa, pool, shape, format, of, scattered(16)).all_at_once()))
    for found in results[1:]:
        np.testing.assert_array_equal(found.view(np.uint32), results[0].view(np.uint32))
    check(results[0][: of[0].fresh], of[0], shape, format)


@pytest.mark.parametrize("format", FORMATS)
def test_storing_touches_its_own_lanes_only(library: Library, isa: Isa, pool: Pool, format: Format) -> None:
    shape = Shape(4, 2, 48)
    of = texts(shape, (45, 7), (3, 3), (20, 1))
    stored = Attending(library, isa, pool, shape, format, of, scattered(2))
    by_hand = Attending(library, isa, pool, shape, format, of, scattered(2))
    stored.all_at_once()
    for text, slots in zip(of, by_hand.slots, strict=True):
        by_hand.memory.put(slots[text.first : len(text.q)], text.k[text.first :], text.v[text.first :], 0)
    np.testing.assert_array_equal(stored.memory.k.view(np.uint16), by_hand.memory.k.view(np.uint16))
    np.testing.assert_array_equal(stored.memory.v.view(np.uint16), by_hand.memory.v.view(np.uint16))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_fault_of_a_sequence_shows_and_stays_its_own(
    library: Library, isa: Isa, pool: Pool, format: Format, part: str
) -> None:
    shape = Shape(4, 2, 64)
    of = texts(shape, (20, 1), (150, 9), (33, 1))
    good = Attending(library, isa, pool, shape, format, of, scattered(1)).all_at_once()
    getattr(of[1], part)[145] = np.nan
    found = Attending(library, isa, pool, shape, format, of, scattered(1)).all_at_once()
    np.testing.assert_array_equal(found[0], good[0])
    np.testing.assert_array_equal(found[2], good[2])
    np.testing.assert_array_equal(found[1][:3], good[1][:3])  # positions 141 to 143 come before it; 144 may share its pair
    assert np.isnan(found[1][4]).all()
    assert np.isnan(found[1][5:]).all() == (part != "q")


@pytest.mark.parametrize("format", FORMATS)
def test_large_scores_are_weighed_without_overflow(library: Library, isa: Isa, pool: Pool, format: Format) -> None:
    shape = Shape(2, 1, 64)
    (text,) = texts(shape, (400, 5))
    text.q[...] *= 1000
    check(Attending(library, isa, pool, shape, format, [text], scattered(16)).all_at_once()[0], text, shape, "bfloat16")


@pytest.mark.parametrize("format", FORMATS)
def test_layers_do_not_mix(library: Library, isa: Isa, pool: Pool, format: Format) -> None:
    shape = Shape(2, 1, 32)
    of = texts(shape, (40, 10))
    first = Attending(library, isa, pool, shape, format, of, scattered(16))
    third = Attending(library, isa, pool, shape, format, of, scattered(16), layer=2)
    (wanted,), (found,) = first.all_at_once(), third.all_at_once()
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(third.memory.k[2].view(np.uint16), first.memory.k[0].view(np.uint16))
    assert np.isnan(kept_everywhere(third.memory, (0, 1, 3))).all()


@pytest.mark.parametrize("shape", [Shape(2, 1, 24), Shape(2, 1, 272), Shape(5, 2, 64)], ids=str)
def test_shapes_without_a_kernel_are_refused(
    library: Library, isa: Isa, pool: Pool, refused: type[Exception], shape: Shape
) -> None:
    with pytest.raises(refused, match="multiples of 16 up to 256"):
        Attending(library, isa, pool, shape, "float32", texts(shape, (3, 3)), scattered(16)).all_at_once()


def kept_everywhere(memory: Memory, layers: Sequence[int]) -> npt.NDArray[np.float64]:
    """Every number of some layers."""
    both = np.concatenate([memory.k[list(layers)].ravel(), memory.v[list(layers)].ravel()])
    return both if memory.format == "float32" else (both.astype(np.uint32) << 16).view(np.float32)
