"""The sampling kernels behind `sampling.base.Kernels`: one call chooses the tokens of all rows of a step."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from astrai_runtime.errors import KernelError
from astrai_runtime.kernels._abi import OPERATIONS, Choice, Operation

if TYPE_CHECKING:
    from torch import Tensor

    from astrai_runtime.kernels.base import Isa
    from astrai_runtime.kernels.cpu import Library, Pool
    from astrai_runtime.sampling import base


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request's operations where the kernels read them."""

    address: int
    count: int
    reads_tokens: bool
    memory: tuple[object, ...]  # what the addresses point at


class SamplerKernels:
    """Rows of float32 logits in the CPU's memory. One call at a time; the pool's threads share its work.

    The scratch memory is that of the widest row and the most rows so far.
    """

    def __init__(self, library: Library, isa: Isa, pool: Pool) -> None:
        self._library, self._isa, self._pool = library, isa, pool
        self._choose = library.functions.astrai_sampler_choose
        self._likeliest = library.functions.astrai_sampler_likeliest
        self._choices: Any = (Choice * 0)()
        self._vocab = 0
        self._handle = 0
        self._close: weakref.finalize[..., Any] | None = None

    def prepare(self, operations: Sequence[base.Operation]) -> Prepared:
        """See `sampling.base.Kernels`."""
        structs = (Operation * len(operations))()
        memory: list[object] = [structs]
        for struct, operation in zip(structs, operations, strict=True):
            ids, values = array("i", operation.ids), array("f", operation.values)
            memory += [ids, values]
            struct.kind, struct.n, struct.value = OPERATIONS.index(operation.kind), len(ids), operation.value
            struct.ids, struct.values = ids.buffer_info()[0], values.buffer_info()[0]
        reads = any(operation.kind == "penalties" for operation in operations)
        return Prepared(ctypes.addressof(structs), len(structs), reads, tuple(memory))

    def choose(self, logits_SV: Tensor, asked: Sequence[base.Asked]) -> list[int]:
        """See `sampling.base.Kernels`.

        Raises:
            KernelError: the logits are not rows of float32 in the CPU's memory.
        """
        self._fit(logits_SV)
        if len(self._choices) < len(asked):
            self._choices = (Choice * len(asked))()
        start, stride = logits_SV.data_ptr(), logits_SV.stride(0) * 4
        kept = []  # token lists, until the call is over
        for choice, one in zip(self._choices, asked, strict=False):
            prepared = one.prepared
            assert isinstance(prepared, Prepared)
            choice.logits, choice.u = start + one.row * stride, one.u
            choice.operations, choice.n_operations = prepared.address, prepared.count
            if prepared.reads_tokens:
                tokens = array("i", one.tokens)
                kept.append(tokens)
                choice.tokens, choice.n_tokens, choice.n_prompt = tokens.buffer_info()[0], len(tokens), one.n_prompt
            else:
                choice.n_tokens = choice.n_prompt = 0
        if self._choose(self._handle, self._choices, len(asked)):
            raise self._library.failure("sampling failed")
        return [choice.token for choice in self._choices[: len(asked)]]

    def likeliest(self, row_V: Tensor, k: int) -> tuple[list[tuple[int, float]], float]:
        """See `sampling.base.Kernels`. The sum is NaN when the row holds NaN or infinity.

        Raises:
            KernelError: as `choose`.
        """
        self._fit(row_V[None])
        if not 0 <= k <= self._vocab:
            raise KernelError(f"a row of {self._vocab} logits has no {k} likeliest")
        ids, values, log_sum = array("i", bytes(4 * k)), array("f", bytes(4 * k)), ctypes.c_double()
        places = ids.buffer_info()[0], values.buffer_info()[0]
        if self._likeliest(self._handle, row_V.data_ptr(), k, *places, ctypes.byref(log_sum)):
            raise self._library.failure("the likeliest tokens could not be found")
        return list(zip(ids, values, strict=True)), log_sum.value

    def _fit(self, logits_SV: Tensor) -> None:
        """Checks what the kernels are about to read, and opens them for rows of that width."""
        import torch

        if logits_SV.dtype != torch.float32 or logits_SV.device.type != "cpu" or logits_SV.stride(1) != 1:
            raise KernelError(
                "sampling kernels read rows of float32 logits in the CPU's memory, "
                f"not {logits_SV.dtype} on {logits_SV.device} with strides {logits_SV.stride()}"
            )
        if (width := logits_SV.shape[1]) == self._vocab:
            return
        handle = self._library.call("astrai_sampler_open", self._isa.encode(), self._pool.handle, width)
        if not handle:
            raise self._library.failure(f"sampling from {width} tokens could not be prepared")
        if self._close is not None:
            self._close()
        self._handle, self._vocab = handle, width
        self._close = weakref.finalize(self, self._library.call, "astrai_sampler_close", handle)
        self._close.atexit = False
