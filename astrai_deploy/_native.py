"""The native side of a plan, opened: the compiled library and its threads, and the decoder over packed weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from astrai_deploy._precision import Native
from astrai_deploy.kernels import ensure_library
from astrai_deploy.paths import cache_dir, state_dir
from astrai_deploy.plan import Plan
from astrai_runtime.kernels.base import Format
from astrai_runtime.sources.base import Progress

if TYPE_CHECKING:
    from astrai_runtime.kernels._sampler import SamplerKernels
    from astrai_runtime.kernels.cpu import Library, Pool
    from astrai_runtime.model._native import NativeDecoder
    from astrai_runtime.model._pack import PackedModel
    from astrai_runtime.weights.base import Checkpoint

READING = "packed weights"  # what the cache calls reading them back; packing tells the tensor


@dataclass(frozen=True)
class Kernels:
    """One loaded library and the threads that the decoder and the sampler share. The decoder closes them."""

    library: Library
    pool: Pool
    native: Native

    def sampler(self) -> SamplerKernels:
        """What the sampling pipeline may call instead of its stages."""
        from astrai_runtime.kernels._sampler import SamplerKernels

        return SamplerKernels(self.library, self.native.isa, self.pool)


def open_kernels(plan: Plan, native: Native, progress: Progress) -> Kernels:
    """Compiles the kernels where that has not been done, loads them, and starts the threads.

    Raises:
        KernelError: they cannot be compiled or loaded, or this CPU lacks the planned instruction set.
    """
    from astrai_runtime.kernels.cpu import Library

    library = Library.open(ensure_library(cache_dir(plan.deployment.run.cache), progress))
    return Kernels(library, library.pool_open(native.threads, plan.deployment.kernels.spin_us), native)


def packed_model(plan: Plan, kernels: Kernels, checkpoint: Checkpoint, progress: Progress) -> PackedModel:
    """The planned weights, packed from the model's files or at an earlier start. Needs no torch; waits without the GIL.

    Raises:
        WeightsError: damaged, incomplete or unsupported files.
        KernelError: there is not enough memory.
    """
    from astrai_runtime.model._load import check_tensors
    from astrai_runtime.model._pack import pack_model
    from astrai_runtime.model._packed_cache import PackedCache

    check_tensors(checkpoint, plan.spec, plan.table)
    deployment, weights = plan.deployment, cast("Format", plan.weights)

    def told(what: str, done: int, total: int) -> None:
        progress(what if what == READING else "packing weights", done, total)

    given = (kernels.library, kernels.pool, checkpoint, plan.spec, plan.table, weights)
    if not deployment.kernels.packed_cache:
        return pack_model(*given, told)
    cache = PackedCache(state_dir(deployment.run.dir) / "packed")
    return cache.load_or_pack(*given, kernels.native.isa, told)


def native_decoder(plan: Plan, kernels: Kernels, packed: PackedModel) -> NativeDecoder:
    """The planned decoder over packed weights.

    Raises:
        KernelError: there is not enough memory.
    """
    from astrai_runtime.model._native import NativeDecoder

    scheduler = plan.deployment.scheduler
    return NativeDecoder(
        kernels.library,
        plan.spec,
        packed,
        kernels.pool,
        isa=kernels.native.isa,
        kv_dtype=cast("Literal['float32', 'bfloat16']", plan.kv_shape.dtype),
        max_tokens=scheduler.max_batch_tokens,
        max_logits=scheduler.max_batch_size,
    )
