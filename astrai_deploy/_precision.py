"""Who computes and in which precision: decided together, because each depends on the other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, get_args

from astrai_deploy._headers import PLAIN, Headers
from astrai_deploy._problem import refusal
from astrai_runtime import part
from astrai_runtime.attention._select import Choice, select
from astrai_runtime.attention.base import AttentionBackend, AttentionShape, Phase
from astrai_runtime.errors import BackendRefused
from astrai_runtime.kernels.base import FORMATS, ISAS, Format, Isa, KernelsConfig, best_isa, lacks
from astrai_runtime.machine import Machine

if TYPE_CHECKING:
    from astrai_deploy.schema import Deployment, Model

PHASES: tuple[Phase, ...] = get_args(Phase)
BF16_FEATURES = ("amx_bf16", "avx512_bf16", "bf16")  # x86 twice, ARM; without one of them torch emulates bfloat16
PLAIN_FORMATS: dict[str, Format] = {"F64": "float32", "F32": "float32", "F16": "float32", "BF16": "bfloat16"}
FEW_BITS = 4  # stored in so many or fewer: int4


@dataclass(frozen=True, slots=True)
class Decision:
    """One value that the plan decided, or checked, and why."""

    key: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Native:
    """How the native kernels run."""

    isa: Isa
    threads: int


@dataclass(frozen=True, slots=True)
class Precision:
    """Attention of each phase, and the types that follow. `native` None: torch computes, in its weights' own type."""

    choices: Mapping[Phase, Choice]
    weights: Decision
    dtype: Decision
    kv_dtype: Decision
    native: Native | None
    kernels: tuple[Decision, ...] = ()


def choose(deployment: Deployment, machine: Machine, headers: Headers) -> Precision:
    """Walks `attention.priority` once. Pure.

    Raises:
        ConfigError: declared weights that the chosen backend cannot hold, or an instruction set that the CPU lacks.
        UnknownPart, BackendRefused: no backend can serve, the required one cannot, or the phases' layouts differ.
    """
    card = deployment.model
    types = {True: _native_types(card, headers), False: _torch_types(card, machine, headers)}

    def shapes(backend: type[AttentionBackend]) -> AttentionShape:
        dtype = types[backend.whole_steps][1].value
        if backend.whole_steps and dtype in FORMATS:  # native attention works in the type of the stored keys and values
            dtype = _kv_dtype(deployment, dtype).value
        return headers.spec.attention_shape(dtype, getattr(deployment.kv, "page_size", None))

    choices = {phase: select(deployment.attention, machine, shapes, phase) for phase in PHASES}
    whole_steps = _one_layout(choices)
    weights, dtype = types[whole_steps]
    if not whole_steps and headers.tensors and card.weights not in ("auto", dtype.value):
        raise refusal(_only_native(card, dtype.value, choices), key=("model", "weights"))
    native, kernels = _native(deployment.kernels, machine) if whole_steps else (None, ())
    return Precision(MappingProxyType(choices), weights, dtype, _kv_dtype(deployment, dtype.value), native, kernels)


def _one_layout(choices: Mapping[Phase, Choice]) -> bool:
    """Whether native programs run whole steps; both phases must read the same keys and values."""
    backends: dict[Phase, type[AttentionBackend]] = {
        phase: part.load("attention", choice.name) for phase, choice in choices.items()
    }
    if len({backend.layout for backend in backends.values()}) > 1:
        told = " and ".join(f"{phase} by '{choices[phase].name}'" for phase in choices)
        why = "; ".join(f"'{name}': {reason}" for choice in choices.values() for name, reason in choice.passed_over)
        raise BackendRefused(
            f"attention: {told} would store keys and values in different orders ({why}); "
            "name one that serves both phases, e.g. attention=torch_native"
        )
    return any(backend.whole_steps for backend in backends.values())


def _only_native(card: Model, dtype: str, choices: Mapping[Phase, Choice]) -> str:
    reason = next((reason for choice in choices.values() for name, reason in choice.passed_over if name == "cpu"), None)
    chosen = next(iter(choices.values())).name
    cannot = f"they cannot serve: {reason}" if reason else f"attention.priority prefers '{chosen}'"
    instead = "model.weights=auto" if reason else "attention=auto or model.weights=auto"
    beside = "" if card.weights not in ("float32", "bfloat16") else f" beside activations in {dtype}"
    return f"{card.weights} weights{beside} need the native kernels, and {cannot}; {instead} would work"


def _kv_dtype(deployment: Deployment, dtype: str) -> Decision:
    declared = deployment.kv.dtype
    if declared == "auto":
        return Decision("kv.dtype", dtype, "the model's")
    return Decision("kv.dtype", declared, "declared")


