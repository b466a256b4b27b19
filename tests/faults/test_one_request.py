"""Whatever one request breaks fails that request: the others' tokens stay the same, and nothing of it is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from astrai_runtime.batch import Batch
from astrai_runtime.errors import ProviderError
from astrai_runtime.event import Delta, Failed, Finished
from astrai_runtime.kv.base import KVMode
from astrai_runtime.request import SamplingParams
from astrai_runtime.sequence import Sequence
from astrai_runtime.stream import Stream
from tests.provider.reading import GREEDY, STAGES, Rig, expected, make_kv, prompt

SOON = 20.0
SECRET = "/srv/models/secret.gguf"
BAD = "!bad" * 8  # several pages, so that there is something that must not be cached
GOOD = ["good one", "another good one" * 3, "g"]
SEEDED = SamplingParams(
    temperature=0.9,
    top_k=40,
    top_p=0.95,
    min_p=0.01,
    seed=7,
    presence_penalty=0.3,
    logit_bias=((65, 1.0),),
    extra={"typical_p": 0.98, "mirostat": 2},
)
COUNT = 12
TAB = 9  # no model of these tests says it by itself

Injection = Callable[[Rig], None]


def is_bad(sequence: Sequence) -> bool:
    return sequence.prompt.token_ids[0] == ord("!")


def bad_in(batch: Batch, at: int) -> bool:
    return any(is_bad(chunk.sequence) and chunk.sequence.n_generated >= at for chunk in batch.chunks)


def raises(error: BaseException, at: int) -> Injection:
    def inject(rig: Rig) -> None:
        def before(batch: Batch) -> None:
            if bad_in(batch, at):
                raise error

        rig.provider.before = before

    return inject


def spoils(value: float, at: int) -> Injection:
    def inject(rig: Rig) -> None:
        def after(batch: Batch, logits: torch.Tensor) -> None:
            for row, sequence in enumerate(batch.sampled):
                if is_bad(sequence) and sequence.n_generated >= at:
                    logits[row, :] = value

        rig.provider.after = after

    return inject


def returns(shape: Callable[[torch.Tensor], Any], at: int) -> Injection:
    def inject(rig: Rig) -> None:
        run = rig.provider.run

        def wrong(batch: Batch) -> Any:
            logits = run(batch)
            return shape(logits) if bad_in(batch, at) and batch.sampled else logits

        replace_run(rig, wrong)

    return inject


def replace_run(rig: Rig, run: Callable[[Batch], Any]) -> None:
    object.__setattr__(rig.engine.provider, "run", run)  # the table is frozen for everyone but a test


def breaks_text(method: str, at: int) -> Injection:
    def inject(rig: Rig) -> None:
        def before(batch: Batch) -> None:
            for chunk in batch.chunks:
                if is_bad(chunk.sequence) and chunk.sequence.n_generated >= at:
                    setattr(chunk.sequence.detokenizer, method, broken)

        rig.provider.before = before

    return inject


def broken(*_: object, **__: object) -> Any:
    raise RuntimeError(f"cannot read {SECRET}")


def breaks_tokenizer(rig: Rig) -> None:
    """It cannot spell the token that only the offender gets."""
    tokenizer = rig.engine.provider.tokenizer
    spell = tokenizer.token_bytes
    tokenizer.token_bytes = lambda token_id: broken() if token_id == TAB else spell(token_id)


ERRORS = {
    "exception": RuntimeError(f"cannot read {SECRET}"),
    "memory": MemoryError(),
    "gpu_memory": torch.OutOfMemoryError(f"tried to allocate 2 GiB {SECRET}"),
    "cpu_memory": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    "recursion": RecursionError(),
    "own_assertion": AssertionError(SECRET),
}
SHAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "no_rows": lambda logits: logits[:0],
    "one_row_more": lambda logits: torch.cat([logits, logits[:1]]),
    "flat": lambda logits: logits.flatten(),
    "no_vocabulary": lambda logits: logits[:, :0],
    "nothing": lambda logits: None,
    "text": lambda logits: "logits",
}


def run_faults() -> Iterator[Any]:
    for at, phase in ((0, "prefill"), (2, "decode")):
        for name, error in ERRORS.items():
            yield pytest.param(raises(error, at), at, id=f"run_raises_{name}_in_{phase}")
        for name, value in (("nan", float("nan")), ("inf", float("inf")), ("nothing_left", float("-inf"))):
            yield pytest.param(spoils(value, at), at, id=f"run_returns_{name}_in_{phase}")
        for name, shape in SHAPES.items():
            yield pytest.param(returns(shape, at), at, id=f"run_returns_{name}_in_{phase}")
        yield pytest.param(breaks_text("push", at), at, id=f"detokenizer_raises_in_{phase}")


def fates(rig: Rig, inject: Injection, sampling: SamplingParams = GREEDY, **fields: Any) -> tuple[list[Any], list[Stream]]:
    """Submits everybody while the first step is held, and breaks something. The offender's events; the others."""

    entered, opened = threading.Event(), threading.Event()

    def hold(batch: Batch) -> None:
        entered.set()
        assert opened.wait(SOON)

    rig.provider.before = hold
    good = [rig.engine.submit(prompt(text, COUNT)) for text in GOOD]
    good.append(rig.engine.submit(prompt("seeded", COUNT, SEEDED)))
    assert entered.wait(SOON)
    bad = rig.engine.submit(prompt(BAD, COUNT, sampling, **fields))
    rig.provider.before = lambda batch: None
    inject(rig)
    opened.set()
    return list(bad.events(SOON)), good


