"""What to change when a deployment does not fit: each key that helps, with its largest value, found by planning again."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from astrai_deploy._headers import Headers
from astrai_deploy._memory import USABLE, size
from astrai_deploy._problem import ConfigError
from astrai_deploy._size import MIN_CONTEXT, Size, largest, size_deployment, two_byte_dtype
from astrai_runtime.errors import BackendRefused
from astrai_runtime.kernels.base import FORMATS
from astrai_runtime.machine import Machine

if TYPE_CHECKING:
    from astrai_deploy.schema import Deployment

NUMBERS = ("kv.n_tokens", "model.context", "scheduler.max_batch_size", "scheduler.max_batch_tokens")
TYPES = ("model.weights", "model.dtype", "kv.dtype")
BLAMED = NUMBERS + TYPES


@dataclass(frozen=True, slots=True)
class Change:
    """`key: value` would fit; with a number, every smaller one would too. `now` is declared at `where`."""

    key: str
    value: int | str
    now: str
    where: str | None = None

    def __str__(self) -> str:
        less = " or less" if isinstance(self.value, int) and self.value > 1 else ""
        return f"{self.key}={self.value}{less} instead of {self.now}{f' ({self.where})' if self.where else ''}"


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why it does not fit. `fixes`: alternatives, best first; each is one change, or two that are needed together."""

    machine: str
    needed: int
    usable: int
    machine_needed: int  # memory of a machine that would do as things are
    fixes: tuple[tuple[Change, ...], ...]

    @property
    def key(self) -> str:
        """The key to change first; `machine` when no key of this deployment helps."""
        return self.fixes[0][-1].key if self.fixes else "machine"

    def __str__(self) -> str:
        needed, usable = size(self.needed), size(self.usable)
        if needed == usable:  # too close for rounded numbers
            needed, usable = f"{self.needed:,} bytes", f"{self.usable:,}"
        wants = f"does not fit: it needs {needed}, and {usable} of {self.machine} can be used"
        if not self.fixes:
            least = f"no single key makes it fit; a machine with {size(self.machine_needed)} would do, or a smaller model"
            return f"{wants}\n{least}"
        said = [" with ".join(str(change) for change in reversed(fix)) for fix in self.fixes]
        return "\n".join((f"{wants}; what would work:", *(f"  {line}" for line in said)))


def diagnose(
    deployment: Deployment,
    machine: Machine,
    headers: Headers,
    found: Size,
    *,
    chosen: Container[str] = (),
    places: Mapping[str, str] = MappingProxyType({}),
) -> Misfit:
    """Alternatives that make it fit. `chosen`: keys that a person set, blamed first; `places`: where keys are declared."""
    search = _Search(deployment, machine, headers, chosen, places, native=found.precision.native is not None)
    fixes: list[tuple[Change, ...]] = [(change,) for change in search.single(deployment)]
    if not fixes and (least := _least_type(machine, found)) is not None:
        key, value, now = least
        first = search.change(key, value, now)
        fixes = [(first, change) for change in search.single(changed(deployment, key, value)) if change.key != key]
    enough = search.smallest_machine(deployment)
    return Misfit(machine.name, math.floor(enough * USABLE), found.memory.usable, enough, tuple(fixes))


def changed(deployment: Deployment, key: str, value: int | str) -> Deployment:
    """The deployment with one key of one group replaced. Nothing is validated again."""
    group, _, name = key.partition(".")
    section = getattr(deployment, group).model_copy(update={name: value})
    return deployment.model_copy(update={group: section})


def _least_type(machine: Machine, found: Size) -> tuple[str, str, str] | None:
    """The key that shrinks the weights, its smallest value, and what it decides now; None where that is the smallest."""
    if found.precision.native is not None:
        now, least = found.precision.weights.value, str(FORMATS[-1])
        return ("model.weights", least, now) if now != least else None
    now, least = found.precision.dtype.value, two_byte_dtype(machine)
    return ("model.dtype", least, now) if now != least else None


class _Search:
    def __init__(
        self,
        deployment: Deployment,
        machine: Machine,
        headers: Headers,
        chosen: Container[str],
        places: Mapping[str, str],
        *,
        native: bool,
    ) -> None:
        self._machine, self._headers, self._places = machine, headers, places
        self._numbers = sorted(NUMBERS, key=lambda key: key not in chosen)
        types = [key for key in TYPES if native or key != "model.weights"]  # torch's are those of model.dtype
        self._types = sorted(types, key=lambda key: key not in chosen)
        least = min(headers.spec.context, MIN_CONTEXT)
        answers = [limit for each in deployment.protocols.values() if (limit := getattr(each, "max_tokens", None))]
        context = deployment.model.context
        self._least = {
            "kv.n_tokens": least if context == "auto" else context,
            "model.context": max(least, *answers, getattr(deployment.kv, "page_size", 1)),  # smaller ones are refused
            "scheduler.max_batch_size": 1,
            "scheduler.max_batch_tokens": max(1, deployment.scheduler.max_batch_size),
        }

    def change(self, key: str, value: int | str, now: object) -> Change:
        return Change(key, value, str(now), self._places.get(key))

    def single(self, deployment: Deployment) -> Iterator[Change]:
        """Every key that alone makes room, with its largest value."""
        for key in self._numbers:
            now = _value(deployment, key)
            if isinstance(now, int) and (best := self._largest(deployment, key, now)) is not None:
                yield self.change(key, best, now)
        for key in self._types:
            now = _value(deployment, key)
            values = FORMATS[1:] if key == "model.weights" else (two_byte_dtype(self._machine),)
            smaller = next((value for value in values if value != now and self._fits(deployment, key, value)), None)
            if now is not None and smaller is not None:
                yield self.change(key, smaller, now)

    def smallest_machine(self, deployment: Deployment) -> int:
        """Bytes of memory with which everything fits as it is, one whole context of KV included."""

        def too_small(n_bytes: int) -> bool:
            machine = replace(self._machine, memory_bytes=n_bytes)
            return not size_deployment(deployment, machine, self._headers).fits

        return largest(self._machine.memory_bytes, 1 << 60, too_small) + 1

    def _largest(self, deployment: Deployment, key: str, now: int) -> int | None:
        step: int = getattr(deployment.kv, "page_size", 1) if key == "kv.n_tokens" else 1  # pools are whole pages
        low, high = -(-self._least[key] // step), (now - 1) // step

        def fits(count: int) -> bool:
            return self._fits(deployment, key, count * step)

        return largest(low, high, fits) * step if low <= high and fits(low) else None

    def _fits(self, deployment: Deployment, key: str, value: int | str) -> bool:
        try:
            return size_deployment(changed(deployment, key, value), self._machine, self._headers).fits
        except (ConfigError, BackendRefused):  # e.g. a pool smaller than the declared context, or a type without kernels
            return False


def _value(deployment: Deployment, key: str) -> object:
    group, _, name = key.partition(".")
    return getattr(getattr(deployment, group), name, None)