# -- the native kernels: weights in any format, float32 between layers -------------------------------------------------


def _native_types(card: Model, headers: Headers) -> tuple[Decision, Decision]:
    """Weights, and dtype."""
    if not headers.tensors:
        return _nothing()
    if card.weights != "auto":
        weights = Decision("model.weights", card.weights, "declared")
    elif card.dtype != "auto":
        weights = Decision("model.weights", card.dtype, "what model.dtype declares")
    else:
        weights = Decision("model.weights", *_stored_format(headers))
    if card.dtype != "auto":
        return weights, Decision("model.dtype", card.dtype, "declared")
    if weights.value == "float32":
        return weights, Decision("model.dtype", "float32", "the weights' own")
    return weights, Decision("model.dtype", "bfloat16", "for keys and values; the native kernels add up in float32")


def _stored_format(headers: Headers) -> tuple[Format, str]:
    """The format of the file's own precision class, by most bytes, and the type that stands for it."""
    n_bytes: Counter[Format] = Counter()
    for info in headers.tensors.values():
        n_bytes[_format_of(info.dtype.upper())] += info.n_bytes
    found = n_bytes.most_common(1)[0][0]
    return found, f"the files hold {next(name for name in headers.types if _format_of(name) == found)}"


def _format_of(stored: str) -> Format:
    """`Q6_K` has 6 bits: the first number in a quantisation's name."""
    if stored in PLAIN_FORMATS:
        return PLAIN_FORMATS[stored]
    bits = re.search(r"\d+", stored)
    return "int4" if bits and int(bits[0]) <= FEW_BITS else "int8"


def _native(config: KernelsConfig, machine: Machine) -> tuple[Native, tuple[Decision, ...]]:
    best = best_isa(machine)
    isa: Isa = best if config.isa == "auto" else config.isa
    if missing := sorted(lacks(isa, machine)):
        has = "this CPU lacks" if machine.probed else f"'{machine.name}' lacks"
        message = f"{isa} needs {', '.join(missing)}, which {has}; kernels.isa={best} or auto would work"
        raise refusal(message, key=("kernels", "isa"))
    better = ISAS[ISAS.index(best) - 1] if best != ISAS[0] else None
    why = "the best there is" if better is None else f"{better} needs {', '.join(sorted(lacks(better, machine)))}"
    if machine.probed and "cpu_kernels" not in machine.software:
        why += "; compiled at the first start, which takes about 15 s"
    if config.isa != "auto":
        why = "declared" if isa == best else f"declared; {best} would work too"
    cores = f"{machine.cores} {'core' if machine.cores == 1 else 'cores'}"
    threads = machine.cores if config.threads == "auto" else config.threads
    told = f"one for each of {cores}" if config.threads == "auto" else f"declared; there are {cores}"
    decisions = (Decision("kernels.isa", isa, why), Decision("kernels.threads", str(threads), told))
    return Native(isa, threads), decisions


# -- torch: weights and activations in one type ------------------------------------------------------------------------


def _torch_types(card: Model, machine: Machine, headers: Headers) -> tuple[Decision, Decision]:
    """Weights, and dtype: always the same."""
    if not headers.tensors:
        return _nothing()
    if card.dtype != "auto":
        dtype = Decision("model.dtype", card.dtype, "declared")
    elif card.weights in ("float32", "bfloat16"):
        dtype = Decision("model.dtype", card.weights, "what model.weights declares")
    else:
        dtype = Decision("model.dtype", *_torch_dtype(machine, headers))
    return Decision("model.weights", dtype.value, "torch holds them as it computes"), dtype


def _torch_dtype(machine: Machine, headers: Headers) -> tuple[str, str]:
    stored = headers.stored
    if machine.device == "cuda":
        if machine.compute_capability is not None and machine.compute_capability >= (8, 0):
            return "bfloat16", f"this GPU computes in it; the files hold {stored}"
        return "float16", f"this GPU is older than compute capability 8.0 and has no bfloat16; files: {stored}"
    if stored in PLAIN and stored != "BF16":
        return "float32", f"the files hold {stored}, and a CPU computes in float32"
    has = next((feature for feature in BF16_FEATURES if feature in machine.features), None)
    if has is None:
        return "float32", f"the files hold {stored}, but this CPU has no native bfloat16"
    return "bfloat16", f"the files hold {stored}, and this CPU has {has}"


def _nothing() -> tuple[Decision, Decision]:
    return Decision("model.weights", "float32", "no weights here"), Decision("model.dtype", "float32", "no weights here")