def text_of(stream: Stream) -> str:
    return "".join(event.text for event in stream.events(SOON) if isinstance(event, Delta))


@pytest.fixture(scope="module")
def seeded_alone() -> str:
    with Rig() as rig:
        return text_of(rig.engine.submit(prompt("seeded", COUNT, SEEDED)))


def check_others(rig: Rig, good: list[Stream], seeded_alone: str) -> None:
    assert [text_of(stream) for stream in good[:-1]] == [expected(list(text.encode()), COUNT) for text in GOOD]
    assert text_of(good[-1]) == seeded_alone
    assert rig.engine.ready


def check_failed(rig: Rig, events: list[Any]) -> None:
    *_, outcome = events
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, ProviderError)
    assert SECRET not in str(outcome.error)
    assert "Traceback" not in str(outcome.error)
    assert outcome.error.__traceback__ is outcome.error.__cause__ is None
    assert rig.engine.counters().failed == rig.engine.counters().faults == 1


def check_nothing_cached(rig: Rig) -> None:
    """The offender's prompt again, now that nothing is broken: it finds nothing, and its answer is right."""
    rig.provider.before, rig.provider.after = lambda batch: None, lambda batch, logits: None
    replace_run(rig, rig.provider.run)
    *deltas, outcome = rig.engine.submit(prompt(BAD, COUNT)).events(SOON)
    assert outcome.usage.cached_tokens == 0
    assert "".join(event.text for event in deltas) == expected(list(BAD.encode()), COUNT)


@pytest.mark.parametrize(("inject", "at"), list(run_faults()))
def test_fault_of_the_provider_or_the_text_fails_one_request(inject: Injection, at: int, seeded_alone: str) -> None:
    with Rig() as rig:
        events, good = fates(rig, inject)
        check_failed(rig, events)
        shown = "".join(event.text for event in events[:-1])
        assert shown == expected(list(BAD.encode()), at)
        check_others(rig, good, seeded_alone)
        check_nothing_cached(rig)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("method", ["apply", "chosen"])
def test_fault_of_a_sampling_stage_fails_one_request(stage: str, method: str, seeded_alone: str) -> None:
    def inject(rig: Rig) -> None:
        (found,) = [one for one in rig.engine.sampler.stages if type(one).__module__.endswith(f".{stage}")]
        before = getattr(found, method)

        def faulty(logits: torch.Tensor, rows: Any, *rest: Any) -> None:
            here = [rows] if isinstance(rows, Sequence) else rows
            if any(is_bad(row) and row.n_generated >= 2 for row in here):
                broken()
            before(logits, rows, *rest)

        setattr(found, method, faulty)
        if method == "chosen":
            found.remembers = True

    with Rig() as rig:
        events, good = fates(rig, inject, SamplingParams(**{**vars_of(SEEDED), "seed": 9}))
        check_failed(rig, events)
        check_others(rig, good, seeded_alone)
        check_nothing_cached(rig)


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


def test_fault_of_the_tokenizer_fails_one_request(seeded_alone: str) -> None:
    forced = SamplingParams(temperature=0.0, logit_bias=((TAB, 100.0),))
    with Rig() as rig:
        events, good = fates(rig, breaks_tokenizer, forced)
        check_failed(rig, events)
        check_others(rig, good, seeded_alone)


