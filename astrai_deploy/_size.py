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
    held_bytes,
    loading_bytes,
    native_activation_bytes,
    overhead_bytes,
    record_bytes,
    table_bytes,
    tokenizer_bytes,
)
from astrai_deploy._precision import Decision, Precision, choose
from astrai_deploy._problem import refusal
from astrai_runtime import part
from astrai_runtime.kv.base import KVShape
from astrai_runtime.machine import Machine
from astrai_runtime.model._matrices import stored_types

if TYPE_CHECKING:
    from astrai_deploy.schema import Deployment

MIN_CONTEXT = 256  # tokens; a context that was cut further to fit would not hold a conversation


@dataclass(frozen=True, slots=True)
class Size:
    """A deployment in numbers."""

    precision: Precision
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
        ConfigError: `model.context` is larger than the model's own, or than a declared pool; or as `choose`.
        UnknownPart, BackendRefused: as `choose`.
    """
    precision = choose(deployment, machine, headers)
    pool = _Pool(deployment, machine, headers, precision)
    context = _context(deployment, headers, pool)
    shape, memory = pool.at(int(context.value))
    tokens = Decision("kv.n_tokens", str(shape.n_tokens), pool.reason(shape, memory))
    held = (precision.weights, precision.dtype) if headers.tensors else (precision.dtype,)
    return Size(precision, shape, memory, (*held, *precision.kernels, context, precision.kv_dtype, tokens))


class _Pool:
    """The KV pool and the whole deployment's memory as functions of the context; everything else is fixed."""

    def __init__(self, deployment: Deployment, machine: Machine, headers: Headers, precision: Precision) -> None:
        self._config = deployment.kv
        self._mode = part.load("kv", deployment.kv.kind)
        self._page: int | None = getattr(deployment.kv, "page_size", None)
        shares = getattr(self._mode, "sharing", None)
        shared = shares is not None and shares(deployment.kv)[0]
        self._record = record_bytes(self._page, shared=shared) if self._page else 0
        self._B = deployment.scheduler.max_batch_size
        self._T = deployment.scheduler.max_batch_tokens
        self._spec, self._precision = headers.spec, precision
        self._relays = part.load("provider", deployment.provider.kind).answers == "text"
        stored = None if precision.native is None else stored_types(headers.table, headers.tensors)
        first = headers.spec.layers[0]
        self._shape = KVShape(
            n_layers=headers.spec.n_layers,
            n_kv_heads=first.n_kv_heads,
            head_dim=first.head_dim,
            dtype=precision.kv_dtype.value,
            max_batch_size=self._B,
            context=0,
            n_tokens=0,
        )
        self._fixed = Memory(
            weights=held_bytes(headers.spec, precision.weights.value, stored) if headers.tensors else 0,
            kv=0,
            tables=0,
            activations=0,
            loading=loading_bytes(headers.tensors.values(), from_file=headers.located.path is not None),
            tokenizer=tokenizer_bytes(headers.spec, machine.device, compiled=stored is not None and headers.sentencepiece),
            overhead=overhead_bytes(machine.device),
            machine=machine.memory_bytes,
        )

    def at(self, context: int) -> tuple[KVShape, Memory]:
        """The pool and the bytes of everything when one sequence may hold `context` tokens."""
        activations = self._activations(context)
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

    def _activations(self, context: int) -> int:
        native = self._precision.native
        if native is not None:
            return native_activation_bytes(self._spec, self._T, self._B, native.threads)
        return activation_bytes(self._spec, self._precision.dtype.value, self._T, self._B, context)

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
