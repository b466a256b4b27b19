"""Machines, headers and deployments for tests of the plan, all made by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from astrai_deploy._memory import RUNTIME
from astrai_deploy.plan import Headers, Plan
from astrai_deploy.schema import Deployment, DescribedMachine, Model
from astrai_runtime import part
from astrai_runtime.attention._config import AttentionConfig
from astrai_runtime.kernels.base import FEATURES, KernelsConfig
from astrai_runtime.machine import Machine
from astrai_runtime.model.base import DecoderSpec, LayerSpec, RopeSpec
from astrai_runtime.sources.base import Located
from astrai_runtime.weights.base import TensorInfo

MIB, GIB = 1 << 20, 1 << 30
LAYER = LayerSpec(4, 2, 16, 128, RopeSpec(10000.0, 16), 0.25)
SPEC = DecoderSpec("llama", 258, 64, (LAYER, LAYER), 1e-5, 2048, tied_head=False)
NATIVE = ("cpu", "torch_native")
LAPTOP = Machine("laptop", "cpu", 16 * GIB, 8, frozenset({"avx2"}))
SERVER = replace(LAPTOP, name="server", features=frozenset({"avx2", "avx512f", "avx512_bf16"}))
MODERN = Machine("modern", "cpu", 16 * GIB, 8, FEATURES["avx512"] | FEATURES["avx2"], software=frozenset({"cxx"}))
H100 = Machine("H100", "cuda", 80 * GIB, 52, compute_capability=(9, 0))
T4 = Machine("T4", "cuda", 16 * GIB, 8, compute_capability=(7, 5))
OVERHEAD = RUNTIME["cpu"]


def headers(spec: DecoderSpec = SPEC, stored: str = "F32") -> Headers:
    tensors = {
        name: TensorInfo(name, shape, stored, 2 * math.prod(shape), Path("model.gguf"))
        for name, shape in spec.tensor_shapes().items()
    }
    return Headers(spec, {}, tensors, Located(Path("model.gguf"), "test"))


def deployment(
    kv: dict[str, Any],
    *,
    model: dict[str, Any] | None = None,
    priority: Sequence[str] = ("torch_native",),
    isa: str = "auto",
    **scheduler: int,
) -> Deployment:
    card = {
        "name": "m",
        "source": {"kind": "random", "seed": 0, "config": {"a": 1}},
        "dtype": "auto",
        "weights": "auto",
        "context": "auto",
        "chat": {"template": "auto", "stop": [], "trim_leading_space": False},
        "overrides": {},
        "license": None,
    }
    steps = {
        "kind": "continuous",
        "max_batch_size": 4,
        "max_batch_tokens": 512,
        "max_waiting": 8,
        "undrained_ttl_s": None,
        "max_prompt_tokens_per_tick": 512,
    }
    return Deployment.model_construct(
        machine=DescribedMachine(
            kind="described",
            name="x",
            device="cpu",
            memory=1,  # type: ignore[arg-type]  # pydantic makes a ByteSize of it
            cores=1,
            features=frozenset(),
            compute_capability=None,
            software=frozenset(),
        ),
        model=Model.model_validate(card | (model or {})),
        kv=part.load("kv", kv["kind"]).Config.model_validate({"dtype": "auto"} | kv),
        attention=AttentionConfig.model_validate({"priority": priority, "strict": False}),
        kernels=KernelsConfig.model_validate({"isa": isa, "threads": "auto", "spin_us": 50, "packed_cache": True}),
        scheduler=part.load("scheduler", "continuous").Config.model_validate(steps | scheduler),
        provider=part.load("provider", "local").Config(kind="local"),
    )


CONTIGUOUS = {"kind": "contiguous"}
PAGED = {"kind": "paged", "page_size": 16, "n_tokens": "auto", "prefix_cache": "auto"}


def with_memory(n_bytes: float, machine: Machine = LAPTOP) -> Machine:
    return replace(machine, memory_bytes=math.ceil(n_bytes))


def reasons(plan: Plan) -> dict[str, tuple[str, str]]:
    return {decision.key: (decision.value, decision.reason) for decision in plan.decisions}
