"""Every error that a user can meet, as one tree.

    AstraiError
    ├── UnknownPart              a name in YAML that no file answers to
    ├── WeightsError             a model's files are damaged, incomplete or unsupported
    ├── SourceError              a model's files could not be found or fetched
    ├── KernelError              the native kernels cannot be compiled, loaded or run
    ├── BackendRefused           a required attention backend cannot serve this machine, model or call
    ├── InvalidRequest           the request cannot be honoured as it stands
    │   ├── UnknownField         a field that this API does not have
    │   └── ContextLengthExceeded
    ├── NotFound                 no such route or object
    │   └── ModelNotFound
    ├── Unauthorized             no key, or a wrong one
    ├── Forbidden                this key, or this place, may not
    ├── CapacityExceeded         larger than a configured bound
    ├── WrongState               not now: it conflicts with what is running
    ├── Unsupported              nothing here can do that
    ├── Busy                     every place is taken; try again after `retry_after_s`
    │   ├── NotReady             the model is still loading, or the service is draining
    │   └── RateLimited          this caller has as much as one caller may
    ├── DeadlineExpired          nothing arrived in time
    ├── Cancelled                the caller took it back
    └── ProviderError            the model's computation failed
        └── UpstreamError        the service that computes for us failed, refused us, or said what nobody understands
            └── UpstreamTimeout  it did not answer in time

`code` is the contract for programs, the message is for people. `param` is a JSON pointer into the request body.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'paged'?`, or nothing when no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


class AstraiError(Exception):
    """The root: what, which value, what would work."""

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class UnknownPart(AstraiError):
    code = "unknown_part"

    def __init__(self, group: str, name: str, known: list[str]) -> None:
        there = ", ".join(known) or "none"
        super().__init__(f"no {group} named '{name}'; there are: {there}{did_you_mean(name, known)}")
        self.group, self.name, self.known = group, name, known


class WeightsError(AstraiError):
    code = "invalid_weights"


class SourceError(AstraiError):
    code = "model_unavailable"


class KernelError(AstraiError):
    code = "kernel_error"


class BackendRefused(AstraiError):
    code = "backend_refused"


class InvalidRequest(AstraiError):
    code = "invalid_value"


class UnknownField(InvalidRequest):
    code = "unknown_parameter"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"

    def __init__(self, needed: int, limit: int, *, param: str | None = None) -> None:
        super().__init__(
            f"this model's context holds {limit} tokens, but the request needs {needed}; "
            "shorten the prompt or lower the token limit",
            param=param,
        )
        self.needed, self.limit = needed, limit


class NotFound(AstraiError):
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class Unauthorized(AstraiError):
    code = "invalid_api_key"


class Forbidden(AstraiError):
    code = "forbidden"


class CapacityExceeded(AstraiError):
    code = "capacity_exceeded"


class WrongState(AstraiError):
    code = "wrong_state"


class Unsupported(AstraiError):
    code = "unsupported"


class Busy(AstraiError):
    code = "busy"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotReady(Busy):
    code = "not_ready"


class RateLimited(Busy):
    code = "rate_limit_exceeded"


class DeadlineExpired(AstraiError):
    code = "deadline_expired"


class Cancelled(AstraiError):
    code = "cancelled"


class ProviderError(AstraiError):
    code = "provider_error"


class UpstreamError(ProviderError):
    code = "upstream_error"


class UpstreamTimeout(UpstreamError):
    code = "upstream_timeout"
