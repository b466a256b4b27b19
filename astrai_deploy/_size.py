"""Every `auto` that depends on model and machine, decided: precision, context, KV pool, and the bytes that follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from astrai_deploy._headers import Headers
from astrai_deploy._memory import (
    BYTES,
    Memory,
    activation_bytes,
    loading_bytes,
    overhead_bytes,
    record_bytes,
    table_bytes,
    tokenizer_bytes,
    weight_bytes,
)
from astrai_deploy._problem import refusal
from astrai_runtime import part
from astrai_runtime.kv.base import KVShape
from astrai_runtime.machine import Machine

if TYPE_CHECKING:
    from astrai_deploy.schema import Deployment

MIN_CONTEXT = 256  # tokens; a context that was cut further to fit would not hold a conversation
BF16_FEATURES = ("amx_bf16", "avx512_bf16", "bf16")  # x86 twice, ARM; without one of them bfloat16 is emulated


@dataclass(frozen=True, slots=True)
class Decision:
    """One value that the plan decided, or checked, and why."""

    key: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Size:
    """A deployment in numbers."""

    dtype: str
    kv_shape: KVShape
    memory: Memory
    decisions: tuple[Decision, ...]

    @property
    def fits(self) -> bool:
        """Memory suffices, and the KV pool can hold one sequence of the whole context."""
        return self.memory.fits and self.kv_shape.n_tokens >= self.kv_shape.context


def size_deployment(deployment: Deployment, machine: Machine, headers: Headers) -> Size:
    """Decides precision, context and pool size. Pure; a deployment that does not fit is sized all the same.

    Raises:
        ConfigError: `model.context` is larger than the model's own, or than a declared pool.
    """
    dtype = _dtype(deployment, machine, headers)
    kv_dtype = deployment.kv.dtype
    kv = (
        Decision("kv.dtype", dtype.value, "the model's")
        if kv_dtype == "auto"
        else Decision("kv.dtype", kv_dtype, "declared")
    )
    pool = _Pool(deployment, machine, headers, dtype.value, kv.value)
    context = _context(deployment, headers, pool)
    shape, memory = pool.at(int(context.value))
    tokens = Decision("kv.n_tokens", str(shape.n_tokens), pool.reason(shape, memory))
    return Size(dtype.value, shape, memory, (dtype, context, kv, tokens))


def _dtype(deployment: Deployment, machine: Machine, headers: Headers) -> Decision:
    key, declared = "model.dtype", deployment.model.dtype
    if not headers.tensors:
        return Decision(key, "float32", "no weights here")
    if declared != "auto":
        return Decision(key, declared, "declared")
    stored = headers.stored
    if machine.device == "cuda":
        if machine.compute_capability is not None and machine.compute_capability >= (8, 0):
            return Decision(key, "bfloat16", f"this GPU computes in it; the files hold {stored}")
        return Decision(
            key, "float16", f"this GPU is older than compute capability 8.0 and has no bfloat16; files: {stored}"
        )
    if stored != "BF16" and not headers.quantised:
        return Decision(key, "float32", f"the files hold {stored}, and a CPU computes in float32")
    native = next((feature for feature in BF16_FEATURES if feature in machine.features), None)
    if native is None:
        return Decision(key, "float32", f"the files hold {stored}, but this CPU has no native bfloat16")
    return Decision(key, "bfloat16", f"the files hold {stored}, and this CPU has {native}")


class _Pool:
    """The KV pool and the whole deployment's memory as functions of the context; everything else is fixed."""

    def __init__(self, deployment: Deployment, machine: Machine, headers: Headers, dtype: str, kv_dtype: str) -> None:
        self._config = deployment.kv
        self._mode = part.load("kv", deployment.kv.kind)
        self._page: int | None = getattr(deployment.kv, "page_size", None)
        shares = getattr(self._mode, "sharing", None)
        shared = shares is not None and shares(deployment.kv)[0]
        self._record = record_bytes(self._page, shared=shared) if self._page else 0
        self._B = deployment.scheduler.max_batch_size
        self._T = deployment.scheduler.max_batch_tokens
        self._spec, self._dtype = headers.spec, dtype
        self._relays = part.load("provider", deployment.provider.kind).answers == "text"
        first = headers.spec.layers[0]
        self._shape = KVShape(
            n_layers=headers.spec.n_layers,
            n_kv_heads=first.n_kv_heads,
            head_dim=first.head_dim,
            dtype=kv_dtype,
            max_batch_size=self._B,
            context=0,
            n_tokens=0,
        )
        self._fixed = Memory(
            weights=weight_bytes(headers.spec, dtype) if headers.tensors else 0,
            kv=0,
            tables=0,
            activations=0,
            loading=loading_bytes(headers.tensors.values(), from_file=headers.located.path is not None),
            tokenizer=tokenizer_bytes(headers.spec, machine.device),
            overhead=overhead_bytes(machine.device),
            machine=machine.memory_bytes,
        )

    def at(self, context: int) -> tuple[KVShape, Memory]:
        """The pool and the bytes of everything when one sequence may hold `context` tokens."""
        activations = activation_bytes(self._spec, self._dtype, self._T, self._B, context)
        empty = replace(self._fixed, activations=activations, tables=table_bytes(self._B, context, 0, 0))
        free = max(0, empty.usable - empty.serving)
        page = self._page or 1
        page_bytes = page * self._shape.bytes_per_token + self._record
        affordable = free // page_bytes * page
        n_tokens: int = self._mode.pool_tokens(self._config, self._B, context, affordable)
        tables = table_bytes(self._B, context, n_tokens // page, self._record)
        shape = replace(self._shape, context=context, n_tokens=n_tokens)
        if self._relays:  # whoever computes elsewhere keeps the KV there
            return shape, self._fixed
        return shape, replace(empty, kv=n_tokens * shape.bytes_per_token, tables=tables)

    def holds(self, context: int) -> bool:
        """Whether everything fits with a pool that takes one whole context."""
        shape, memory = self.at(context)
        return memory.fits and shape.n_tokens >= context

    def reason(self, shape: KVShape, memory: Memory) -> str:
        """Where the pool's size comes from."""
        if isinstance(getattr(self._config, "n_tokens", None), int):
            return "declared"
        everyone = shape.max_batch_size * shape.context
        if shape.n_tokens >= everyone:
            return f"scheduler.max_batch_size {shape.max_batch_size} x model.context {shape.context}: all at full length"
        return "all that the machine's memory leaves"


def _context(deployment: Deployment, headers: Headers, pool: _Pool) -> Decision:
    where, declared, own = ("model", "context"), deployment.model.context, headers.spec.context
    key = "model.context"
    fixed = getattr(deployment.kv, "n_tokens", None)
    if declared != "auto":
        if declared > own:
            raise refusal(f"is {declared}, but this model holds {own} tokens; {own} or less would work", key=where)
        if isinstance(fixed, int) and declared > fixed:
            raise refusal(
                f"is {declared}, but kv.n_tokens={fixed} is all that one sequence can get; "
                f"model.context={fixed} or a larger kv.n_tokens would work",
                key=where,
            )
        return Decision(key, str(declared), f"declared; the model's own is {own}")
    top = min(own, fixed) if isinstance(fixed, int) else own
    why = "the model's own" if top == own else f"kv.n_tokens; the model's own is {own}"
    if pool.holds(top):
        return Decision(key, str(top), why)
    low = min(top, MIN_CONTEXT)
    if isinstance(fixed, int) or not pool.holds(low):
        return Decision(key, str(top if isinstance(fixed, int) else low), f"{why}; it does not fit")
    fitting = largest(low, top - 1, pool.holds)
    return Decision(key, str(fitting), f"as much as the KV pool can hold in this machine's memory; the model's own is {own}")


def largest(low: int, high: int, works: Callable[[int], bool]) -> int:
    """The largest number in low..high that works, where `low` does and no number above one that does not."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if works(middle) else (low, middle - 1)
    return low


def two_byte_dtype(machine: Machine) -> str:
    """The half-size type that this machine computes in best."""
    old_gpu = machine.device == "cuda" and (machine.compute_capability or (0, 0)) < (8, 0)
    dtype = "float16" if old_gpu else "bfloat16"
    assert BYTES[dtype] == 2
    return dtype
