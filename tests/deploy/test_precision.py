"""Backend, weights and types are decided together: what each file, machine and declaration leads to, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from astrai_deploy._memory import COMPILED_TOKEN_RECORD, TOKEN_RECORD, USABLE
from astrai_deploy._problem import ConfigError
from astrai_deploy.compose import compose
from astrai_deploy.paths import shipped
from astrai_deploy.plan import Headers, Plan, make_plan, plan_deployment
from astrai_runtime import part
from astrai_runtime.attention._config import AttentionConfig
from astrai_runtime.attention.base import AttentionShape, Phase
from astrai_runtime.attention.cpu import Cpu
from astrai_runtime.errors import BackendRefused
from astrai_runtime.kernels._build import find
from astrai_runtime.kernels.base import FEATURES
from astrai_runtime.machine import Machine
from astrai_runtime.model._matrices import matrices, packed_bytes
from astrai_runtime.sources.base import Located
from astrai_runtime.weights.base import TensorInfo
from tests.deploy.planning import (
    CONTIGUOUS,
    GIB,
    H100,
    LAYER,
    MODERN,
    NATIVE,
    OVERHEAD,
    SPEC,
    deployment,
    headers,
    reasons,
    with_memory,
)

BARE = replace(MODERN, name="bare", software=frozenset())  # no compiler, nothing built
AVX2 = replace(MODERN, name="older", features=FEATURES["avx2"])


def planned(
    machine: Machine = MODERN, stored: str = "BF16", kv: dict[str, Any] | None = None, isa: str = "auto", **model: str
) -> Plan:
    return plan_deployment(
        deployment(CONTIGUOUS | (kv or {}), model=model, priority=NATIVE, isa=isa), machine, headers(stored=stored)
    )


def refused(key: tuple[str, str], machine: Machine = MODERN, isa: str = "auto", **model: str) -> str:
    with pytest.raises(ConfigError) as raised:
        planned(machine, isa=isa, **model)
    assert [problem.key for problem in raised.value.problems] == [key]
    return str(raised.value)


@pytest.mark.parametrize(
    ("stored", "weights", "dtype"),
    [
        ("F32", "float32", "float32"),
        ("F16", "float32", "float32"),
        ("BF16", "bfloat16", "bfloat16"),
        *((name, "int8", "bfloat16") for name in ("Q8_0", "Q6_K", "Q5_0", "Q5_K")),
        *((name, "int4", "bfloat16") for name in ("Q4_0", "Q4_K", "IQ4_XS", "Q3_K", "Q2_K")),
    ],
)
def test_weights_follow_the_precision_class_of_the_files(stored: str, weights: str, dtype: str) -> None:
    plan = planned(stored=stored)

    assert plan.attention == {"prefill": "cpu", "decode": "cpu"}
    assert (plan.weights, plan.dtype, plan.kv_shape.dtype) == (weights, dtype, dtype)
    assert reasons(plan)["model.weights"] == (weights, f"the files hold {stored}")
    assert plan.memory.weights == packed_bytes(SPEC, weights)  # type: ignore[arg-type]


def test_the_class_with_most_bytes_decides() -> None:
    sizes = {"Q4_K": 40, "Q6_K": 35, "Q5_0": 30, "F32": 5}
    tensors = {name: TensorInfo(name, (1,), name, n, Path("m.gguf")) for name, n in sizes.items()}
    found = Headers(SPEC, {}, tensors, Located(Path("m.gguf"), "test"))
    plan = plan_deployment(deployment(CONTIGUOUS, priority=NATIVE), MODERN, found)

    assert reasons(plan)["model.weights"] == ("int8", "the files hold Q6_K")


@pytest.mark.parametrize(
    ("declared", "weights", "dtype"),
    [
        ({"dtype": "float32"}, "float32", "float32"),
        ({"dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"weights": "int8"}, "int8", "bfloat16"),
        ({"weights": "float32"}, "float32", "float32"),
        ({"weights": "int4", "dtype": "float32"}, "int4", "float32"),
        ({"weights": "float32", "dtype": "bfloat16"}, "float32", "bfloat16"),
    ],
)
def test_what_is_declared_is_kept_and_decides_the_rest(declared: dict[str, str], weights: str, dtype: str) -> None:
    plan = planned(**declared)

    assert plan.native is not None
    assert (plan.weights, plan.dtype, plan.kv_shape.dtype) == (weights, dtype, dtype)
    assert all(reasons(plan)[f"model.{key}"] == (value, "declared") for key, value in declared.items())


def test_keys_and_values_may_have_a_type_of_their_own() -> None:
    plan = planned(kv={"dtype": "float32"}, weights="int8")

    assert plan.native is not None
    assert (plan.dtype, plan.kv_shape.dtype) == ("bfloat16", "float32")


@pytest.mark.parametrize(
    ("kv", "model"), [("auto", {"dtype": "float16"}), ("float16", {}), ("float32", {"dtype": "float16"})]
)
def test_float16_is_left_to_torch_and_the_plan_says_why(kv: str, model: dict[str, str]) -> None:
    plan = planned(kv={"dtype": kv}, **model)

    assert plan.native is None
    assert dict(plan.choices["decode"].passed_over) == {"cpu": "it computes in float32 and bfloat16, not in float16"}


def test_without_a_compiler_torch_serves_and_the_plan_says_so() -> None:
    plan = planned(BARE, stored="Q4_K")

    assert plan.attention == {"prefill": "torch_native", "decode": "torch_native"}
    assert plan.weights == plan.dtype == "bfloat16"
    assert "no C++ compiler" in dict(plan.choices["prefill"].passed_over)["cpu"]


def test_kernels_that_are_built_already_need_no_compiler() -> None:
    assert planned(replace(BARE, software=frozenset({"cpu_kernels"}))).native is not None


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_weights_without_native_kernels_are_refused_with_the_reason(weights: str) -> None:
    said = refused(("model", "weights"), BARE, weights=weights)

    assert f"{weights} weights need the native kernels, and they cannot serve: there is no C++ compiler" in said
    assert "model.weights=auto would work" in said
    assert "this machine's device is cuda" in refused(("model", "weights"), H100, weights=weights)


def test_weights_beside_another_type_need_the_native_kernels() -> None:
    said = refused(("model", "weights"), BARE, weights="float32", dtype="bfloat16")
    assert "float32 weights beside activations in bfloat16 need the native kernels" in said

    alike = planned(BARE, weights="bfloat16")
    assert (alike.weights, alike.dtype) == ("bfloat16", "bfloat16")
    assert reasons(alike)["model.dtype"] == ("bfloat16", "what model.weights declares")


def test_a_priority_without_native_kernels_is_named_when_weights_need_them() -> None:
    wanted = deployment(CONTIGUOUS, model={"weights": "int8"})
    with pytest.raises(ConfigError, match=r"prefers 'torch_native'; attention=auto or model\.weights=auto would work"):
        plan_deployment(wanted, MODERN, headers())


def test_the_best_instruction_set_is_planned_and_a_lower_one_when_declared() -> None:
    assert reasons(planned())["kernels.isa"] == ("avx512", "the best there is")
    isa, why = reasons(planned(AVX2))["kernels.isa"]
    assert (isa, why.split(" needs ")[0]) == ("avx2", "avx512")
    assert "avx512_vnni" in why
    assert reasons(planned(isa="portable"))["kernels.isa"] == ("portable", "declared; avx512 would work too")
    assert reasons(planned())["kernels.threads"] == ("8", "one for each of 8 cores")
    arm = replace(MODERN, name="arm", features=frozenset({"fp", "asimd"}))
    assert reasons(planned(arm))["kernels.isa"][0] == "portable"


def test_a_declared_instruction_set_that_the_cpu_lacks_is_refused_with_the_best_one_that_works() -> None:
    said = refused(("kernels", "isa"), AVX2, isa="avx512")

    assert "avx512_bf16, avx512_vnni" in said
    assert "which 'older' lacks; kernels.isa=avx2 or auto would work" in said


@pytest.mark.parametrize("head_dim", [24, 272])
def test_a_model_that_the_kernels_cannot_serve_is_left_to_torch_unless_they_are_required(head_dim: int) -> None:
    layer = replace(LAYER, head_dim=head_dim, rope=replace(LAYER.rope, dim=head_dim))
    found = headers(replace(SPEC, layers=(layer, layer)))
    plan = plan_deployment(deployment(CONTIGUOUS, priority=NATIVE), MODERN, found)
    assert plan.native is None
    assert f"a head of {head_dim} features" in dict(plan.choices["decode"].passed_over)["cpu"]

    strict = {"attention": AttentionConfig(priority=("cpu",), strict=True)}
    with pytest.raises(BackendRefused, match="'cpu' was required, but a head of"):
        plan_deployment(deployment(CONTIGUOUS).model_copy(update=strict), MODERN, found)


def test_phases_with_different_layouts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load = part.load

    class Half(Cpu):
        @classmethod
        def refuses(cls, machine: Machine, shape: AttentionShape, phase: Phase) -> str | None:
            return "it only decodes" if phase == "prefill" else None

    monkeypatch.setattr(part, "load", lambda group, name: Half if name == "cpu" else load(group, name))
    with pytest.raises(BackendRefused, match=r"prefill by 'torch_native' and decode by 'cpu' .*'cpu': it only decodes"):
        planned()


def test_the_bytes_of_every_choice_are_told() -> None:
    plan = planned(stored="Q8_0")
    matrix = 2 * ((64 + 64) * 64 + 64 * 64 + 256 * 64 + 64 * 128) + 2 * 272 * 64  # 258 rows in tiles of 16 are 272
    norms = 5 * 64 * 4

    assert list(plan.weight_bytes) == ["float32", "bfloat16", "int8", "int4"]
    assert plan.weight_bytes["float32"] == 4 * matrix + norms
    assert plan.weight_bytes["bfloat16"] == 2 * matrix + norms
    assert plan.weight_bytes["int8"] == matrix * 34 // 32 + norms
    assert plan.memory.weights == plan.weight_bytes["int8"]
    assert plan.weight_bytes["int4"] < plan.weight_bytes["int8"]
    assert list(planned(BARE).weight_bytes) == ["float32", "bfloat16"]


def test_a_tokenizer_in_the_compiled_library_is_counted_as_such() -> None:
    pieces = replace(headers(), sentencepiece=True)
    told = {
        priority: plan_deployment(deployment(CONTIGUOUS, priority=priority), MODERN, pieces).memory.tokenizer
        for priority in (NATIVE, ("torch_native",))
    }

    assert told[NATIVE] == 258 * COMPILED_TOKEN_RECORD
    assert told["torch_native",] == planned().memory.tokenizer == 258 * TOKEN_RECORD


def test_int4_keeps_embedding_and_head_in_int8_and_a_tied_head_once() -> None:
    formats = {name: shape.format for name, shape in matrices(SPEC, "int4").items()}

    assert formats["embed"] == formats["head"] == "int8"
    assert {kind for name, kind in formats.items() if name.startswith("layers.")} == {"int4"}
    tied = replace(SPEC, tied_head=True)
    assert packed_bytes(SPEC, "int8") - packed_bytes(tied, "int8") == matrices(SPEC, "int8")["head"].n_bytes


def test_smaller_weights_are_what_makes_a_large_model_fit() -> None:
    big = replace(SPEC, hidden_size=80_000, tied_head=True)  # 113 M parameters
    wanted = deployment(CONTIGUOUS, priority=NATIVE, max_batch_size=1, max_batch_tokens=16)
    needed = {name: packed_bytes(big, name) for name in ("float32", "bfloat16", "int8")}  # type: ignore[arg-type]
    room = (needed["bfloat16"] + needed["int8"]) / 2
    machine = with_memory((OVERHEAD + room) / USABLE, MODERN)
    plan = plan_deployment(wanted, machine, headers(big, stored="F32"))

    assert plan.problem is not None
    assert (plan.problem.fixes[0][0].key, plan.problem.fixes[0][0].value) == ("model.weights", "int8")
    smaller = deployment(CONTIGUOUS, model={"weights": "int8"}, priority=NATIVE, max_batch_size=1, max_batch_tokens=16)
    assert plan_deployment(smaller, machine, headers(big, stored="F32")).fits
    assert math.isclose(needed["float32"], 4 * 113_000_000, rel_tol=0.1)


def test_no_second_layout_is_planned_for_a_machine_with_a_gpu() -> None:
    plan = planned(replace(H100, memory_bytes=80 * GIB))

    assert plan.native is None
    assert plan.dtype == "bfloat16"


@pytest.mark.usefixtures("home")
def test_this_machine_tells_whether_kernels_are_built_or_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = compose(["+recipe=tiny", "attention.priority=[cpu,torch_native]", "machine.device=cpu"], [], {})
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))  # no compiler at all
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    assert not make_plan(wanted).machine.software & {"cxx", "cpu_kernels"}
    assert make_plan(wanted).native is None

    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho one that says its version\n")
    compiler.chmod(0o755)
    plan = make_plan(wanted)
    assert plan.machine.software >= {"cxx"}
    assert plan.native is not None
    assert "compiled at the first start" in reasons(plan)["kernels.isa"][1]

    target = find(shipped("csrc") / "cpu", tmp_path / "empty" / "astrai-deploy").target
    assert target is not None
    target.parent.mkdir(parents=True)
    target.touch()
    compiler.unlink()
    plan = make_plan(wanted)
    assert plan.machine.software & {"cxx", "cpu_kernels"} == {"cpu_kernels"}
    assert "first start" not in reasons(plan)["kernels.isa"][1]