def test_fault_of_the_held_back_text_fails_one_request(seeded_alone: str) -> None:
    with Rig() as rig:
        events, good = fates(rig, breaks_text("finish", 0))
        check_failed(rig, events)
        check_others(rig, good, seeded_alone)


KV_OPERATIONS = ["reserve", "reuse", "next_page", "extend", "record", "place"]


def break_kv(kv: KVMode, name: str, moment: str, *, once: bool) -> None:
    """From now on an operation raises for the offender, before or after it did its work."""
    work = getattr(kv, name)
    done: list[bool] = []

    def faulty(subject: Any, *args: Any, **options: Any) -> Any:
        concerned = bad_in(subject, 0) if isinstance(subject, Batch) else is_bad(subject)
        result = None if concerned and moment == "before" else work(subject, *args, **options)
        if concerned and not (once and done):
            done.append(True)
            broken()
        return work(subject, *args, **options) if concerned and moment == "before" else result

    setattr(kv, name, faulty)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("name", KV_OPERATIONS)
def test_fault_of_a_kv_operation_fails_one_request(name: str, moment: str, seeded_alone: str) -> None:
    with Rig() as rig:
        events, good = fates(rig, lambda rig: break_kv(rig.kv, name, moment, once=False))
        check_failed(rig, events)
        check_others(rig, good, seeded_alone)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("pool", [96, 2048])
def test_fault_while_memory_is_taken_back_changes_no_answer(pool: int, moment: str, seeded_alone: str) -> None:
    """Nobody can say what is still held: the pool is emptied, and everybody is computed again."""
    with Rig(make_kv(n_tokens=pool)) as rig:
        events, good = fates(rig, lambda rig: break_kv(rig.kv, "release", moment, once=False))
        assert isinstance(events[-1], Finished | Failed)
        if pool == 2048:
            assert "".join(event.text for event in events[:-1]) == expected(list(BAD.encode()), COUNT)
        check_others(rig, good, seeded_alone)


def test_pool_that_no_longer_adds_up_after_a_fault_is_emptied_and_no_answer_changes(seeded_alone: str) -> None:
    def inject(rig: Rig) -> None:
        extend = rig.kv.extend

        def leaks(sequence: Sequence, length: int) -> bool:
            if is_bad(sequence):
                rig.kv._pool.acquire(3)  # lost for ever
                broken()
            return extend(sequence, length)

        rig.kv.extend = leaks

    with Rig() as rig:
        events, good = fates(rig, inject)
        check_failed(rig, events)
        check_others(rig, good, seeded_alone)
        assert rig.engine.counters().preemptions >= 1


def test_fault_of_the_pools_figures_hurts_nobody(seeded_alone: str) -> None:
    with Rig() as rig:
        events, good = fates(rig, lambda rig: setattr(rig.kv, "stats", broken))
        assert "".join(event.text for event in events[:-1]) == expected(list(BAD.encode()), COUNT)
        check_others(rig, good, seeded_alone)
        del rig.kv.stats


def test_fault_of_a_reader_hurts_nobody_else(seeded_alone: str) -> None:
    with Rig() as rig:
        deaf = rig.engine.submit(prompt("deaf", 200))
        deaf.reader(broken)
        _, good = fates(rig, lambda rig: None)
        check_others(rig, good, seeded_alone)
        assert deaf.cancelled


def test_provider_that_cannot_be_closed_lets_the_engine_end() -> None:
    with Rig() as rig:
        object.__setattr__(rig.engine.provider, "close", broken)
        text_of(rig.engine.submit(prompt("abc", 3)))


@pytest.mark.parametrize("error", ["memory", "gpu_memory", "cpu_memory"])
def test_prompt_too_large_for_the_memory_that_is_left_enters_in_smaller_pieces(error: str, seeded_alone: str) -> None:
    def inject(rig: Rig) -> None:
        def before(batch: Batch) -> None:
            if batch.n_tokens > 5:
                raise ERRORS[error]

        rig.provider.before = before

    with Rig() as rig:
        events, good = fates(rig, inject)
        assert "".join(event.text for event in events[:-1]) == expected(list(BAD.encode()), COUNT)
        check_others(rig, good, seeded_alone)
        assert rig.engine.counters().step_faults > 0
        assert rig.engine.counters().faults == 0
