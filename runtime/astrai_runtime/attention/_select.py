"""Which backend serves: the plan's choice from the configuration, and the caller's demand from `attn_backend`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from astrai_runtime import part
from astrai_runtime.attention._config import AttentionConfig
from astrai_runtime.attention.base import AttentionBackend, AttentionShape, Phase
from astrai_runtime.errors import BackendRefused, UnknownPart
from astrai_runtime.machine import Machine

GROUP = "attention"

Shapes = Callable[[type[AttentionBackend]], AttentionShape]  # what each backend would be asked to serve


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend of one phase, and those that were preferred to it but refused, each with its reason."""

    name: str
    passed_over: tuple[tuple[str, str], ...] = ()


def select(config: AttentionConfig, machine: Machine, shapes: Shapes, phase: Phase) -> Choice:
    """The first backend of `config.priority` that does not refuse; with `config.strict` only the very first may serve.

    `shapes` tells what a backend would serve, because precision depends on who computes. Pure: reads neither the
    environment nor `attn_backend`, imports no torch.

    Raises:
        UnknownPart: the list names a backend that does not exist, wherever in the list it stands.
        BackendRefused: the required one, or every one of them, refuses; the message carries the reasons.
    """
    known = part.names(GROUP)
    for name in config.priority:
        if name not in known:
            raise UnknownPart(GROUP, name, known)
    passed_over: list[tuple[str, str]] = []
    for name in config.priority:
        backend: type[AttentionBackend] = part.load(GROUP, name)
        reason = backend.refuses(machine, shapes(backend), phase)
        if reason is None:
            return Choice(name, tuple(passed_over))
        if config.strict:
            raise BackendRefused(f"attention: '{name}' was required, but {reason}; use attention=auto to fall back")
        passed_over.append((name, reason))
    reasons = "; ".join(f"'{name}': {reason}" for name, reason in passed_over)
    raise BackendRefused(f"attention: no backend can serve {phase} on machine '{machine.name}' ({reasons})")


class _BackendNames:
    """Every backend that exists, as an attribute in capitals: `ATTN_BACKEND.TORCH_NATIVE` is "torch_native".

    It follows the files of attention/: a new backend is a new name.
    """

    def __getattr__(self, name: str) -> str:
        known = part.names(GROUP)
        if name != name.upper() or name.lower() not in known:
            raise AttributeError(str(UnknownPart(GROUP, name.lower(), known)))
        return name.lower()

    def __dir__(self) -> list[str]:
        return [name.upper() for name in part.names(GROUP)]

    def __iter__(self) -> Iterator[str]:
        return iter(part.names(GROUP))


ATTN_BACKEND = _BackendNames()

_required: ContextVar[str | None] = ContextVar("attn_backend", default=None)


@contextmanager
def attn_backend(name: str) -> Iterator[None]:
    """Requires one backend for the requests that are submitted inside the `with` block, in this thread or task.

    Strict: where that backend cannot serve, the request fails instead of using another. Blocks nest; the inner one counts.

    Raises:
        UnknownPart: there is no such backend; raised on entry.
    """
    if name not in part.names(GROUP):
        raise UnknownPart(GROUP, name, part.names(GROUP))
    token = _required.set(name)
    try:
        yield
    finally:
        _required.reset(token)


def required_backend() -> str | None:
    """The backend that the surrounding `attn_backend` requires, None outside of any."""
    return _required.get()
