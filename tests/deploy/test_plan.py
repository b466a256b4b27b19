"""Every `auto` is decided from headers and machine alone, in bytes; what does not fit says what would."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from astrai_deploy._fit import changed
from astrai_deploy._memory import TOKEN_RECORD, USABLE, record_bytes, size
from astrai_deploy._problem import ConfigError
from astrai_deploy.plan import Misfit, plan_deployment
from astrai_deploy.schema import Deployment
from astrai_runtime.attention._config import AttentionConfig
from astrai_runtime.errors import BackendRefused, UnknownPart
from astrai_runtime.machine import Machine
from tests.deploy.planning import (
    CONTIGUOUS,
    GIB,
    H100,
    LAPTOP,
    LAYER,
    MIB,
    OVERHEAD,
    PAGED,
    SERVER,
    SPEC,
    T4,
    deployment,
    headers,
    reasons,
    with_memory,
)


def test_every_byte_of_a_contiguous_deployment_is_accounted_for() -> None:
    plan = plan_deployment(deployment(CONTIGUOUS), LAPTOP, headers())

    assert plan.fits
    assert plan.memory.weights == 107_072 * 4
    assert plan.kv_shape.bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert plan.kv_tokens == 4 * 2048
    assert plan.memory.kv == 4 * 2048 * 512
    assert plan.memory.tables == 4 * 2048 * 4
    attention = 512 * (4 * 64 + 4 * 32) * 4 + 2 * 2048 * 64 * 4 + 512 * 2048 * 5
    assert plan.memory.activations == attention + 512 * 64 * 12
    assert plan.memory.overhead == OVERHEAD
    assert plan.memory.tokenizer == 258 * TOKEN_RECORD
    assert plan.memory.serving == OVERHEAD + 258 * TOKEN_RECORD + 428_288 + 4_194_304 + 32_768 + plan.memory.activations
    assert plan.memory.usable == math.floor(16 * GIB * 0.9)
    assert plan.full_contexts == 4


def test_a_tied_head_is_counted_once() -> None:
    tied = plan_deployment(deployment(CONTIGUOUS), LAPTOP, headers(replace(SPEC, tied_head=True)))

    assert tied.memory.weights == (107_072 - 258 * 64) * 4


def test_a_large_vocabulary_makes_logits_the_largest_activation() -> None:
    spec = replace(SPEC, vocab_size=1_000_000)
    plan = plan_deployment(deployment(CONTIGUOUS), LAPTOP, headers(spec))

    assert plan.memory.activations == 4 * 1_000_000 * 16 + 512 * 64 * 4


def test_a_sliding_window_bounds_what_attention_gathers() -> None:
    windowed = replace(SPEC, layers=(replace(LAYER, window=128),) * 2)
    full = plan_deployment(deployment(CONTIGUOUS), LAPTOP, headers())
    plan = plan_deployment(deployment(CONTIGUOUS), LAPTOP, headers(windowed))

    assert full.memory.activations - plan.memory.activations == (2048 - 640) * (2 * 64 * 4 + 512 * 5)


@pytest.mark.parametrize(
    ("machine", "stored", "dtype", "because"),
    [
        (LAPTOP, "F32", "float32", "F32"),
        (LAPTOP, "BF16", "float32", "no native bfloat16"),
        (LAPTOP, "Q4_K", "float32", "no native bfloat16"),
        (SERVER, "BF16", "bfloat16", "avx512_bf16"),
        (SERVER, "Q4_K", "bfloat16", "avx512_bf16"),
        (SERVER, "F32", "float32", "F32"),
        (SERVER, "F16", "float32", "F16"),
        (H100, "F32", "bfloat16", "computes in it"),
        (T4, "BF16", "float16", "8.0"),
    ],
)
def test_l13_precision_follows_files_and_machine(machine: Machine, stored: str, dtype: str, because: str) -> None:
    plan = plan_deployment(deployment(CONTIGUOUS), machine, headers(stored=stored))

    assert plan.dtype == plan.kv_shape.dtype == dtype
    assert because in reasons(plan)["model.dtype"][1]


def test_declared_precisions_are_kept() -> None:
    declared = deployment(CONTIGUOUS | {"dtype": "float16"}, model={"dtype": "float32"})
    plan = plan_deployment(declared, SERVER, headers(stored="BF16"))

    assert (plan.dtype, plan.kv_shape.dtype) == ("float32", "float16")
    assert plan.memory.kv == plan.kv_tokens * 256
    assert reasons(plan)["kv.dtype"] == ("float16", "declared")


def test_an_automatic_context_shrinks_until_the_pool_fits_and_says_so() -> None:
    roomy = plan_deployment(deployment(CONTIGUOUS), LAPTOP, headers())
    tight = with_memory((roomy.memory.serving - 2 * MIB) / USABLE)
    plan = plan_deployment(deployment(CONTIGUOUS), tight, headers())

    assert plan.fits
    assert 256 < plan.context < 2048
    assert plan.kv_tokens == 4 * plan.context
    assert "as much as the KV pool can hold" in reasons(plan)["model.context"][1]
    assert "2048" in reasons(plan)["model.context"][1]
    one_more = deployment(CONTIGUOUS, model={"context": plan.context + 1})
    assert not plan_deployment(one_more, tight, headers()).fits


def test_an_automatic_pool_takes_what_memory_leaves_in_whole_pages() -> None:
    fixed = plan_deployment(deployment(PAGED), LAPTOP, headers())
    assert fixed.kv_tokens == 4 * 2048
    assert "scheduler.max_batch_size 4" in reasons(fixed)["kv.n_tokens"][1]

    tight = with_memory((fixed.memory.serving - 2 * MIB) / USABLE)
    plan = plan_deployment(deployment(PAGED), tight, headers())
    assert plan.fits
    assert plan.context == 2048
    assert plan.kv_tokens % 16 == 0
    assert plan.full_contexts == plan.kv_tokens // 2048 < 4
    assert plan.memory.usable - plan.memory.serving < 16 * 512 + record_bytes(16, shared=True)
    assert "memory leaves" in reasons(plan)["kv.n_tokens"][1]


@pytest.mark.parametrize(("wish", "value", "why"), [("auto", "on", "whole pages"), (False, "off", "switched off")])
def test_prefix_cache_is_decided_told_and_counted(wish: bool | str, value: str, why: str) -> None:
    plan = plan_deployment(deployment(PAGED | {"prefix_cache": wish}), LAPTOP, headers())

    assert reasons(plan)["kv.prefix_cache"][0] == value
    assert why in reasons(plan)["kv.prefix_cache"][1]
    assert plan.memory.tables == 4 * 2048 * 4 + 512 * record_bytes(16, shared=value == "on")


def test_a_declared_pool_bounds_an_automatic_context() -> None:
    plan = plan_deployment(deployment(PAGED | {"n_tokens": 640}), LAPTOP, headers())

    assert (plan.kv_tokens, plan.context, plan.full_contexts) == (640, 640, 1)
    assert "kv.n_tokens" in reasons(plan)["model.context"][1]


@pytest.mark.parametrize(
    ("kv", "model", "words"),
    [
        (CONTIGUOUS, {"context": 4096}, "is 4096, but this model holds 2048 tokens"),
        (PAGED | {"n_tokens": 640}, {"context": 1024}, "kv.n_tokens=640"),
    ],
)
def test_a_context_that_cannot_be_honoured_is_an_error(kv: dict[str, Any], model: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        plan_deployment(deployment(kv, model=model), LAPTOP, headers())

    assert raised.value.problems[0].key == ("model", "context")


TOO_LARGE: list[tuple[Callable[[], Deployment], float, str, list[str]]] = [
    (lambda: deployment(PAGED | {"n_tokens": 2**31}), 16 * GIB, "kv.n_tokens", ["kv.n_tokens"]),
    (
        lambda: deployment(CONTIGUOUS, model={"context": 2048}, max_batch_size=400),
        OVERHEAD + 200 * MIB,
        "model.context",
        ["model.context", "scheduler.max_batch_size"],
    ),
    (
        lambda: deployment(CONTIGUOUS, max_batch_size=4000, max_batch_tokens=4000),
        OVERHEAD + 200 * MIB,
        "scheduler.max_batch_size",
        [],
    ),
    (lambda: deployment(PAGED, model={"context": 2048}), OVERHEAD + 8 * MIB, "model.context", []),
    (lambda: deployment(CONTIGUOUS, max_batch_tokens=65536), OVERHEAD + 100 * MIB, "scheduler.max_batch_tokens", []),
]


@pytest.mark.parametrize(("make", "usable", "key", "others"), TOO_LARGE)
def test_the_suggested_value_fits_and_the_next_one_does_not(
    make: Callable[[], Deployment], usable: float, key: str, others: list[str]
) -> None:
    machine = with_memory(usable / USABLE)
    declared = make()
    plan = plan_deployment(declared, machine, headers())

    assert not plan.fits
    assert plan.problem is not None
    assert plan.problem.key == key
    assert plan.problem.needed > plan.problem.usable
    assert {change.key for fix in plan.problem.fixes for change in fix} >= set(others)
    for (change,) in plan.problem.fixes:
        value = change.value
        assert plan_deployment(changed(declared, change.key, value), machine, headers()).fits, str(change)
        if isinstance(value, int):
            step = 16 if change.key == "kv.n_tokens" else 1
            assert not plan_deployment(changed(declared, change.key, value + step), machine, headers()).fits, str(change)


def test_a_key_that_a_person_set_is_blamed_first_with_its_place() -> None:
    declared = deployment(CONTIGUOUS, model={"context": 2048}, max_batch_size=400)
    machine = with_memory((OVERHEAD + 200 * MIB) / USABLE)
    said = {"scheduler.max_batch_size": "recipes/mine.yaml:4:3", "model.context": "conf/model/m.yaml:1:1"}
    plan = plan_deployment(declared, machine, headers(), chosen={"scheduler.max_batch_size"}, places=said)

    assert plan.problem is not None
    assert plan.problem.key == "scheduler.max_batch_size"
    assert "or less instead of 400 (recipes/mine.yaml:4:3)" in str(plan.problem)
    assert "or less instead of 2048 (conf/model/m.yaml:1:1)" in str(plan.problem)


def test_weights_that_are_too_large_need_a_smaller_type_or_another_machine() -> None:
    big = replace(SPEC, hidden_size=100_000, tied_head=True)  # 141 M parameters: 565 MB, or 283 MB
    declared = deployment(CONTIGUOUS, model={"dtype": "float32"}, max_batch_size=1, max_batch_tokens=16)
    machine = with_memory((OVERHEAD + 340 * MIB) / USABLE)
    plan = plan_deployment(declared, machine, headers(big))
    assert plan.problem is not None
    assert plan.problem.key == "model.dtype"
    assert plan_deployment(changed(declared, "model.dtype", "bfloat16"), machine, headers(big)).fits

    hopeless = plan_deployment(declared, with_memory((OVERHEAD + 9 * MIB) / USABLE), headers(big))
    assert isinstance(hopeless.problem, Misfit)
    assert (hopeless.problem.key, hopeless.problem.fixes) == ("machine", ())
    assert "a smaller model" in str(hopeless.problem)
    assert plan_deployment(declared, with_memory(hopeless.problem.machine_needed), headers(big)).fits


@pytest.mark.parametrize("kv", [CONTIGUOUS, PAGED, PAGED | {"n_tokens": 8192}])
def test_the_machine_that_would_do_is_the_smallest_one(kv: dict[str, Any]) -> None:
    declared = deployment(kv, model={"context": 2048})
    tiny = with_memory(OVERHEAD)  # not even the runtime: no key helps
    problem = plan_deployment(declared, tiny, headers()).problem

    assert problem is not None
    assert not problem.fixes
    assert plan_deployment(declared, with_memory(problem.machine_needed), headers()).fits
    assert not plan_deployment(declared, with_memory(problem.machine_needed - 1), headers()).fits
    assert problem.needed > problem.usable


def test_two_changes_are_named_together_when_one_is_not_enough() -> None:
    big = replace(SPEC, hidden_size=100_000, tied_head=True)
    declared = deployment(PAGED | {"n_tokens": 2**20}, model={"dtype": "float32"}, max_batch_size=1, max_batch_tokens=16)
    machine = with_memory((OVERHEAD + 340 * MIB) / USABLE)
    plan = plan_deployment(declared, machine, headers(big))

    assert plan.problem is not None
    first, second = plan.problem.fixes[0]
    assert (first.key, second.key) == ("model.dtype", "kv.n_tokens")
    both = changed(changed(declared, first.key, first.value), second.key, second.value)
    assert plan_deployment(both, machine, headers(big)).fits


def test_f06_a_terabyte_of_kv_is_refused_with_both_numbers() -> None:
    plan = plan_deployment(deployment(PAGED | {"n_tokens": 2**31}), LAPTOP, headers())

    assert plan.memory.kv == 1 << 40
    assert "1.1 TiB" in str(plan.problem)
    assert "14.4 GiB of laptop" in str(plan.problem)
    assert "kv.n_tokens=" in str(plan.problem)


def test_f06_a_budget_one_byte_too_small_does_not_fit() -> None:
    declared = deployment(PAGED | {"n_tokens": 640})
    needed = plan_deployment(declared, LAPTOP, headers()).memory.peak
    enough = with_memory(needed / USABLE)

    assert plan_deployment(declared, enough, headers()).fits
    short = plan_deployment(declared, with_memory((needed - 1) / USABLE - 1), headers())
    assert short.problem is not None
    assert f"it needs {short.problem.needed:,} bytes, and {short.memory.usable:,} of" in str(short.problem)


def test_attention_is_chosen_for_each_phase_and_a_strict_list_is_obeyed() -> None:
    declared = deployment(CONTIGUOUS)
    assert plan_deployment(declared, LAPTOP, headers()).attention == {"prefill": "torch_native", "decode": "torch_native"}

    odd = replace(SPEC, layers=(replace(LAYER, n_heads=3),) * 2)
    strict = declared.model_copy(update={"attention": AttentionConfig(priority=("torch_native",), strict=True)})
    with pytest.raises(BackendRefused, match="'torch_native' was required"):
        plan_deployment(strict, LAPTOP, headers(odd))
    unknown = declared.model_copy(update={"attention": AttentionConfig(priority=("torch_nativ",), strict=False)})
    with pytest.raises(UnknownPart, match="did you mean 'torch_native'"):
        plan_deployment(unknown, LAPTOP, headers())


def test_a_machine_that_was_only_described_says_so() -> None:
    plan = plan_deployment(deployment(CONTIGUOUS), LAPTOP, headers())

    assert reasons(plan)["machine"] == ("laptop", "a description: planned here, served elsewhere")
    assert not plan.machine.probed


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KiB"), (512, "512 B"), (536_870_912, "512.0 MiB"), (1 << 40, "1.0 TiB")],
)
def test_sizes_are_short_and_exact_enough(n_bytes: int, text: str) -> None:
    assert size(n_bytes) == text
